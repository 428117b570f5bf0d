"""From products q · k to scores: what the Triton kernels of whole matrices share, in units of log 2 (from lesson 6 on).

A tile of products may stand either way, queries in rows or in columns: `rows` are the queries' indices and `cols` the
keys', shaped [n, 1] and [1, n] or the reverse. Query i stands at position i + S − T among S keys.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """torch.tanh(x), also relatively exact near 0, where 1 − exp(−2|x|) cancels: there, its series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.09, near, tl.where(x < 0, -far, far))


@triton.jit
def visible(rows, cols, sizes, window, mask, CAUSAL: tl.constexpr):
    """Which of these keys these queries may look at. window and mask (pointer, strides of rows and columns) or None."""
    T, S = sizes
    distance = cols - rows - (S - T)  # 0 on the diagonal, negative towards the past
    seen = (rows < T) & (cols < S)
    if CAUSAL:
        seen &= distance <= 0
    if window is not None:
        seen &= distance > -window
    if mask is not None:
        mask_ptr, stride_row, stride_col = mask
        at = mask_ptr + rows.to(tl.int64) * stride_row + cols.to(tl.int64) * stride_col
        seen &= tl.load(at, mask=seen, other=0) != 0
    return seen


@triton.jit
def capped(products, scale, softcap):
    """Scores of the products q · k, in units of log 2, as scale and softcap are. With a softcap, scale is that of the
    tanh's argument; None: no softcap."""
    return products * scale if softcap is None else softcap * tanh(products * scale)


@triton.jit
def biased(scores, rows, cols, sizes, slope):
    """Scores with ALiBi's bias −slope · distance. slope: or None."""
    if slope is not None:
        T, S = sizes
        scores -= slope * tl.abs(cols - rows - (S - T)).to(tl.float32)
    return scores


@triton.jit
def kept(first_row, first_col, head, seed, threshold, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which weights of a tile [ROWS, COLS] dropout keeps: `pagewise.flash_attention.dropout`, bit for bit."""
    tl.static_assert(COLS % 8 == 0, "eight neighbours share a draw")
    row = (first_row + tl.arange(0, ROWS))[:, None].to(tl.uint32)
    group = (first_col // 8 + tl.arange(0, COLS // 8))[None, :].to(tl.uint32)
    row, group = tl.broadcast(row, group)
    head = tl.zeros_like(row) + head.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, row, group, head, tl.zeros_like(row))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., 2, 2]: w0 w1 w2 w3
    draws = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(draws, [ROWS, COLS]).to(tl.int32) >= threshold
