"""Attention of packed queries over a paged cache in vLLM's layout, with the CUDA kernels v1 and v2 (lesson 9).

v1 and v2 take one query per sequence. Here every packed query becomes a sequence of its own that ends with this query:
it has the block table of its sequence, and its length is its position + 1. The kernels read K and V once for each
query. That suits decoding. The Triton kernel reads them once for a chunk of queries.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor

from pagewise.paged_attention import in_cuda
from pagewise.paged_attention.vllm import choose_version
from pagewise.paged_attention_varlen.step import Packed, Step

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
        self, q: Packed, k_cache: Shaped[Tensor, "N Hkv D_x P x"], v_cache: Shaped[Tensor, "N Hkv D P"]
    ) -> Packed:
        """Return out of `paged_attention_varlen` for one layer. This method checks nothing.

        More queries than a grid has places for take several launches.
        """
        in_one_pass = choose_version(*q.shape[:2], self.max_seq_len) == "v1"
        sizes = (self.max_seq_len, None if in_one_pass else PARTITION_SIZE, 1)
        numbers = (self.v_scale, self.options.scale_for(q.shape[-1]), self.options.alibi_slopes, *sizes)
        parts = zip(*(x.split(in_cuda.MAX_NUM_SEQS) for x in (q, self.block_tables, self.seq_lens)), strict=True)
        outs = [in_cuda.attend(rows, k_cache, v_cache, *of_rows, *numbers)[0] for rows, *of_rows in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
