"""The two sums of FlashAttention-2's backward: dK and dV of a tile of keys, dQ of a tile of queries (lesson 6).

Each function computes its tiles of P = exp(S − lse) again and stores its sums. The kernels in
`flash_attention_backward.py`, which has the formulas, call both. As in the forward, only tiles that the mask cuts pay
for the mask. What several functions here take:

    segment   (batch, sequence, first query row, first key row, T, S), from `segment_of`
    inputs    q, k, v and d_out, each (pointer, stride of each dimension)
    saved     `Saved` of all heads, and the number of queries of a head; in a loop: of the head, or of the rows
    scoring   `Scoring` of all heads; in a loop: of the head
    window    None without a window; in a loop: None if no key of its tiles lies before a window
    dropout   `Dropout` or None; `number` counts the head among all heads of all sequences
    CUT       whether some query of these tiles does not see some key, or is beyond T
"""

import triton
import triton.language as tl

from pagewise.kernels.arguments import Saved
from pagewise.kernels.flash_attention import load_rows, load_tile, matrix_of_head, store_rows
from pagewise.kernels.scores import LN_2, biased, capped, kept, key_range, of_head, query_range, seen_in_tile, visible


@triton.jit
def saved_of_head(saved, batch, head, num_heads, first_row, total):
    """The `Saved` of one head, from `first_row` on."""
    at = (batch * num_heads + head).to(tl.int64) * total + first_row
    log_l = None
    if saved.log_l is not None:
        log_l = saved.log_l + at
    return Saved(saved.m + at, log_l, saved.delta + at)


@triton.jit
def load_saved(saved, rows, T, CUT: tl.constexpr):
    """The values of `Saved` for these rows of a head. A row beyond T gets m = +∞, so that its weights are 0."""
    mask, nothing, zero, log_l = None, None, None, None
    if CUT:
        mask, nothing, zero = rows < T, float("inf"), 0.0
    if saved.log_l is not None:
        log_l = tl.load(saved.log_l + rows, mask=mask, other=zero)
    m = tl.load(saved.m + rows, mask=mask, other=nothing)
    return Saved(m, log_l, tl.load(saved.delta + rows, mask=mask, other=zero))


@triton.jit
def weights_of(scores, saved, AXIS: tl.constexpr):
    """P = exp(S − lse), with the queries along the other axis than AXIS."""
    scores -= tl.expand_dims(saved.m, AXIS)
    if saved.log_l is not None:  # otherwise m contains it
        scores -= tl.expand_dims(saved.log_l, AXIS)
    return tl.exp2(scores)


@triton.jit
def through_softcap(d_scores, scores, softcap):
    """The gradient before the softcap: d(softcap · tanh x) = softcap · (1 − tanh² x) dx, scores = softcap · tanh x."""
    if softcap is not None:
        t = scores / softcap
        d_scores *= 1.0 - t * t
    return d_scores


@triton.jit
def factor_of_products(scoring):
    """The factor of q · k in a score, without log₂ e."""
    return scoring.scale * LN_2 if scoring.softcap is None else scoring.scale * scoring.softcap * LN_2


@triton.jit
def fold_queries(
    first, end, skipped, sums, keys, queries, scoring, window, dropout, number, SIZES: tl.constexpr, CUT: tl.constexpr
):
    """sums = (dk, dv) with the sums over the queries of the tiles first … end − 1 of one head.

    skipped: (first, number) of tiles that are left out. keys: k and v [COLS, BLOCK_D], the index of the first, T, S.
    queries: q and d_out of the head as (pointer, stride of rows), `Saved`.
    """
    dk, dv = sums
    k, v, first_col, T, S = keys
    q_matrix, d_out_matrix, saved = queries
    ROWS: tl.constexpr = SIZES.ROWS
    row = tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, SIZES.COLS)
    earliest = cols - (S - T)  # the first query that sees a key
    first_skipped, num_skipped = skipped
    for visited in range(first, end - num_skipped):
        i = visited
        if CUT:
            i = tl.where(visited < first_skipped, visited, visited + num_skipped)
        rows = i * ROWS + row
        q = load_tile(q_matrix, i * ROWS, 0, T, None, ROWS, SIZES, CUT)
        d_out = load_tile(d_out_matrix, i * ROWS, 0, T, None, ROWS, SIZES, CUT)
        of_rows = load_saved(saved, rows, T, CUT)
        if q.dtype == tl.float32:  # the forward's order of operands: m and log₂ l contain its rounding
            products = tl.trans(tl.dot(q, tl.trans(k), input_precision="ieee"))
        else:
            products = tl.dot(k, tl.trans(q), input_precision="ieee")
        capped_scores = capped(products, scoring.scale, scoring.softcap)  # Sᵀ = K Qᵀ
        scores = biased(capped_scores, rows[None, :], cols[:, None], (T, S), scoring.slopes)
        d_weights = tl.dot(v, tl.trans(d_out), input_precision="ieee")  # dPᵀ = V dOᵀ
        if scoring.attn_mask is not None:
            seen = visible(rows[None, :], cols[:, None], (T, S), window, scoring.attn_mask, SIZES.CAUSAL)
            scores = tl.where(seen, scores, float("-inf"))
        elif CUT and SIZES.CAUSAL:
            since = (earliest - i * ROWS)[:, None]
            seen = since <= row[None, :]
            if window is not None:
                seen &= since + window > row[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        weights = weights_of(scores, of_rows, 0)
        used = weights
        if dropout is not None:
            seed = tl.load(dropout.seed)
            keep = tl.trans(kept(i * ROWS, first_col, number, seed, dropout.threshold, ROWS, SIZES.COLS))
            used = tl.where(keep, weights * dropout.growth, 0.0)
            d_weights = tl.where(keep, d_weights * dropout.growth, 0.0)
        dv = tl.dot(used.to(d_out.dtype), d_out, dv, input_precision="ieee")  # dV += Pᵀ dO
        d_scores = through_softcap(weights * (d_weights - of_rows.delta[None, :]), capped_scores, scoring.softcap)
        if scoring.attn_mask is not None:  # a key or a value that no query sees may be NaN
            d_scores = tl.where(seen, d_scores, 0.0)
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee")  # dK += dSᵀ Q
    return dk, dv


@triton.jit
def store_gradient_of_keys(outputs, tile, heads, segment, inputs, saved, scoring, window, dropout, SIZES: tl.constexpr):
    """Store dK and dV of a tile of keys: sums over the queries of these heads that see a key of it.

    outputs: dk, dv, the index of their batch. heads: KV head, first query head, number of query heads; of all heads.
    """
    dk_tensor, dv_tensor, split_and_batch = outputs
    kv_head, first_head, heads_of_group, num_heads = heads
    batch, sequence, first_q, first_k, T, S = segment
    q_tensor, k_tensor, v_tensor, d_out_tensor = inputs
    saved, total = saved
    ROWS: tl.constexpr = SIZES.ROWS
    COLS: tl.constexpr = SIZES.COLS
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D

    col, first_col = tl.arange(0, COLS), tile * COLS
    first_k += tl.cast(first_col, tl.int64)
    real = col < S - first_col
    if window is not None:  # a key before all windows may be NaN
        real &= col > S - T - window - first_col
    k = load_rows(matrix_of_head(k_tensor, batch, kv_head, first_k), col, real, SIZES.D, BLOCK_D)
    v = load_rows(matrix_of_head(v_tensor, batch, kv_head, first_k), col, real, SIZES.D, BLOCK_D)
    keys = (k, v, first_col, T, S)
    last_col = tl.minimum(first_col + COLS, S) - 1
    start, stop, whole_start, whole_stop = query_range(first_col, last_col, (T, S), window, SIZES.CAUSAL)
    first, end = start // ROWS, tl.where(first_col < S, tl.cdiv(stop, ROWS), 0)
    sums = tl.zeros([COLS, BLOCK_D], tl.float32), tl.zeros([COLS, BLOCK_D], tl.float32)
    for nth in range(0, heads_of_group):
        head = first_head + nth
        number = sequence * num_heads + head
        of_this = of_head(scoring, batch, head)
        q_matrix = matrix_of_head(q_tensor, batch, head, first_q)
        d_out_matrix = matrix_of_head(d_out_tensor, batch, head, first_q)
        queries = (q_matrix, d_out_matrix, saved_of_head(saved, batch, head, num_heads, first_q, total))
        whole, num_whole = first, 0
        if scoring.attn_mask is None:
            whole = tl.minimum(tl.cdiv(whole_start, ROWS), end)
            num_whole = tl.maximum(tl.minimum(whole_stop // ROWS, end) - whole, 0)
            sums = fold_queries(
                whole, whole + num_whole, (0, 0), sums, keys, queries, of_this, None, dropout, number, SIZES, False
            )
        sums = fold_queries(
            first, end, (whole, num_whole), sums, keys, queries, of_this, window, dropout, number, SIZES, True
        )
    dk, dv = sums
    dk *= factor_of_products(scoring)
    inside = col < S - first_col
    store_rows(matrix_of_head(dk_tensor, split_and_batch, kv_head, first_k), col, dk, inside, SIZES.D, BLOCK_D)
    store_rows(matrix_of_head(dv_tensor, split_and_batch, kv_head, first_k), col, dv, inside, SIZES.D, BLOCK_D)


@triton.jit
def fold_keys(first, end, dq, queries, keys, scoring, window, dropout, number, SIZES: tl.constexpr, CUT: tl.constexpr):
    """dq with the sums over the keys of the tiles first … end − 1.

    queries: q and d_out [ROWS, BLOCK_D], `Saved` of each, the index of the first, T, S. keys: k and v as (pointer,
    stride of rows), start and stop of the keys that some query here sees.
    """
    q, d_out, saved, first_row, T, S = queries
    k_matrix, v_matrix, start, stop = keys
    COLS: tl.constexpr = SIZES.COLS
    col = tl.arange(0, COLS)
    rows = first_row + tl.arange(0, SIZES.ROWS)
    for j in range(first, end):
        cols = j * COLS + col
        some = None
        if scoring.attn_mask is not None:
            seen = visible(rows[:, None], cols[None, :], (T, S), window, scoring.attn_mask, SIZES.CAUSAL)
            some = tl.max(seen.to(tl.int32), axis=0) > 0
        k = load_tile(k_matrix, j * COLS, start, stop, some, COLS, SIZES, CUT)
        v = load_tile(v_matrix, j * COLS, start, stop, some, COLS, SIZES, CUT)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        capped_scores = capped(products, scoring.scale, scoring.softcap)  # S = Q Kᵀ
        scores = biased(capped_scores, rows[:, None], cols[None, :], (T, S), scoring.slopes)
        if scoring.attn_mask is not None:
            scores = tl.where(seen, scores, float("-inf"))
        elif CUT:
            scores = tl.where(seen_in_tile(col, j * COLS, rows, (T, S), window, SIZES.CAUSAL), scores, float("-inf"))
        weights = weights_of(scores, saved, 1)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")  # dP = dO Vᵀ
        if dropout is not None:
            seed = tl.load(dropout.seed)
            keep = kept(first_row, j * COLS, number, seed, dropout.threshold, SIZES.ROWS, COLS)
            d_weights = tl.where(keep, d_weights * dropout.growth, 0.0)
        d_scores = through_softcap(weights * (d_weights - saved.delta[:, None]), capped_scores, scoring.softcap)
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")  # dQ += dS K
    return dq


@triton.jit
def store_gradient_of_queries(
    dq_tensor, tile, heads, segment, inputs, saved, scoring, window, dropout, SIZES: tl.constexpr
):
    """Store dQ of a tile of queries: a sum over the keys that they see. heads: query head, KV head; of all heads."""
    head, kv_head, num_heads = heads
    batch, sequence, first_q, first_k, T, S = segment
    q_tensor, k_tensor, v_tensor, d_out_tensor = inputs
    saved, total = saved
    ROWS: tl.constexpr = SIZES.ROWS
    COLS: tl.constexpr = SIZES.COLS
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D

    row, first_row = tl.arange(0, ROWS), tile * ROWS
    inside = row < T - first_row
    tile_q = first_q + tl.cast(first_row, tl.int64)
    q = load_rows(matrix_of_head(q_tensor, batch, head, tile_q), row, inside, SIZES.D, BLOCK_D)
    d_out = load_rows(matrix_of_head(d_out_tensor, batch, head, tile_q), row, inside, SIZES.D, BLOCK_D)
    saved = saved_of_head(saved, batch, head, num_heads, first_q, total)
    queries = (q, d_out, load_saved(saved, first_row + row, T, True), first_row, T, S)
    last_row = tl.minimum(first_row + ROWS, T) - 1
    start, stop, whole_start, whole_stop = key_range(first_row, last_row, (T, S), window, SIZES.CAUSAL)
    k_matrix = matrix_of_head(k_tensor, batch, kv_head, first_k)
    keys = (k_matrix, matrix_of_head(v_tensor, batch, kv_head, first_k), start, stop)
    scoring, number = of_head(scoring, batch, head), sequence * num_heads + head
    first, end = start // COLS, tl.cdiv(stop, COLS)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if scoring.attn_mask is None:
        whole = tl.minimum(tl.cdiv(whole_start, COLS), end)
        if window is not None:
            dq = fold_keys(first, whole, dq, queries, keys, scoring, window, dropout, number, SIZES, True)
        first = tl.maximum(whole_stop // COLS, whole)
        dq = fold_keys(whole, first, dq, queries, keys, scoring, None, dropout, number, SIZES, False)
        window = None
    dq = fold_keys(first, end, dq, queries, keys, scoring, window, dropout, number, SIZES, True)
    dq *= factor_of_products(scoring)
    store_rows(matrix_of_head(dq_tensor, batch, head, tile_q), row, dq, inside, SIZES.D, BLOCK_D)
