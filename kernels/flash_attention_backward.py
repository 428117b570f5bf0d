"""FlashAttention-2, backward: the scores are computed again, tile by tile, instead of being stored (lesson 6).

With S = scores of q · k · scale, P = exp(S − lse) and delta_i = Σ_d dO_id · O_id − dlse_i:

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − delta)        dQ = scale · dS K        dK = scale · dSᵀ Q

A sum over queries belongs to a key, and a sum over keys belongs to a query. A program therefore owns either rows of dK
and dV or rows of dQ, and no two programs add to the same number. Equal inputs give equal bits. The price is seven
products instead of five: S and dP are computed twice. The paper adds to dQ in memory (Dao 2023, Algorithm 2).

`flash_dq_kernel` is the first rung, `flash_attention_backward_kernel` is what the package runs. As in the forward, only
tiles that the mask cuts pay for the mask. What both loops take:

    scoring   `Scoring` of the head
    dropout   `Dropout` or None, and the number of the head among all heads of all sequences
    window    None if no key of these tiles lies before a window
    CUT       whether some query of these tiles does not see some key, or is beyond T
"""

import triton
import triton.language as tl

from pagewise.kernels.arguments import Saved, Scoring
from pagewise.kernels.flash_attention import load_rows, load_tile, matrix_of_head, segment_of, store_rows
from pagewise.kernels.partial import LN_2, LOG2_E
from pagewise.kernels.scores import biased, capped, kept, key_range, mask_of, query_tiles, sees_keys, slope_of, visible


@triton.jit
def flash_dq_kernel(
    q,  # [B, H, T, D], as every tensor of four dimensions: (pointer, strides of batch, head, row and column)
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    d_out,  # [B, H, T, D]
    lse,  # [B · H · T] float32
    delta,  # [B · H · T] float32
    dq,  # [B, H, T, D]
    group,  # query heads per KV head
    T,
    S,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dQ = scale · dS K, with lse from the forward and delta. Grid (⌈T / ROWS⌉, H, B)."""
    head, batch = tl.program_id(1), tl.program_id(2)
    rows, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    q_tile = load_rows(matrix_of_head(q, batch, head, 0), rows.to(tl.int64), rows < T, D, BLOCK_D)
    d_out_tile = load_rows(matrix_of_head(d_out, batch, head, 0), rows.to(tl.int64), rows < T, D, BLOCK_D)
    numbers = (batch * tl.num_programs(1) + head).to(tl.int64) * T + rows
    lse_rows = tl.load(lse + numbers, mask=rows < T, other=0.0)[:, None]
    delta_rows = tl.load(delta + numbers, mask=rows < T, other=0.0)[:, None]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, S, COLS):
        cols = (start + col).to(tl.int64)
        k_tile = load_rows(matrix_of_head(k, batch, head // group, 0), cols, cols < S, D, BLOCK_D)
        v_tile = load_rows(matrix_of_head(v, batch, head // group, 0), cols, cols < S, D, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * LOG2_E)
        weights = tl.exp2(scores - lse_rows * LOG2_E)  # P = exp(S − lse)
        weights = tl.where(visible(rows[:, None], cols[None, :], (T, S), None, None, CAUSAL), weights, 0.0)
        d_weights = tl.dot(d_out_tile, tl.trans(v_tile), input_precision="ieee")  # dP = dO Vᵀ
        d_scores = (weights * (d_weights - delta_rows)).to(k_tile.dtype)  # dS = P ∘ (dP − delta)
        acc = tl.dot(d_scores, k_tile, acc, input_precision="ieee")  # dQ += dS K
    store_rows(matrix_of_head(dq, batch, head, 0), rows.to(tl.int64), acc * scale, rows < T, D, BLOCK_D)


@triton.jit(do_not_specialize=["num_heads", "T"])
def flash_attention_delta_kernel(
    out,  # [B, H, T, D], as every tensor of four dimensions: (pointer, strides of batch, head, row and column)
    d_out,  # [B, H, T, D]
    lse,  # [B · H · T] float32, as the following three
    d_lse,
    delta,
    m,  # lse · log₂ e, and +∞ for a query that sees no key; None if the forward has saved m
    num_heads,
    T,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = (out · d_out).sum(-1) − d_lse, and 0 for a query that sees no key. Grid (⌈T / ROWS⌉ · H · B)."""
    pid, num_tiles = tl.program_id(0), tl.cdiv(T, ROWS)
    tile, head, batch = pid % num_tiles, pid // num_tiles % num_heads, pid // num_tiles // num_heads
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out_tile = load_rows(matrix_of_head(out, batch, head, 0), rows, rows < T, D, BLOCK_D).to(tl.float32)
    d_out_tile = load_rows(matrix_of_head(d_out, batch, head, 0), rows, rows < T, D, BLOCK_D).to(tl.float32)
    numbers = (pid // num_tiles).to(tl.int64) * T + rows
    delta_tile = tl.sum(out_tile * d_out_tile, axis=1) - tl.load(d_lse + numbers, mask=rows < T, other=0.0)
    lse_tile = tl.load(lse + numbers, mask=rows < T, other=0.0)
    sees = lse_tile != float("-inf")
    tl.store(delta + numbers, tl.where(sees, delta_tile, 0.0), mask=rows < T)
    if m is not None:
        tl.store(m + numbers, tl.where(sees, lse_tile * LOG2_E, float("inf")), mask=rows < T)


@triton.jit
def load_saved(field, first, rows, T, beyond, CUT: tl.constexpr):
    """A field of `Saved`, or None, for these rows of the head whose first is `first`; `beyond` for rows beyond T."""
    if field is not None:
        return tl.load(field + first + rows, mask=rows < T, other=beyond) if CUT else tl.load(field + first + rows)


@triton.jit
def through_softmax(products, d_weights, rows, cols, sizes, seen, keep, saved, scoring, dropout, AXIS: tl.constexpr):
    """Weights after dropout, and the gradient of their scores before the softcap, of products q · k and dO · v.

    seen, keep: None for all. saved: `Saved` of the queries, which are along the other axis than AXIS.
    """
    capped_scores = capped(products, scoring.scale, scoring.softcap)
    scores = biased(capped_scores, rows, cols, sizes, scoring.slopes)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    scores -= tl.expand_dims(saved.m, AXIS)
    if saved.log_l is not None:  # otherwise m contains it
        scores -= tl.expand_dims(saved.log_l, AXIS)
    weights = tl.exp2(scores)  # P = exp(S − lse)
    used = weights
    if keep is not None:
        used = tl.where(keep, weights * dropout.growth, 0.0)
        d_weights = tl.where(keep, d_weights * dropout.growth, 0.0)
    d_scores = weights * (d_weights - tl.expand_dims(saved.delta, AXIS))  # dS = P ∘ (dP − delta)
    if scoring.softcap is not None:  # d(softcap · tanh x) = softcap · (1 − tanh² x) dx
        t = capped_scores / scoring.softcap
        d_scores *= 1.0 - t * t
    return used, d_scores


@triton.jit
def factor_of_products(scoring):
    """The factor of q · k in a score, without log₂ e."""
    return scoring.scale * LN_2 if scoring.softcap is None else scoring.scale * scoring.softcap * LN_2


@triton.jit
def fold_queries(
    first, end, whole, num_whole, sums, keys, queries, scoring, window, dropout, SIZES: tl.constexpr, CUT: tl.constexpr
):
    """sums = (dk, dv) with the sums over the queries of the tiles first … end − 1 of one head.

    `num_whole` tiles from `whole` on are left out. keys: k and v [COLS, BLOCK_D], the index of the first, T, S.
    queries: q and d_out of the head as (pointer, stride of rows), `Saved` of all heads, the first query's number in it.
    """
    dk, dv = sums
    k, v, first_col, T, S = keys
    q_matrix, d_out_matrix, saved, first_saved = queries
    dropout, head = dropout
    ROWS: tl.constexpr = SIZES.ROWS
    row = tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, SIZES.COLS)
    earliest = cols - (S - T)  # the first query that sees a key
    for visited in range(first, end - num_whole):
        i = visited
        if CUT:
            i = tl.where(visited < whole, visited, visited + num_whole)
        rows = i * ROWS + row
        q = load_tile(q_matrix, i * ROWS, 0, T, None, ROWS, SIZES, CUT, False)
        d_out = load_tile(d_out_matrix, i * ROWS, 0, T, None, ROWS, SIZES, CUT, False)
        log_l = load_saved(saved.log_l, first_saved, rows, T, 0.0, CUT)
        m = load_saved(saved.m, first_saved, rows, T, float("inf"), CUT)  # so that weights beyond T are 0
        of_rows = Saved(m, log_l, load_saved(saved.delta, first_saved, rows, T, 0.0, CUT))
        if q.dtype == tl.float32:  # the forward's order of operands: m and log₂ l contain its rounding
            products = tl.trans(tl.dot(q, tl.trans(k), input_precision="ieee"))
        else:
            products = tl.dot(k, tl.trans(q), input_precision="ieee")  # Sᵀ = K Qᵀ
        d_weights = tl.dot(v, tl.trans(d_out), input_precision="ieee")  # dPᵀ = V dOᵀ
        seen, keep = None, None
        if scoring.attn_mask is not None:
            seen = visible(rows[None, :], cols[:, None], (T, S), window, scoring.attn_mask, SIZES.CAUSAL)
        elif CUT and SIZES.CAUSAL:
            since = (earliest - i * ROWS)[:, None]
            seen = since <= row[None, :]
            if window is not None:
                seen &= since + window > row[None, :]
        if dropout is not None:
            keep = tl.trans(kept(i * ROWS, first_col, dropout, head, ROWS, SIZES.COLS))
        weights, d_scores = through_softmax(
            products, d_weights, rows[None, :], cols[:, None], (T, S), seen, keep, of_rows, scoring, dropout, 0
        )
        dv = tl.dot(weights.to(d_out.dtype), d_out, dv, input_precision="ieee")  # dV += Pᵀ dO
        if scoring.attn_mask is not None:  # a key or a value that no query sees may be NaN
            d_scores = tl.where(seen, d_scores, 0.0)
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee")  # dK += dSᵀ Q
    return dk, dv


@triton.jit
def fold_keys(first, end, dq, queries, keys, scoring, window, dropout, SIZES: tl.constexpr, CUT: tl.constexpr):
    """dq with the sums over the keys of the tiles first … end − 1.

    queries: q and d_out [ROWS, BLOCK_D], `Saved` of each, the index of the first, T, S. keys: k and v as (pointer,
    stride of rows), start and stop of the keys that some query here sees.
    """
    q, d_out, saved, first_row, T, S = queries
    k_matrix, v_matrix, start, stop = keys
    dropout, head = dropout
    COLS: tl.constexpr = SIZES.COLS
    col = tl.arange(0, COLS)
    rows = first_row + tl.arange(0, SIZES.ROWS)
    for j in range(first, end):
        cols = j * COLS + col
        seen, some, keep = None, None, None
        if scoring.attn_mask is not None:
            seen = visible(rows[:, None], cols[None, :], (T, S), window, scoring.attn_mask, SIZES.CAUSAL)
            some = tl.max(seen.to(tl.int32), axis=0) > 0
        k = load_tile(k_matrix, j * COLS, start, stop, some, COLS, SIZES, CUT, False)
        v = load_tile(v_matrix, j * COLS, start, stop, some, COLS, SIZES, CUT, False)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # S = Q Kᵀ
        d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")  # dP = dO Vᵀ
        if CUT and scoring.attn_mask is None:
            seen = sees_keys(col, j * COLS, rows, (T, S), window, SIZES.CAUSAL)
        if dropout is not None:
            keep = kept(first_row, j * COLS, dropout, head, SIZES.ROWS, COLS)
        _, d_scores = through_softmax(
            products, d_weights, rows[:, None], cols[None, :], (T, S), seen, keep, saved, scoring, dropout, 1
        )
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")  # dQ += dS K
    return dq


COUNTS = ["num_key_tiles", "num_query_tiles", "batch_size", "num_heads", "group", "splits", "T", "S"]


@triton.jit(do_not_specialize=[*COUNTS, "window"])
def flash_attention_backward_kernel(
    q,  # [B, H, T, D], as every tensor of more than one dimension: (pointer, stride of each dimension)
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    d_out,  # [B, H, T, D]
    saved,  # `Saved`
    dq,  # [B, H, T, D]
    dk,  # [splits · B, Hkv, S, D], float32 if splits > 1
    dv,  # [splits · B, Hkv, S, D]
    scoring,  # this to packed, and window, as in `flash_attention_kernel`
    dropout,
    packed,
    num_key_tiles,  # if packed: of all sequences together, as num_query_tiles, T and S
    num_query_tiles,
    batch_size,
    num_heads,
    group,  # query heads per KV head
    splits,  # of the query heads of a KV head; each has sums of its own. A divisor of group
    T,
    S,
    window,
    KEY_SIZES: tl.constexpr,  # `Sizes` of the programs that own keys
    QUERY_SIZES: tl.constexpr,  # `Sizes` of the programs that own queries
):
    """dQ, dK and dV with every option. Grid (splits · B · Hkv · num_key_tiles + B · H · num_query_tiles).

    Steps from `flash_dq_kernel`:
    1. dK and dV: the first programs own tiles of keys. They sum over the query heads of a group, so they take longest.
    2. Skip: tiles that the mask hides are not visited, and only tiles that it cuts pay for it.
    3. Saved: in float32 m and log₂ l instead of lse, because their sum would round away what large scores differ by.
    4. Options and packed sequences, as in the forward. An option that is None costs nothing.
    """
    D: tl.constexpr = KEY_SIZES.D
    BLOCK_D: tl.constexpr = KEY_SIZES.BLOCK_D
    COLS: tl.constexpr = KEY_SIZES.COLS
    ROWS: tl.constexpr = QUERY_SIZES.ROWS
    num_kv_heads, pid, total = num_heads // group, tl.program_id(0), T
    num_key_programs = splits * batch_size * num_kv_heads * num_key_tiles
    if pid < num_key_programs:  # dK and dV of a tile of keys, summed over the queries that see a key of it
        tile, kv_head = pid % num_key_tiles, pid // num_key_tiles % num_kv_heads
        split_and_batch = pid // num_key_tiles // num_kv_heads
        split, batch = split_and_batch // batch_size, split_and_batch % batch_size
        tile, sequence, first_q, first_k, T, S = segment_of(tile, batch, packed, T, S, COLS, True)
        col, first_col = tl.arange(0, COLS), tile * COLS
        first_k += tl.cast(first_col, tl.int64)
        real = col < S - first_col
        if window is not None:  # a key before all windows may be NaN
            real &= col > S - T - window - first_col
        k_tile = load_rows(matrix_of_head(k, batch, kv_head, first_k), col, real, D, BLOCK_D)
        v_tile = load_rows(matrix_of_head(v, batch, kv_head, first_k), col, real, D, BLOCK_D)
        keys = (k_tile, v_tile, first_col, T, S)
        sums = tl.zeros([COLS, BLOCK_D], tl.float32), tl.zeros([COLS, BLOCK_D], tl.float32)
        first, whole, num_whole, end = query_tiles(first_col, T, S, window, KEY_SIZES)
        if scoring.attn_mask is not None:  # it may cut any tile
            num_whole = 0
        for nth in range(0, group // splits):
            head = kv_head * group + split * (group // splits) + nth
            of_head = Scoring(scoring.scale, scoring.softcap, slope_of(scoring, head), mask_of(scoring, batch, head))
            q_head, d_out_head = matrix_of_head(q, batch, head, first_q), matrix_of_head(d_out, batch, head, first_q)
            queries = (q_head, d_out_head, saved, (batch * num_heads + head).to(tl.int64) * total + first_q)
            drops = (dropout, sequence * num_heads + head)
            if scoring.attn_mask is None:
                sums = fold_queries(
                    whole, whole + num_whole, 0, 0, sums, keys, queries, of_head, None, drops, KEY_SIZES, False
                )
            sums = fold_queries(
                first, end, whole, num_whole, sums, keys, queries, of_head, window, drops, KEY_SIZES, True
            )
        dk_tile, dv_tile = sums
        dk_tile *= factor_of_products(scoring)
        inside = col < S - first_col
        store_rows(matrix_of_head(dk, split_and_batch, kv_head, first_k), col, dk_tile, inside, D, BLOCK_D)
        store_rows(matrix_of_head(dv, split_and_batch, kv_head, first_k), col, dv_tile, inside, D, BLOCK_D)
        return

    pid -= num_key_programs  # dQ of a tile of queries, summed over the keys that they see
    tile, head = pid % num_query_tiles, pid // num_query_tiles % num_heads
    batch = pid // num_query_tiles // num_heads
    tile, sequence, first_q, first_k, T, S = segment_of(tile, batch, packed, T, S, ROWS, False)
    row, first_row = tl.arange(0, ROWS), tile * ROWS
    inside, rows = row < T - first_row, first_row + row
    first_saved = (batch * num_heads + head).to(tl.int64) * total + first_q
    log_l = load_saved(saved.log_l, first_saved, rows, T, 0.0, True)
    m = load_saved(saved.m, first_saved, rows, T, float("inf"), True)
    of_rows = Saved(m, log_l, load_saved(saved.delta, first_saved, rows, T, 0.0, True))
    first_q += tl.cast(first_row, tl.int64)
    q_tile = load_rows(matrix_of_head(q, batch, head, first_q), row, inside, D, BLOCK_D)
    d_out_tile = load_rows(matrix_of_head(d_out, batch, head, first_q), row, inside, D, BLOCK_D)
    queries = (q_tile, d_out_tile, of_rows, first_row, T, S)
    start, stop, first, whole, cut, end = key_range(first_row, T, S, window, QUERY_SIZES)
    k_head = matrix_of_head(k, batch, head // group, first_k)
    keys = (k_head, matrix_of_head(v, batch, head // group, first_k), start, stop)
    scoring = Scoring(scoring.scale, scoring.softcap, slope_of(scoring, head), mask_of(scoring, batch, head))
    drops = (dropout, sequence * num_heads + head)
    dq_tile = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if scoring.attn_mask is None:
        if window is not None:
            dq_tile = fold_keys(first, whole, dq_tile, queries, keys, scoring, window, drops, QUERY_SIZES, True)
        dq_tile = fold_keys(whole, cut, dq_tile, queries, keys, scoring, None, drops, QUERY_SIZES, False)
        first, window = cut, None
    dq_tile = fold_keys(first, end, dq_tile, queries, keys, scoring, window, drops, QUERY_SIZES, True)
    dq_tile *= factor_of_products(scoring)
    store_rows(matrix_of_head(dq, batch, head, first_q), row, dq_tile, inside, D, BLOCK_D)
