"""The two sums of FlashAttention-2's backward: dK and dV of a tile of keys, dQ of a tile of queries (lesson 6).

Each function computes its tiles of P = exp(S − lse) again and stores its sums. The kernel in
`flash_attention_backward.py`, which has the formulas, calls both.
"""

import triton
import triton.language as tl

from pagewise.kernels.flash_attention import load_rows, matrix_of_head, store_rows
from pagewise.kernels.scores import LOG2_E, biased, capped, kept, key_range, mask_of_head, query_range, visible


@triton.jit
def load_saved(saved, batch, head, first_row, rows, mask):
    """m, log₂ l and delta of these rows of a head. A row that mask excludes gets log₂ l = +∞, so its weights are 0."""
    m_ptr, log_l_ptr, delta_ptr, num_heads, total = saved
    offset = (batch * num_heads + head).to(tl.int64) * total + first_row
    m = tl.load(m_ptr + offset + rows, mask=mask, other=0.0)
    log_l = tl.load(log_l_ptr + offset + rows, mask=mask, other=float("inf"))
    return m, log_l, tl.load(delta_ptr + offset + rows, mask=mask, other=0.0)


@triton.jit
def through_softcap(d_scores, scores, softcap):
    """The gradient before the softcap: d(softcap · tanh x) = softcap · (1 − tanh² x) dx, scores = softcap · tanh x."""
    if softcap is not None:
        t = scores / softcap
        d_scores *= 1.0 - t * t
    return d_scores


@triton.jit
def store_gradient_of_keys(
    outputs,  # dk and dv, the index of their batch, the factor of dk
    tile,  # of keys
    heads,  # KV head, first query head, number of query heads
    segment,  # batch, sequence, first query row, first key row, T, S
    inputs,  # q, k, v, d_out
    saved,  # m, log₂ l and delta; number of heads, number of queries of a head
    scoring,  # scale, softcap, slopes, window, attn_mask
    dropout,  # seed, threshold, growth, number of heads; None without dropout
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Store dK and dV of a tile of keys: sums over the queries of these heads that see a key of it."""
    dk_tensor, dv_tensor, split_and_batch, dk_scale = outputs
    kv_head, first_head, num_heads = heads
    batch, sequence, first_q, first_k, T, S = segment
    q_tensor, k_tensor, v_tensor, d_out_tensor = inputs
    scale, softcap, slopes, window, attn_mask = scoring
    sizes = (T, S)

    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)  # in a tile
    cols = tile * COLS + col
    first_k += tile.to(tl.int64) * COLS
    k = load_rows(matrix_of_head(k_tensor, batch, kv_head, first_k), col, cols < S, D, BLOCK_D)
    v = load_rows(matrix_of_head(v_tensor, batch, kv_head, first_k), col, cols < S, D, BLOCK_D)
    last_col = tl.minimum(tile * COLS + COLS, S) - 1
    start, stop = query_range(tile * COLS, last_col, sizes, window, CAUSAL)
    first, end = start // ROWS, tl.where(tile * COLS < S, tl.cdiv(stop, ROWS), 0)
    dk, dv = tl.zeros([COLS, BLOCK_D], tl.float32), tl.zeros([COLS, BLOCK_D], tl.float32)
    for nth in range(0, num_heads):
        head = first_head + nth
        slope = tl.load(slopes + head) * LOG2_E if slopes is not None else None
        mask_matrix = mask_of_head(attn_mask, batch, head) if attn_mask is not None else None
        for i in range(first, end):
            rows = i * ROWS + row
            q = load_rows(matrix_of_head(q_tensor, batch, head, first_q + i * ROWS), row, rows < T, D, BLOCK_D)
            d_out = load_rows(matrix_of_head(d_out_tensor, batch, head, first_q + i * ROWS), row, rows < T, D, BLOCK_D)
            m, log_l, delta = load_saved(saved, batch, head, first_q, rows, rows < T)

            if q.dtype == tl.float32:  # the forward's order of operands: m and log₂ l contain its rounding
                products = tl.trans(tl.dot(q, tl.trans(k), input_precision="ieee"))
            else:
                products = tl.dot(k, tl.trans(q), input_precision="ieee")
            capped_scores = capped(products, scale, softcap)  # Sᵀ = K Qᵀ
            scores = biased(capped_scores, rows[None, :], cols[:, None], sizes, slope)
            weights = tl.exp2(scores - m[None, :] - log_l[None, :])  # Pᵀ = exp(Sᵀ − lse)
            d_weights = tl.dot(v, tl.trans(d_out), input_precision="ieee")  # dPᵀ = V dOᵀ
            if CAUSAL or attn_mask is not None:
                seen = visible(rows[None, :], cols[:, None], sizes, window, mask_matrix, CAUSAL)
                weights = tl.where(seen, weights, 0.0)
                d_weights = tl.where(seen, d_weights, 0.0)  # a value that no query sees may be NaN
            used = weights
            if dropout is not None:
                seed, threshold, growth, all_heads = dropout
                keep = kept(i * ROWS, tile * COLS, sequence * all_heads + head, seed, threshold, ROWS, COLS)
                used = tl.where(tl.trans(keep), weights * growth, 0.0)
                d_weights = tl.where(tl.trans(keep), d_weights * growth, 0.0)
            dv = tl.dot(used.to(d_out.dtype), d_out, dv, input_precision="ieee")  # dV += Pᵀ dO
            d_scores = through_softcap(weights * (d_weights - delta[None, :]), capped_scores, softcap)
            dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee")  # dK += dSᵀ Q
    dk *= dk_scale
    store_rows(matrix_of_head(dk_tensor, split_and_batch, kv_head, first_k), col, dk, cols < S, D, BLOCK_D)
    store_rows(matrix_of_head(dv_tensor, split_and_batch, kv_head, first_k), col, dv, cols < S, D, BLOCK_D)


@triton.jit
def store_gradient_of_queries(
    outputs,  # dq and its factor
    tile,  # of queries
    heads,  # query head, KV head
    segment,  # this and the rest as in `store_gradient_of_keys`
    inputs,
    saved,
    scoring,
    dropout,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Store dQ of a tile of queries: a sum over the keys that they see."""
    dq_tensor, dq_scale = outputs
    head, kv_head = heads
    batch, sequence, first_q, first_k, T, S = segment
    q_tensor, k_tensor, v_tensor, d_out_tensor = inputs
    scale, softcap, slopes, window, attn_mask = scoring
    sizes = (T, S)

    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)  # in a tile
    rows = tile * ROWS + row
    tile_q = first_q + tile.to(tl.int64) * ROWS
    q = load_rows(matrix_of_head(q_tensor, batch, head, tile_q), row, rows < T, D, BLOCK_D)
    d_out = load_rows(matrix_of_head(d_out_tensor, batch, head, tile_q), row, rows < T, D, BLOCK_D)
    m, log_l, delta = load_saved(saved, batch, head, first_q, rows, rows < T)
    slope = tl.load(slopes + head) * LOG2_E if slopes is not None else None
    mask_matrix = mask_of_head(attn_mask, batch, head) if attn_mask is not None else None
    last_row = tl.minimum(tile * ROWS + ROWS, T) - 1
    start, stop, _, _ = key_range(tile * ROWS, last_row, sizes, window, CAUSAL)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for j in range(start // COLS, tl.cdiv(stop, COLS)):
        cols = j * COLS + col
        seen = visible(rows[:, None], cols[None, :], sizes, window, mask_matrix, CAUSAL)
        # a NaN in a key or value that no query here sees would reach dQ, so it is read as 0
        mask = tl.max(seen.to(tl.int32), axis=0) > 0 if attn_mask is not None else (cols >= start) & (cols < stop)
        k = load_rows(matrix_of_head(k_tensor, batch, kv_head, first_k + j * COLS), col, mask, D, BLOCK_D)
        v = load_rows(matrix_of_head(v_tensor, batch, kv_head, first_k + j * COLS), col, mask, D, BLOCK_D)

        capped_scores = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap)  # S = Q Kᵀ
        scores = biased(capped_scores, rows[:, None], cols[None, :], sizes, slope)
        weights = tl.exp2(scores - m[:, None] - log_l[:, None])  # P = exp(S − lse)
        weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")  # dP = dO Vᵀ
        if dropout is not None:
            seed, threshold, growth, all_heads = dropout
            keep = kept(tile * ROWS, j * COLS, sequence * all_heads + head, seed, threshold, ROWS, COLS)
            d_weights = tl.where(keep, d_weights * growth, 0.0)
        d_scores = through_softcap(weights * (d_weights - delta[:, None]), capped_scores, softcap)
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")  # dQ += dS K
    store_rows(matrix_of_head(dq_tensor, batch, head, tile_q), row, dq * dq_scale, rows < T, D, BLOCK_D)
