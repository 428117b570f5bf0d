"""Attention over keys that arrive a tile at a time: what all Triton kernels of the course share (from lesson 3 on).

As in `online_softmax.Partial`, all that a row has seen of its scores s and their values v fits in

    m = max s        l = Σ exp(s − m)        acc = Σ exp(s − m) · v

in float32. Shapes: m [rows], l [rows], acc [rows, D]; scores [rows, keys]. A score of −∞ is a key nobody may see.
Milakov & Gimelshein 2018; Rabe & Staats 2021.
"""

import triton
import triton.language as tl


@triton.jit
def finite(m):
    """m, with 0 where no key is visible yet: (−∞) − (−∞) would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def empty(ROWS: tl.constexpr, D: tl.constexpr):
    """(m, l, acc) before any key is seen."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)


@triton.jit
def fold(m, l, scores):
    """(m, l) with a tile of scores folded in, and what is left to do: acc = rescale · acc + weights @ v."""
    m_new = tl.maximum(m, tl.max(scores, axis=1))  # m' = max(m, max s)
    rescale = tl.exp(m - finite(m_new))  # exp(m − m')
    weights = tl.exp(scores - finite(m_new)[:, None])  # p = exp(s − m')
    l_new = l * rescale + tl.sum(weights, axis=1)  # l' = exp(m − m') · l + Σ p
    return m_new, l_new, rescale, weights


@triton.jit
def fold_base_2(m, l, scores):
    """`fold` of scores in units of log 2: exp(s) is 2 to the s · log₂ e, and a GPU computes powers of 2 only.

    Who multiplies its scores by a scale anyway has log₂ e for nothing. m comes out in these units, too: m · ln 2.
    """
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    rescale = tl.exp2(m - finite(m_new))
    weights = tl.exp2(scores - finite(m_new)[:, None])
    return m_new, l * rescale + tl.sum(weights, axis=1), rescale, weights


@triton.jit
def exp_of_difference(s, phi):
    """exp(s − φ) to float32's last digits as 2ⁿ · exp(s − φ − n · log 2), where exp of a large number x loses x · 2⁻²⁴.

    s − φ is kept as a sum, d + lost, that is exact for any φ (Knuth 1969), and n · log 2 as n · (355/512 − 0.000212…).
    """
    gone = s - phi < -200.0  # its weight is 0
    s = tl.where(gone, phi, s)
    d = s - phi
    taken = s - d  # for φ, in the rounding of d
    lost = (s - (d + taken)) + (taken - phi)
    n = tl.floor(d * 1.4426950408889634 + 0.5)
    rest = d - n * 0.693359375 + (n * 2.1219444005469057e-4 + lost)
    return tl.where(gone, 0.0, tl.exp2(n) * tl.exp(rest))


@triton.jit
def rounded(weights, DTYPE: tl.constexpr):
    """float32 weights as a product with values of DTYPE takes them: with its digits, and the exponents of float32.

    Those of float16 end at 65504, so that TF32 stands in for it. Tensor cores would cut its last digits off.
    """
    if tl.float16 == DTYPE:  # to the nearest number whose last 13 bits are 0; a GPU's NaN, 0x7fffffff, would become −0
        nearest = ((weights.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        weights = tl.where(weights == weights, nearest, weights)
    return weights.to(tl.bfloat16).to(tl.float32) if tl.bfloat16 == DTYPE else weights


@triton.jit
def fold_unified(m, l, scores, phi, DTYPE: tl.constexpr):
    """`fold` with one φ for the maximum of every row: no sum is touched again, and no thread waits for another.

    m, l [rows, keys]: of each place in a tile by itself, until `reduced`. m is watched, and used for nothing. The
    weight of a row's largest score is not 1, so l sums weights as they are multiplied: what is lost of them cancels.
    """
    weights = exp_of_difference(scores, phi) if tl.float32 == DTYPE else tl.exp(scores - phi)  # p = exp(s − φ)
    weights = rounded(weights, DTYPE)
    return tl.maximum(m, scores), l + weights, weights  # l' = l + p


@triton.jit
def reduced(m, l):
    """(m, l) [rows] of what `fold_unified` kept [rows, keys]."""
    return tl.max(m, axis=1), tl.sum(l, axis=1)


@triton.jit
def fold_lazily(m, l, scores, threshold, DTYPE: tl.constexpr):
    """`fold` with an m that follows the maximum only where that exceeds it by more than `threshold`."""
    largest = tl.max(scores, axis=1)
    m_new = tl.where(largest > m + threshold, largest, m)  # m' = max s if max s > m + τ else m
    rescale = tl.exp(m - finite(m_new))  # exp(m − m'): 1 for most tiles
    weights = rounded(tl.exp(scores - finite(m_new)[:, None]), DTYPE)  # p = exp(s − m') ≤ exp τ
    return m_new, l * rescale + tl.sum(weights, axis=1), rescale, weights


@triton.jit
def merge(m, l, acc, m_parts, l_parts, acc_parts):
    """(m, l, acc) of one row with n partials of it merged in at once: m_parts [n], l_parts [n], acc_parts [n, D]."""
    m_new = tl.maximum(m, tl.max(m_parts, axis=0))  # m' = max(m, max mᵢ)
    rescale = tl.exp(m - finite(m_new))  # exp(m − m')
    weights = tl.exp(m_parts - finite(m_new))  # wᵢ = exp(mᵢ − m')
    l_new = l * rescale + tl.sum(weights * l_parts, axis=0)  # l' = exp(m − m') · l + Σ wᵢ · lᵢ
    acc_sum = tl.sum(weights[:, None] * acc_parts, axis=0)[None, :]
    acc_new = acc * rescale[:, None] + acc_sum  # acc' = exp(m − m') · acc + Σ wᵢ · accᵢ
    return m_new, l_new, acc_new


@triton.jit
def add_up(m, l, acc, m_parts, l_parts, acc_parts):
    """`merge` of partials that share φ: their sums."""
    return (
        tl.maximum(m, tl.max(m_parts, axis=0)),
        l + tl.sum(l_parts, axis=0),
        acc + tl.sum(acc_parts, axis=0)[None, :],
    )


@triton.jit
def left_the_band(m, l, acc, phi, low, high, smallest):
    """Rows that see a key and whose sums about φ cannot be trusted: `flash_decoding_plus_plus.unified_max` has why."""
    exponent, size = m - phi, tl.abs(acc)
    largest = tl.max(tl.where(size < float("inf"), size, float("inf")), axis=1)  # NaN counts as ∞
    safe = (exponent > low) & (exponent < high) & (l < float("inf")) & (largest < float("inf"))
    safe = safe & ((exponent >= 0) | (largest >= smallest))
    sees_nothing = (m == float("-inf")) & (l == 0.0)
    return (safe == 0) & (sees_nothing == 0)


@triton.jit
def output(m, l, acc):
    """softmax(s) @ v = acc / l and logsumexp(s) = m + log l: 0 and −∞ for a row that saw no key, where l is 0."""
    l = tl.where(l == 0.0, 1.0, l)
    return acc / l[:, None], m + tl.log(l)
