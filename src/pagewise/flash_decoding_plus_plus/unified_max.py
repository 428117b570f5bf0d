"""Asynchronised softmax with a unified maximum: one φ for all scores, so that no split waits for another (lesson 8).

Softmax may subtract any number from its scores, not only their maximum:

    l = Σ exp(s − φ)        acc = Σ exp(s − φ) · v        softmax(s) @ v = acc / l

This holds if no exp overflows and no exp that matters underflows. With one φ for all keys, partial results are simply
added. Each split also keeps its largest score m, without rescaling by it. At the end, m shows the rows for which φ was
wrong, and `flash_decoding` computes these rows again. Hong et al. 2023, section 3.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from pagewise.flash_decoding import check_lengths, checked, each_sequence
from pagewise.flash_decoding_plus_plus import in_triton
from pagewise.naive_attention import grouped_matmul, row_max
from pagewise.online_softmax import Partial
from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_torch import attend_in_splits, partials_of_splits
from pagewise.paged_attention.inputs import ONE_SPLIT, Keys, Queries, Splits
from pagewise.tools.checks import FLOAT32_MAX, FLOATS, check_number
from pagewise.tools.device import choose_backend, looks
from pagewise.tools.launch import launch
from pagewise.tools.ops import custom_op
from pagewise.tools.transforms import check_derivative, has_values, outside_graphs

KEYS, LARGEST_VALUE = 2**20, torch.finfo(torch.float16).max  # the band allows this many keys, and values this large


def limits(low: float, num_keys: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the lower edge of a band, at least `low`, and the smallest sum that can be trusted: tiny · num_keys / eps.

    A larger sum over so many keys is exact to within eps even if every number loses all below tiny.
    """
    smallest = torch.finfo(dtype).tiny * max(1, num_keys) / torch.finfo(dtype).eps
    return max(low, math.log(smallest)), smallest


# At the lower edge, the largest weight of a row still outweighs everything that underflowed. At the upper edge, the
# sums of weights and of float16 values do not overflow. Rounding inwards makes both edges exact in float32.
LOW = math.ceil(limits(-math.inf, KEYS, torch.float32)[0])  # −57
HIGH = math.floor(math.log(torch.finfo(torch.float32).max / (KEYS * LARGEST_VALUE)))  # 63


@dataclass(frozen=True)
class UnifiedMax:
    """φ and its safe band: the largest score of a row must satisfy low < score − φ < high.

    Raises ValueError or TypeError if a field is not a finite number, or if low ≥ high.
    """

    phi: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("phi", "low", "high"):
            check_number(name, getattr(self, name), low=-FLOAT32_MAX, below=FLOAT32_MAX)
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got low = {self.low} and high = {self.high}")


def calibrate(scores: Float[Tensor, "..."]) -> UnifiedMax | None:
    """Return φ for scores like these, with the safe band of float32: −57 < score − φ < 63.

    The band allows 2²⁰ keys and values as large as those of float16. φ is an integer that puts the observed range in
    the middle of the band. The range may fill three quarters of the band, which is 90. The rest is for scores that were
    not observed. If the range is wider, the result is None: use `flash_decoding`. All scores count, not only the
    largest of each row, because a row may see a single key.

    Args:
        scores: as they enter the softmax, in any shape. A score of −inf is a masked key and is ignored.

    Raises:
        ValueError, TypeError: scores contain NaN or +inf, or no finite score, or are not a floating-point tensor.
    """
    if not isinstance(scores, Tensor) or scores.dtype not in (*FLOATS, torch.float64):
        got = getattr(scores, "dtype", type(scores).__name__)
        raise TypeError(f"scores must be a floating-point tensor, got {got}")
    visible = scores[scores != -torch.inf]
    if not visible.numel():
        raise ValueError(f"scores must hold a finite score, got {scores.numel()} scores that are all −inf")
    lowest, highest = (float(end) for end in visible.aminmax())
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise ValueError("scores must be finite, or −inf where a key is masked, got NaN or +inf")
    if highest - lowest > 0.75 * (HIGH - LOW):
        return None
    return UnifiedMax(phi=round(lowest + (highest - lowest - LOW - HIGH) / 2), low=LOW, high=HIGH)


def unified_max_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    unified_max: UnifiedMax,
    *,
    seq_lens: Int32[Tensor, " B"] | None = None,
    num_splits: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Float[Tensor, "B H T D"], Bool[Tensor, "B H T"]]:
    """Compute `flash_decoding(q, k, v, …)` with φ as the maximum where that is safe, and exactly elsewhere.

    The result is as accurate as that of `flash_decoding` for every φ and every band. A row is recomputed by the online
    softmax if it sees a key and its largest score m violates low < m − φ < high, as NaN does. So is a row whose sums
    overflowed, or became so small, by weights below 1, that numbers which underflowed could matter.

    Args:
        unified_max: the result of `calibrate`, or a `UnifiedMax` of your own.
        seq_lens: as in `flash_decoding`. They are checked on a CPU and by the torch backend. On a GPU, "triton" takes a
            length below 0 as 0 and a length above S as S.
        num_splits, causal, scale: as in `flash_decoding`.
        backend: as in `flash_decoding`. "torch" waits for the device once to see whether a row must be recomputed.
            "triton" never waits.

    Returns:
        out [B, H, T, D] in the dtype of q, 0 for a query that sees no key; and the rows that were recomputed.

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend does not support it. The message names it.
        ValueError: a gradient is needed. `flash_decoding` has one.
    """
    if not isinstance(unified_max, UnifiedMax):
        raise TypeError(
            f"unified_max must be a UnifiedMax, got {type(unified_max).__name__}"
            + (": calibrate found the scores' range too wide, use flash_decoding" if unified_max is None else "")
        )
    check_derivative("unified_max_attention", q, k, v, remedy="flash_decoding")
    options, splits, refusal = checked(q, k, v, seq_lens, ScoreOptions(scale, causal), num_splits)
    if choose_backend(backend, q.device, refusal) == "torch":
        return _in_torch(q, k, v, seq_lens, unified_max, options, splits or ONE_SPLIT)
    if seq_lens is not None and looks(None, seq_lens):
        check_lengths(seq_lens, k.shape[2])
    band = (float(x) for x in (unified_max.phi, unified_max.low, unified_max.high))
    numbers = (*band, options.scale_for(q.shape[-1]), options.causal, splits.count if splits else None)
    return _in_triton(q, k, v, seq_lens, *numbers)


@outside_graphs('unified_max_attention(backend="torch")', remedy='backend="triton"')
def _in_torch(
    q: Queries, k: Keys, v: Keys, seq_lens: Tensor | None, band: UnifiedMax, options: ScoreOptions, splits: Splits
) -> tuple[Queries, Bool[Tensor, "B H T"]]:
    if seq_lens is not None and len(q):
        sequences = each_sequence('unified_max_attention(backend="torch")', q, k, v, seq_lens)
        results = [_in_torch(*qkv, None, band, options, splits) for qkv in sequences]
        return tuple(map(torch.cat, zip(*results, strict=True)))

    def partial_of(scores: Float[Tensor, "B H T n"], values: Keys) -> Partial:
        weights = torch.exp(scores.double() - band.phi).to(scores.dtype)  # exp(s − φ), the difference to its last digit
        return Partial(row_max(scores), weights.sum(dim=-1), grouped_matmul(weights, values.to(scores.dtype)))

    partials = partials_of_splits(q, k, v, options, splits, partial_of)
    m, l, acc = (torch.stack(parts) for parts in zip(*partials, strict=True))
    seen = Partial(m.amax(dim=0), l.sum(dim=0), acc.sum(dim=0))  # no split waits for the maximum of another
    low, smallest = limits(band.low, k.shape[2], seen.l.dtype)
    exponent, largest = seen.m - band.phi, seen.acc.abs().amax(dim=-1)
    safe = (exponent > low) & (exponent < band.high) & torch.isfinite(seen.l) & torch.isfinite(largest)
    safe &= (exponent >= 0) | (largest >= smallest)
    recomputed = (seen.m != -torch.inf) & ~safe  # rows that see a key, and whose sums cannot be trusted
    out = seen.output().to(q.dtype)
    if not has_values(recomputed) or recomputed.any():
        exact, _ = attend_in_splits(q, k, v, options, splits)
        out = torch.where(recomputed[..., None], exact.to(q.dtype), out)
    return out, recomputed


@custom_op(
    "unified_max_attention",
    fake=lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.bool)),
)
def _in_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor | None,
    phi: float,
    low: float,
    high: float,
    scale: float,
    causal: bool,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    # Rows for which φ was not safe are recomputed by a second launch, with the plain online softmax. A program none of
    # whose rows is unsafe reads no key. The host never waits to see whether a row is unsafe.
    from pagewise.kernels.flash_decoding_plus_plus import add_splits_kernel, unified_max_attention_kernel

    out, unsafe = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.uint8)
    if not q.numel():
        return out, unsafe.view(torch.bool)
    grid, arguments = in_triton.shared_arguments(q, k, v, seq_lens, scale, causal, num_splits)
    launch(unified_max_attention_kernel, grid, phi=phi, **arguments)
    low, smallest = limits(low, k.shape[2], torch.float32)  # here, because a traced S is not a number
    flags, band = unsafe.view(-1), {"phi": phi, "low": low, "high": high, "smallest": smallest}
    in_triton.merge(add_splits_kernel, arguments["partials"], out, unsafe_ptr=flags, **band)
    exact = in_triton.rescale_lazily(grid, flags, 0.0, arguments)
    unsafe = unsafe.view(torch.bool)
    return torch.where(unsafe[..., None], exact, out), unsafe
