"""Lazy rescaling: softmax that raises its maximum only for a much larger score, without calibration (lesson 8).

(m, l, acc) are right for *any* finite m, so m may be below the largest score by up to τ:

    m' = max s  if  max s > m + τ  else  m        p = exp(s − m') ≤ 2^τ        l' = exp(m − m') · l + Σ p

The loop still computes the maximum of each tile. exp(m − m') is 1 except for the first tile and for tiles with a much
larger score. FlashAttention-4 (2025) rescales this way.
"""

import functools
import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_decoding import checked
from pagewise.flash_decoding_plus_plus import in_triton
from pagewise.flash_decoding_plus_plus.unified_max import HIGH
from pagewise.naive_attention import finite, grouped_matmul, row_max
from pagewise.online_softmax import Partial
from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_torch import partials_of_splits
from pagewise.paged_attention.inputs import ONE_SPLIT, Keys, Queries, Splits
from pagewise.tools.checks import check_number
from pagewise.tools.device import choose_backend
from pagewise.tools.ops import custom_op
from pagewise.tools.transforms import derivative_of, outside_graphs

TILE = 64  # keys that torch folds at once
LARGEST_THRESHOLD = math.floor(HIGH / math.log(2))  # log2: weights up to 2^τ are summed without overflow


def lazy_rescale_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    threshold: float = 8.0,
    num_splits: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Float[Tensor, "B H T D"]:
    """`flash_decoding(q, k, v, …)` that rescales only where the maximum grows by more than `threshold`.

    Args:
        threshold: τ in units of log 2, from 0 to below 91. 0 is the plain online softmax. Weights grow up to 2^τ, and
            2²⁰ of them times float16's largest value must not overflow float32. In float32 and bfloat16, S · 2^τ times
            the largest value must not overflow either. exp(x) is right to within |x| · 2⁻²⁴, so a large τ costs
            float32 some of its last digits.
        num_splits, causal, scale, backend: as in `flash_decoding`.

    Returns:
        out [B, H, T, D] in the dtype of q, 0 for a query that sees no key.

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend cannot take it; the message names it.
    """
    options, splits, refusal = checked(q, k, v, None, ScoreOptions(scale, causal), num_splits)
    check_number("threshold", threshold, low=0.0, below=LARGEST_THRESHOLD + 1)
    if choose_backend(backend, q.device, refusal, derivative=derivative_of(q, k, v)) == "torch":
        return _in_torch(q, k, v, options, splits or ONE_SPLIT, threshold)
    scale, num_splits = options.scale_for(q.shape[-1]), splits.count if splits else None
    return _in_triton(q, k, v, float(threshold), scale, options.causal, num_splits)


@outside_graphs('lazy_rescale_attention(backend="torch")', remedy='backend="triton"')
def _in_torch(q: Queries, k: Keys, v: Keys, options: ScoreOptions, splits: Splits, threshold: float) -> Queries:
    def partial_of(scores: Tensor, values: Tensor) -> Partial:
        seen = Partial.empty(*q.shape[:3], head_size=q.shape[-1], dtype=scores.dtype, device=q.device)
        for tile in (slice(start, start + TILE) for start in range(0, scores.shape[-1], TILE)):
            seen = fold_lazily(seen, scores[..., tile], values[:, :, tile].to(scores.dtype), threshold=threshold)
        return seen

    partials = partials_of_splits(q, k, v, options, splits, partial_of)
    return functools.reduce(Partial.merge, partials).output().to(q.dtype)


def fold_lazily(
    seen: Partial, scores: Float[Tensor, "B H T n"], values: Float[Tensor, "B Hkv n D"], *, threshold: float
) -> Partial:
    """Add a tile of scores and values. m rises to the largest score of a row only if that exceeds m by more than τ."""
    largest = row_max(scores)
    grows = largest > seen.m + threshold * math.log(2)
    m = torch.where(grows, largest, seen.m)  # m' = max s if max s > m + τ else m
    rescale = torch.exp(seen.m - finite(m))  # exp(m − m'): 1 for most tiles
    weights = torch.exp(scores - finite(m)[..., None])  # p = exp(s − m') ≤ 2^τ
    l = rescale * seen.l + weights.sum(dim=-1)  # l' = exp(m − m') · l + Σ p
    acc = rescale[..., None] * seen.acc + grouped_matmul(weights, values)  # acc' = exp(m − m') · acc + P V
    return Partial(m, l, acc)


@custom_op("lazy_rescale_attention", fake=lambda q, *_: q.new_empty(q.shape))
def _in_triton(
    q: Tensor, k: Tensor, v: Tensor, threshold: float, scale: float, causal: bool, num_splits: int | None
) -> Tensor:
    if not q.numel():
        return q.new_empty(q.shape)
    grid, arguments = in_triton.shared_arguments(q, k, v, None, scale, causal, num_splits)
    return in_triton.rescale_lazily(grid, None, threshold * math.log(2), arguments)
