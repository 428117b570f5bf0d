"""Attention of packed queries over a paged cache in vLLM's layout, by its kernels v1 and v2 (lesson 9).

They know one query per sequence. So each query is a sequence of its own here, which ends with it: the table is that of
its sequence, the length its position + 1. K and V are read once for each query, which suits decoding; the engine takes
these kernels to show them at work, and Triton's to be fast.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pagewise.paged_attention import in_cuda
from pagewise.paged_attention.door import choose_version
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_attention_varlen.step import Step

PARTITION_SIZE = 512


class PlanInCuda:
    """What all layers of a step share: a table and a length for each query."""

    def __init__(self, step: Step) -> None:
        block_tables, seq_lens, cu_seqlens_q, block_size, *_ = step
        self.options, self.v_scale = step.options, step.v_scale
        self.max_seq_len = block_tables.shape[1] * block_size
        if not step.decodes:
            sequences = torch.arange(len(seq_lens), device=seq_lens.device).repeat_interleave(cu_seqlens_q.diff())
            left = cu_seqlens_q[sequences + 1] - torch.arange(1, len(sequences) + 1, device=seq_lens.device)
            block_tables, seq_lens = block_tables[sequences], (seq_lens[sequences] - left).to(torch.int32)
        self.block_tables, self.seq_lens = block_tables, seq_lens

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N Hkv D_x P x"],
        v_cache: Shaped[Tensor, "N Hkv D P"],
    ) -> Float[Tensor, "total_q H D"]:
        """out of `paged_attention_varlen` for one layer; nothing is checked."""
        inputs = PagedInputs(q, k_cache, v_cache, self.block_tables, self.seq_lens, self.v_scale)
        options = self.options._replace(scale=self.options.scale_for(q.shape[-1]))
        in_one_pass = choose_version(*q.shape[:2], self.max_seq_len) == "v1"
        sizes = {"max_seq_len": self.max_seq_len, "partition_size": None if in_one_pass else PARTITION_SIZE}
        return in_cuda.attend(inputs, options, **sizes)[0]
