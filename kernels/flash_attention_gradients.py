"""Who owns which gradient in FlashAttention-2's backward: keys sum over queries, queries over keys (lesson 6).

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − D)        dQ = scale · dS K        dK = scale · dSᵀ Q

Both compute a tile of P = exp(S − lse) again. The kernel that hands out the tiles is in `flash_attention_backward.py`.
"""

import triton
import triton.language as tl

from pagewise.kernels.flash_attention import key_tiles, load_rows, of_head
from pagewise.kernels.scores import LOG2_E, biased, capped, kept, visible


@triton.jit
def load_stats(saved, rows, T):
    """m, log₂ l and delta of these rows; m is +∞ for a row that saw nothing or is none, so that its weights are 0."""
    m_ptr, log_l_ptr, delta_ptr = saved
    there = rows < T
    m = tl.load(m_ptr + rows, mask=there, other=float("inf"))
    return m, tl.load(log_l_ptr + rows, mask=there, other=0.0), tl.load(delta_ptr + rows, mask=there, other=0.0)


@triton.jit
def saved_of_head(saved, head):
    """m, log₂ l and delta from a head's first query on."""
    m_ptr, log_l_ptr, delta_ptr, stride_head = saved
    at = head.to(tl.int64) * stride_head
    return m_ptr + at, log_l_ptr + at, delta_ptr + at


@triton.jit
def further(matrix, row):
    """A matrix (pointer, stride of rows) from this row on."""
    ptr, stride_row = matrix
    return ptr + tl.cast(row, tl.int64) * stride_row, stride_row


@triton.jit
def through_softcap(ds, scores, softcap):
    """d (softcap · tanh x) = softcap · (1 − tanh² x) dx, with scores = softcap · tanh x. softcap: or None."""
    if softcap is not None:
        t = scores / softcap
        ds *= 1.0 - t * t
    return ds


@triton.jit
def query_tiles(first_col, last_col, sizes, window, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """`key_tiles` the other way: tiles of queries, first and behind the last, that see some of these keys."""
    T, S = sizes
    start, stop = 0, T
    if CAUSAL:
        start = tl.minimum(T, tl.maximum(0, first_col - (S - T)))
    if window is not None:
        stop = tl.maximum(start, tl.minimum(T, last_col + window - (S - T)))
    return start // ROWS, tl.where(first_col < S, (stop + ROWS - 1) // ROWS, 0)


@triton.jit
def mask_of_head(mask, batch, head):
    """(pointer, strides of rows and columns) of one head's mask, from that of all."""
    ptr, stride_batch, stride_head, stride_row, stride_col = mask
    return ptr + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head, stride_row, stride_col


@triton.jit
def gradient_of_keys(
    at,  # what `place` says, with a KV head
    first_head,  # of `heads` query heads of its group
    heads,
    inputs,  # q, k, v, d_out: (pointer, strides of batch, head and row)
    saved,  # m, log₂ l, delta: pointers to the batch's first query, and their stride of heads
    scale,
    softcap,  # this and the following: None where there is none
    slopes_ptr,
    window,
    mask,  # pointer, strides of batch, head, row and column
    dropout,  # seed, threshold, growth, H
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """(dK / scale, dV) [COLS, BLOCK_D] of a tile of keys: sums over the queries of these heads that see it."""
    tile, kv_head, batch, sequence, first_q, first_k, T, S = at
    q_tensor, k_tensor, v_tensor, d_out_tensor = inputs
    sizes = (T, S)

    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)  # in a tile
    cols = tile * COLS + col
    first_k += tile.to(tl.int64) * COLS
    k = load_rows(of_head(k_tensor, batch, kv_head, first_k), col, cols < S, D, BLOCK_D)
    v = load_rows(of_head(v_tensor, batch, kv_head, first_k), col, cols < S, D, BLOCK_D)
    last_col = tl.minimum(tile * COLS + COLS, S) - 1
    first, behind = query_tiles(tile * COLS, last_col, sizes, window, CAUSAL, ROWS)
    dk, dv = tl.zeros([COLS, BLOCK_D], tl.float32), tl.zeros([COLS, BLOCK_D], tl.float32)
    for nth in range(0, heads):
        head = first_head + nth
        q_matrix = of_head(q_tensor, batch, head, first_q)
        d_out_matrix = of_head(d_out_tensor, batch, head, first_q)
        of_queries = saved_of_head(saved, head)
        slope = tl.load(slopes_ptr + head) * LOG2_E if slopes_ptr is not None else None
        mask_matrix = mask_of_head(mask, batch, head) if mask is not None else None
        for i in range(first, behind):
            rows = i * ROWS + row
            q = load_rows(further(q_matrix, i * ROWS), row, rows < T, D, BLOCK_D)
            d_out = load_rows(further(d_out_matrix, i * ROWS), row, rows < T, D, BLOCK_D)
            m, log_l, delta = load_stats(of_queries, rows, T)

            capped_scores = capped(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, softcap)  # Sᵀ = K Qᵀ
            scores = biased(capped_scores, rows[None, :], cols[:, None], sizes, slope)
            weights = tl.exp2(scores - m[None, :] - log_l[None, :])  # Pᵀ = exp(Sᵀ − lse)
            d_weights = tl.dot(v, tl.trans(d_out), input_precision="ieee")  # dPᵀ = V dOᵀ
            if CAUSAL or mask is not None:
                seen = visible(rows[None, :], cols[:, None], sizes, window, mask_matrix, CAUSAL)
                weights = tl.where(seen, weights, 0.0)
                d_weights = tl.where(seen, d_weights, 0.0)  # of a value that nobody sees, it may be NaN
            used = weights
            if dropout is not None:
                seed, threshold, growth, num_heads = dropout
                stays = kept(i * ROWS, tile * COLS, sequence * num_heads + head, seed, threshold, ROWS, COLS)
                used = tl.where(tl.trans(stays), weights * growth, 0.0)
                d_weights = tl.where(tl.trans(stays), d_weights * growth, 0.0)
            dv = tl.dot(used.to(d_out.dtype), d_out, dv, input_precision="ieee")  # dV += Pᵀ dO
            ds = through_softcap(weights * (d_weights - delta[None, :]), capped_scores, softcap)  # dS = P ∘ (dP − D)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")  # dK += dSᵀ Q
    return dk, dv


@triton.jit
def gradient_of_queries(
    at,  # what `place` says, with a query head
    group,
    inputs,  # the rest as in `gradient_of_keys`
    saved,
    scale,
    softcap,
    slopes_ptr,
    window,
    mask,
    dropout,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dQ / scale [ROWS, BLOCK_D] of a tile of queries: a sum over the keys that they see."""
    tile, head, batch, sequence, first_q, first_k, T, S = at
    q_tensor, k_tensor, v_tensor, d_out_tensor = inputs
    sizes = (T, S)

    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)  # in a tile
    rows = tile * ROWS + row
    first_q += tile.to(tl.int64) * ROWS
    q = load_rows(of_head(q_tensor, batch, head, first_q), row, rows < T, D, BLOCK_D)
    d_out = load_rows(of_head(d_out_tensor, batch, head, first_q), row, rows < T, D, BLOCK_D)
    k_matrix = of_head(k_tensor, batch, head // group, first_k)
    v_matrix = of_head(v_tensor, batch, head // group, first_k)
    m, log_l, delta = load_stats(saved_of_head(saved, head), rows, T)
    slope = tl.load(slopes_ptr + head) * LOG2_E if slopes_ptr is not None else None
    mask_matrix = mask_of_head(mask, batch, head) if mask is not None else None
    last_row = tl.minimum(tile * ROWS + ROWS, T) - 1
    first, _, _, behind, start, stop = key_tiles(tile * ROWS, last_row, sizes, window, CAUSAL, False, COLS)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for j in range(first, behind):
        cols = j * COLS + col
        seen = visible(rows[:, None], cols[None, :], sizes, window, mask_matrix, CAUSAL)
        # of keys and values that nobody here sees a NaN would reach dQ: they are read as 0
        there = tl.max(seen.to(tl.int32), axis=0) > 0 if mask is not None else (cols >= start) & (cols < stop)
        k = load_rows(further(k_matrix, j * COLS), col, there, D, BLOCK_D)
        v = load_rows(further(v_matrix, j * COLS), col, there, D, BLOCK_D)

        capped_scores = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap)  # S = Q Kᵀ
        scores = biased(capped_scores, rows[:, None], cols[None, :], sizes, slope)
        weights = tl.exp2(scores - m[:, None] - log_l[:, None])  # P = exp(S − lse)
        weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")  # dP = dO Vᵀ
        if dropout is not None:
            seed, threshold, growth, num_heads = dropout
            stays = kept(tile * ROWS, j * COLS, sequence * num_heads + head, seed, threshold, ROWS, COLS)
            d_weights = tl.where(stays, d_weights * growth, 0.0)
        ds = through_softcap(weights * (d_weights - delta[:, None]), capped_scores, softcap)  # dS = P ∘ (dP − D)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")  # dQ += dS K
    return dq
