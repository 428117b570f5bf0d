"""From products q · k to scores: functions that the Triton kernels of whole matrices share (from lesson 6 on).

`rows` are indices of queries and `cols` are indices of keys. Their shapes are [n, 1] and [1, n], or the reverse: a tile
of scores may have the queries in its rows or in its columns. Query i has position i + S − T among S keys. Scores are
in units of log 2, so that a weight is 2 to the power of (score − m).
"""

import triton
import triton.language as tl

from pagewise.kernels.partial import LOG2_E


@triton.jit
def tanh(x):
    """torch.tanh(x). Near 0, where 1 − exp(−2|x|) cancels, it is computed by its series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    last = 62 / 2835 + square * (-1382 / 155925 + square * (21844 / 6081075 - square * (929569 / 638512875)))
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * last))))
    return tl.where(square < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def visible(rows, cols, sizes, window, attn_mask, CAUSAL: tl.constexpr):
    """Whether each query sees each key. window: or None. attn_mask: (pointer, strides of row and column), or None."""
    T, S = sizes
    distance = cols - rows - (S - T)  # 0 on the diagonal, negative for keys before it
    seen = (rows < T) & (cols < S)
    if CAUSAL:
        seen &= distance <= 0
    if window is not None:
        seen &= distance > -window
    if attn_mask is not None:
        ptr, stride_row, stride_col = attn_mask
        elements = ptr + rows.to(tl.int64) * stride_row + cols.to(tl.int64) * stride_col
        seen &= tl.load(elements, mask=seen, other=0) != 0
    return seen


@triton.jit
def key_range(first_row, T, S, window, SIZES: tl.constexpr):
    """The keys that some query of a tile sees, and their tiles: (start, stop, first, whole, cut, end).

    Of the tiles of keys first … end − 1, the tiles whole … cut − 1 are seen whole by every query.
    """
    last_row = tl.minimum(first_row + SIZES.ROWS, T) - 1
    start, stop, whole_start, whole_stop = 0, S, 0, S
    if SIZES.CAUSAL:
        stop = tl.minimum(S, tl.maximum(0, last_row + 1 + S - T))
        whole_stop = tl.minimum(S, tl.maximum(0, first_row + 1 + S - T))
    if window is not None:
        start = tl.minimum(stop, tl.maximum(0, first_row + 1 + S - T - window))
        whole_start = tl.minimum(stop, tl.maximum(0, last_row + 1 + S - T - window))
    end = tl.cdiv(stop, SIZES.COLS)
    whole = tl.minimum(tl.cdiv(whole_start, SIZES.COLS), end)
    return start, stop, start // SIZES.COLS, whole, tl.maximum(whole_stop // SIZES.COLS, whole), end


@triton.jit
def query_tiles(first_col, T, S, window, SIZES: tl.constexpr):
    """Tiles first … end − 1 of queries, some of which see a key of a tile: (first, whole, num_whole, end).

    In `num_whole` tiles from `whole` on, every query sees all of these keys.
    """
    last_col = tl.minimum(first_col + SIZES.COLS, S) - 1
    start, stop, whole_start, whole_stop = 0, T, 0, T
    if SIZES.CAUSAL:
        start = tl.minimum(T, tl.maximum(0, first_col - (S - T)))
        whole_start = tl.minimum(T, tl.maximum(0, last_col - (S - T)))
    if window is not None:
        stop = tl.maximum(start, tl.minimum(T, last_col + window - (S - T)))
        whole_stop = tl.maximum(start, tl.minimum(T, first_col + window - (S - T)))
    end = tl.where(first_col < S, tl.cdiv(stop, SIZES.ROWS), 0)
    whole = tl.minimum(tl.cdiv(whole_start, SIZES.ROWS), end)
    num_whole = tl.maximum(tl.minimum(whole_stop // SIZES.ROWS, end) - whole, 0)
    return start // SIZES.ROWS, whole, num_whole, end


@triton.jit
def sees_keys(col, first_col, rows, sizes, window, CAUSAL: tl.constexpr):
    """Whether each query sees keys first_col + col, [rows, col]. A query beyond T may see anything.

    Each query is compared with constants, after its products: computed before them, the answers would not fit the
    registers of a GPU that hold truth values.
    """
    T, S = sizes
    if CAUSAL:
        last = (rows + (S - T) - first_col)[:, None]  # the last key that a query sees
        seen = col[None, :] <= last
        if window is not None:
            seen &= col[None, :] > last - window
    else:
        seen = (col < S - first_col)[None, :]
    return seen


@triton.jit
def slope_of(scoring, head):
    """slope · log₂ e of one head, or None."""
    if scoring.slopes is not None:
        return tl.load(scoring.slopes + head) * LOG2_E


@triton.jit
def mask_of(scoring, batch, head):
    """The mask of one head as (pointer, strides of row and column), or None."""
    if scoring.attn_mask is not None:
        ptr, stride_batch, stride_head, stride_row, stride_col = scoring.attn_mask
        return ptr + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head, stride_row, stride_col


@triton.jit
def capped(products, scale, softcap):
    """Scores of products q · k, in units of log 2. With a softcap, scale is that of the tanh's argument."""
    return products * scale if softcap is None else softcap * tanh(products * scale)


@triton.jit
def biased(scores, rows, cols, sizes, slope):
    """Scores with ALiBi's bias, −slope · distance. slope contains log₂ e; None: without ALiBi."""
    if slope is not None:
        T, S = sizes
        scores -= slope * tl.abs(cols - rows - (S - T)).to(tl.float32)
    return scores


@triton.jit
def kept(first_row, first_col, dropout, head, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The weights of a tile [ROWS, COLS] that dropout keeps, the same as in `flash_attention.dropout.Dropout.keep`.

    head: its number among all heads of all sequences.
    """
    tl.static_assert(COLS % 8 == 0, "eight neighbours share a draw")
    row = (first_row + tl.arange(0, ROWS))[:, None].to(tl.uint32)
    group = (first_col // 8 + tl.arange(0, COLS // 8))[None, :].to(tl.uint32)
    row, group = tl.broadcast(row, group)
    head = tl.zeros_like(row) + head.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(dropout.seed), row, group, head, tl.zeros_like(row))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., 2, 2]: w0 w1 w2 w3
    draws = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(draws, [ROWS, COLS]).to(tl.int32) >= tl.cast(dropout.threshold, tl.int32)
