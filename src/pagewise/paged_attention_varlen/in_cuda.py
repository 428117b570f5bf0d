"""Attention of packed queries over a paged cache in vLLM's layout, with the CUDA kernels v1 and v2 (lesson 9).

v1 and v2 take one query per sequence. Here every packed query becomes a sequence of its own that ends with this query:
it has the block table of its sequence, and its length is its position + 1. The kernels read K and V once for each
query. That suits decoding. The Triton kernel reads them once for a chunk of queries.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pagewise.paged_attention import in_cuda
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_attention.vllm import choose_version
from pagewise.paged_attention_varlen.step import Step

PARTITION_SIZE = 512


class PlanInCuda:
    """The block table and the length of each query, which all layers of a step share."""

    def __init__(self, step: Step) -> None:
        block_tables, seq_lens, cu_seqlens_q = step.block_tables, step.seq_lens, step.cu_seqlens_q
        self.options, self.v_scale = step.options, step.v_scale
        self.max_seq_len = block_tables.shape[1] * step.block_size
        if not step.decodes:
            sequences = torch.arange(len(seq_lens), device=seq_lens.device).repeat_interleave(cu_seqlens_q.diff())
            later = cu_seqlens_q[sequences + 1] - torch.arange(1, len(sequences) + 1, device=seq_lens.device)
            block_tables, seq_lens = block_tables[sequences], (seq_lens[sequences] - later).clamp(min=0).int()
        self.block_tables, self.seq_lens = block_tables, seq_lens

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N Hkv D_x P x"],
        v_cache: Shaped[Tensor, "N Hkv D P"],
    ) -> Float[Tensor, "total_q H D"]:
        """Return out of `paged_attention_varlen` for one layer. This method checks nothing.

        More queries than a grid has places for take several launches.
        """
        in_one_pass = choose_version(*q.shape[:2], self.max_seq_len) == "v1"
        sizes = {"max_seq_len": self.max_seq_len, "partition_size": None if in_one_pass else PARTITION_SIZE}
        parts = zip(*(x.split(in_cuda.MAX_NUM_SEQS) for x in (q, self.block_tables, self.seq_lens)), strict=True)
        inputs = (PagedInputs(q, k_cache, v_cache, tables, lens, self.v_scale) for q, tables, lens in parts)
        outs = [in_cuda.attend(each, self.options, **sizes)[0] for each in inputs]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
