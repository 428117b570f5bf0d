"""Asynchronised softmax with a unified maximum: one φ for all scores, so that no split waits for another (lesson 8).

Softmax may subtract any number from its scores, not only their maximum:

    l = Σ exp(s − φ)        acc = Σ exp(s − φ) · v        softmax(s) @ v = acc / l

This holds if no exp overflows and no exp that matters underflows. With one φ for all keys, partial results are simply
added. Each split also keeps its largest score m, without rescaling by it. At the end, m shows the rows for which φ was
wrong, and `flash_decoding` computes these rows again. Hong et al. 2023, section 3.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from pagewise.flash_decoding import check_lengths, check_seq_lens, each_sequence, flash_decoding, refuses
from pagewise.flash_decoding_plus_plus import in_triton
from pagewise.flash_decoding_plus_plus.band import HIGH, LOW, Band
from pagewise.naive_attention import grouped_matmul, row_max
from pagewise.online_softmax import Partial
from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_torch import equal_splits, partials_of_splits
from pagewise.tools.checks import FLOAT32_MAX, FLOATS, check_count, check_number, check_qkv
from pagewise.tools.device import choose_backend, looks
from pagewise.tools.transforms import check_derivative, has_values, outside_graphs


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
    not observed. If the range is wider, the result is None: use `flash_decoding`.

    All scores count, not only the largest of each row, because a row may see a single key. A range that contains
    nearly all scores is therefore not enough.

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
    softmax if it sees a key and its largest score m violates low < m − φ < high. NaN violates it.

    A band wider than the limits of the floats does not help. A row is also recomputed if its sums overflowed, or if
    weights below 1 made its sums so small that numbers which underflowed could matter.

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
    options, num_splits = checked_options(q, k, v, scale, causal, num_splits)
    if not isinstance(unified_max, UnifiedMax):
        raise TypeError(
            f"unified_max must be a UnifiedMax, got {type(unified_max).__name__}"
            + (": calibrate found the scores' range too wide, use flash_decoding" if unified_max is None else "")
        )
    check_derivative("unified_max_attention", q, k, v, remedy="flash_decoding")
    check_seq_lens(q, seq_lens)
    backend = choose_backend(backend, q.device, refuses(q, k, v))
    if backend == "torch":
        return _in_torch(q, k, v, seq_lens, unified_max, options, num_splits)
    if seq_lens is not None and looks(None, seq_lens):
        check_lengths(seq_lens, k.shape[2])
    limits = (float(x) for x in (unified_max.phi, unified_max.low, unified_max.high))
    return in_triton.unified_max(q, k, v, seq_lens, *limits, options.scale_for(q.shape[-1]), options.causal, num_splits)


def checked_options(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, num_splits: int | None
) -> tuple[ScoreOptions, int | None]:
    """Check the options of both softmaxes of this lesson together with q, k and v. Return them and num_splits."""
    check_qkv(q, k, v)
    if num_splits is not None:
        check_count("num_splits", num_splits)
    return ScoreOptions(scale, causal).checked(q, k.shape[2]), None if num_splits is None else int(num_splits)


@outside_graphs('unified_max_attention(backend="torch")', remedy='backend="triton"')
def _in_torch(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    seq_lens: Int32[Tensor, " B"] | None,
    unified_max: UnifiedMax,
    options: ScoreOptions,
    num_splits: int | None,
) -> tuple[Float[Tensor, "B H T D"], Bool[Tensor, "B H T"]]:
    if seq_lens is not None and len(q):
        sequences = each_sequence('unified_max_attention(backend="torch")', q, k, v, seq_lens)
        results = [_in_torch(*qkv, None, unified_max, options, num_splits) for qkv in sequences]
        return tuple(map(torch.cat, zip(*results, strict=True)))
    partial_of = functools.partial(unified_partial, phi=unified_max.phi)
    seen = add_up(partials_of_splits(q, k, v, options, equal_splits(num_splits or 1), partial_of))
    band = Band.of(unified_max.phi, unified_max.low, unified_max.high, k.shape[2], seen.l.dtype)
    recomputed = left_the_band(seen, band)
    out = seen.output().to(q.dtype)
    if not has_values(recomputed) or recomputed.any():
        shape = {"scale": options.scale, "causal": options.causal, "num_splits": num_splits}
        exact = flash_decoding(q, k, v, **shape, backend="torch")
        out = torch.where(recomputed[..., None], exact, out)
    return out, recomputed


def unified_partial(scores: Float[Tensor, "B H T n"], values: Float[Tensor, "B Hkv n D"], *, phi: float) -> Partial:
    """Return the sums of a split with φ in place of its maximum. m is watched, and used for nothing."""
    weights = torch.exp(scores.double() - phi).to(scores.dtype)  # exp(s − φ), the difference to its last digit
    return Partial(row_max(scores), weights.sum(dim=-1), grouped_matmul(weights, values.to(scores.dtype)))


def add_up(splits: list[Partial]) -> Partial:
    """Merge splits that share φ by adding them. No split waits for the maximum of another."""
    m, l, acc = (torch.stack(parts) for parts in zip(*splits, strict=True))
    return Partial(m.amax(dim=0), l.sum(dim=0), acc.sum(dim=0))


def left_the_band(seen: Partial, band: Band) -> Bool[Tensor, "*rows"]:
    """Return the rows that see a key and whose sums cannot be trusted."""
    exponent, largest = seen.m - band.phi, seen.acc.abs().amax(dim=-1)
    safe = (exponent > band.low) & (exponent < band.high) & torch.isfinite(seen.l) & torch.isfinite(largest)
    safe &= (exponent >= 0) | (largest >= band.smallest)
    return (seen.m != -torch.inf) & ~safe
