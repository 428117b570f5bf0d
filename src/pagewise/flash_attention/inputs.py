"""The one value that `flash_attention` checks and every backend reads, and the memory for the results (lesson 6)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from pagewise.flash_attention.dropout import Dropout
from pagewise.options import ScoreOptions

NAIVE = "pagewise.naive_attention.attention"  # it has every derivative

Queries = Out = Float[Tensor, "B H T D"]
Keys = Float[Tensor, "B Hkv S D"]  # or values
OfRows = Float[Tensor, "B H T"]  # a number per query
Gradients = tuple[Queries, Keys, Keys]


class FlashInputs(NamedTuple):
    """Checked tensors and options. Packed sequences are one batch [1, H, total, D] with their cu_seqlens."""

    q: Queries
    k: Keys
    v: Keys
    alibi_slopes: Float[Tensor, " H"] | None
    attn_mask: Bool[Tensor, "..."] | None
    dropout_seed: Int64[Tensor, ""] | None
    cu_seqlens_q: Int32[Tensor, " ends"] | None  # sequence b is rows cu_seqlens[b] … cu_seqlens[b + 1] − 1
    cu_seqlens_k: Int32[Tensor, " ends"] | None
    scale: float
    causal: bool
    window: int | None
    softcap: float
    dropout_p: float
    backend: str  # "torch", "triton", or the function whose loops run in torch, "flash_attention_1"
    tile_rows: int = 128  # of the loops in torch: large enough that products outweigh Python
    tile_cols: int = 128

    @property
    def options(self) -> ScoreOptions:
        return ScoreOptions(self.scale, self.causal, self.window, self.softcap, self.alibi_slopes, self.attn_mask)

    @property
    def is_heavy(self) -> bool:
        """Whether a mask in memory or dropout takes registers of its own."""
        return self.attn_mask is not None or self.dropout_p > 0

    @property
    def dropout(self) -> Dropout:
        return Dropout(self.dropout_p, self.dropout_seed)


def empty_like(x: Out | Keys) -> Out | Keys:
    """An empty tensor with the strides of x if its rows are contiguous, else contiguous."""
    empty = torch.empty_like(x)
    return empty if empty.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def outputs(inputs: FlashInputs, requires_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty out, lse, and `saved`, which is what the backward needs besides, or an empty tensor.

    The Triton kernels save two numbers per query in float32, [2, B, H, T]. The papers' loops save O before it is
    rounded, because D = rowsum(dO ∘ O) is subtracted from numbers close to it, and m and l, or L, as further columns.
    """
    q, (B, H, T, D) = inputs.q, inputs.q.shape
    lse = torch.empty((B, H, T), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    size = (0,)
    if requires_grad and inputs.backend == "triton" and q.dtype == torch.float32:
        size = (2, B, H, T)
    elif requires_grad and inputs.backend.startswith("flash_attention_"):
        size = (B, H, T, D + (2 if inputs.backend == "flash_attention_1" else 1))
    return empty_like(q), lse, lse.new_empty(size)
