"""Attention over keys that arrive a tile at a time: the device functions that Triton kernels share (from lesson 3 on).

As in `online_softmax.Partial`, three quantities in float32 summarise a row's scores s and their values v:

    m = max s        l = Σ exp(s − m)        acc = Σ exp(s − m) · v

Shapes: m [rows], l [rows], acc [rows, D]; scores [rows, keys]. A score of −∞ is a key that the row may not see.
Milakov & Gimelshein 2018; Rabe & Staats 2021.
"""

import triton
import triton.language as tl

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def finite(m):
    """m, with 0 where no key is visible yet: (−∞) − (−∞) would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def empty(ROWS: tl.constexpr, D: tl.constexpr):
    """Return (m, l, acc) before any key is seen."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)


@triton.jit
def fold(m, l, scores):
    """Fold a tile of scores in: return (m, l, alpha, weights). The caller computes acc = alpha · acc + weights @ v."""
    m_new = tl.maximum(m, tl.max(scores, axis=1))  # m' = max(m, max s)
    alpha = tl.exp(m - finite(m_new))  # exp(m − m')
    weights = tl.exp(scores - finite(m_new)[:, None])  # p = exp(s − m')
    l_new = l * alpha + tl.sum(weights, axis=1)  # l' = exp(m − m') · l + Σ p
    return m_new, l_new, alpha, weights


@triton.jit
def merge(m, l, acc, m_parts, l_parts, acc_parts):
    """Merge n partials of one row into its (m, l, acc): m_parts [n], l_parts [n], acc_parts [n, D]."""
    m_new = tl.maximum(m, tl.max(m_parts, axis=0))  # m' = max(m, max mᵢ)
    alpha = tl.exp(m - finite(m_new))  # exp(m − m')
    weights = tl.exp(m_parts - finite(m_new))  # wᵢ = exp(mᵢ − m')
    l_new = l * alpha + tl.sum(weights * l_parts, axis=0)  # l' = exp(m − m') · l + Σ wᵢ · lᵢ
    acc_sum = tl.sum(weights[:, None] * acc_parts, axis=0)[None, :]
    acc_new = acc * alpha[:, None] + acc_sum  # acc' = exp(m − m') · acc + Σ wᵢ · accᵢ
    return m_new, l_new, acc_new


@triton.jit
def output(m, l, acc):
    """Return softmax(s) @ v = acc / l and logsumexp(s) = m + log l. A row that saw no key (l = 0) gives 0 and −∞."""
    l = tl.where(l == 0.0, 1.0, l)
    return acc / l[:, None], m + tl.log(l)
