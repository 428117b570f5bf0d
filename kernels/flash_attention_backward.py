"""FlashAttention-2's backward: scores are computed again from the log-sum-exp, tile by tile (lesson 6).

With P = exp(S − lse), where S are the scores of q · k · scale, and D_i = Σ_d dO_id · O_id − dlse_i:

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − D)        dQ = scale · dS K        dK = scale · dSᵀ Q

A sum over queries belongs to a key and a sum over keys to a query. So a program owns columns of dK and dV, or rows of
dQ, and sums alone: nothing is added to by two, and equal inputs give equal bits. In the paper's loop dQ is added to in
main memory instead. Dao 2023, Algorithm 2.
"""

import triton
import triton.language as tl

from pagewise.kernels.flash_attention import count_tiles, key_tiles, load_rows, of_head, place, store_rows
from pagewise.kernels.scores import LOG2_E, biased, capped, kept, visible



def tiles(rows, cols, num_warps, num_stages):
    """How programs that own `cols` keys, and those that own as many queries, cut their work: `rows` of the others."""
    sizes = {"KEY_ROWS": rows, "KEY_COLS": cols, "QUERY_ROWS": cols, "QUERY_COLS": rows}
    return sizes | {"num_warps": num_warps, "num_stages": num_stages}


def backward_tiles(block_d, itemsize, major, heavy):
    """`forward_tiles` of the backward."""
    if not major:
        return (tiles(64, 64, 4, 1),)
    if itemsize == 4:
        return (tiles(16, 32, 4, 1) if block_d <= 64 else tiles(16, 16, 8, 1),)
    if heavy:
        return (tiles(32, 64, 8, 1) if block_d <= 128 else tiles(16, 32, 8, 1),)
    if block_d <= 64:
        return (tiles(64, 128, 8, 3), tiles(64, 128, 8, 2), tiles(64, 64, 4, 2))
    if block_d <= 128:
        choices = tiles(32, 128, 8, 2), tiles(64, 128, 8, 2), tiles(64, 64, 8, 2)
        return choices if major >= 9 else choices[::-1]
    return (tiles(32, 64, 8, 1), tiles(32, 32, 8, 1))


@triton.jit
def flash_attention_delta_kernel(
    out_ptr,  # [B, H, T, D]
    d_out_ptr,  # [B, H, T, D]
    lse_ptr,  # [B, H, T] float32
    d_lse_ptr,  # [B, H, T] float32
    delta_ptr,  # [B, H, T] float32
    out_stride_batch,
    out_stride_head,
    out_stride_row,
    d_out_stride_batch,
    d_out_stride_head,
    d_out_stride_row,
    num_heads,
    T,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = (out · d_out).sum(-1) − d_lse, and 0 for a query that saw no key. Grid (⌈T / ROWS⌉ · H · B)."""
    pid, num_tiles = tl.program_id(0), tl.cdiv(T, ROWS)
    tile, head, batch = pid % num_tiles, pid // num_tiles % num_heads, pid // num_tiles // num_heads
    out_matrix = of_head((out_ptr, out_stride_batch, out_stride_head, out_stride_row), batch, head, 0)
    d_out_matrix = of_head((d_out_ptr, d_out_stride_batch, d_out_stride_head, d_out_stride_row), batch, head, 0)
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = load_rows(out_matrix, rows, rows < T, D, BLOCK_D).to(tl.float32)
    d_out = load_rows(d_out_matrix, rows, rows < T, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * d_out, axis=1)  # D = rowsum(dO ∘ O)
    at = (pid // num_tiles).to(tl.int64) * T + rows
    delta -= tl.load(d_lse_ptr + at, mask=rows < T, other=0.0)
    saw = tl.load(lse_ptr + at, mask=rows < T, other=0.0) != float("-inf")
    tl.store(delta_ptr + at, tl.where(saw, delta, 0.0), mask=rows < T)


@triton.jit
def load_lse(lse_ptr, rows, T):
    """Log-sum-exps in units of log 2; +∞ for a row that saw nothing or is none, so that exp2(scores − it) is 0."""
    lse = tl.load(lse_ptr + rows, mask=rows < T, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


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
    saved,  # lse, delta: pointers to the batch's first query, and their stride of heads
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
    lse_ptr, delta_ptr, saved_stride_head = saved
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
        of_saved = head.to(tl.int64) * saved_stride_head
        slope = tl.load(slopes_ptr + head) * LOG2_E if slopes_ptr is not None else None
        mask_matrix = mask_of_head(mask, batch, head) if mask is not None else None
        for i in range(first, behind):
            rows = i * ROWS + row
            q = load_rows(further(q_matrix, i * ROWS), row, rows < T, D, BLOCK_D)
            d_out = load_rows(further(d_out_matrix, i * ROWS), row, rows < T, D, BLOCK_D)
            lse = load_lse(lse_ptr + of_saved, rows, T)
            delta = tl.load(delta_ptr + of_saved + rows, mask=rows < T, other=0.0)

            capped_scores = capped(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, softcap)  # Sᵀ = K Qᵀ
            scores = biased(capped_scores, rows[None, :], cols[:, None], sizes, slope)
            weights = tl.exp2(scores - lse[None, :])  # Pᵀ = exp(Sᵀ − lse)
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
    lse_ptr, delta_ptr, saved_stride_head = saved
    sizes = (T, S)

    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)  # in a tile
    rows = tile * ROWS + row
    first_q += tile.to(tl.int64) * ROWS
    q = load_rows(of_head(q_tensor, batch, head, first_q), row, rows < T, D, BLOCK_D)
    d_out = load_rows(of_head(d_out_tensor, batch, head, first_q), row, rows < T, D, BLOCK_D)
    k_matrix = of_head(k_tensor, batch, head // group, first_k)
    v_matrix = of_head(v_tensor, batch, head // group, first_k)
    of_saved = head.to(tl.int64) * saved_stride_head
    lse = load_lse(lse_ptr + of_saved, rows, T)
    delta = tl.load(delta_ptr + of_saved + rows, mask=rows < T, other=0.0)
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
        weights = tl.exp2(scores - lse[:, None])  # P = exp(S − lse)
        weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")  # dP = dO Vᵀ
        if dropout is not None:
            seed, threshold, growth, num_heads = dropout
            stays = kept(tile * ROWS, j * COLS, sequence * num_heads + head, seed, threshold, ROWS, COLS)
            d_weights = tl.where(stays, d_weights * growth, 0.0)
        ds = through_softcap(weights * (d_weights - delta[:, None]), capped_scores, softcap)  # dS = P ∘ (dP − D)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")  # dQ += dS K
    return dq


@triton.jit
def flash_attention_backward_kernel(
    q_ptr,  # [B, H, T, D]
    k_ptr,  # [B, Hkv, S, D]
    v_ptr,  # [B, Hkv, S, D]
    d_out_ptr,  # [B, H, T, D]
    lse_ptr,  # [B, H, T] float32
    delta_ptr,  # [B, H, T] float32
    slopes_ptr,  # [H] float32; read if ALIBI
    mask_ptr,  # [B, H, T, S] bytes; read if MASK
    seed_ptr,  # [] int64; read if DROPOUT
    cu_q_ptr,  # [B + 1] int32; read if PACKED, as in the forward
    cu_k_ptr,  # [B + 1] int32
    dq_ptr,  # [B, H, T, D]
    dk_ptr,  # [splits · B, Hkv, S, D], float32 if splits > 1
    dv_ptr,  # [splits · B, Hkv, S, D]
    q_stride_batch,
    q_stride_head,
    q_stride_row,
    k_stride_batch,
    k_stride_head,
    k_stride_row,
    v_stride_batch,
    v_stride_head,
    v_stride_row,
    d_out_stride_batch,
    d_out_stride_head,
    d_out_stride_row,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_row,
    mask_stride_col,
    dq_stride_batch,
    dq_stride_head,
    dq_stride_row,
    dk_stride_batch,
    dk_stride_head,
    dk_stride_row,
    dv_stride_batch,
    dv_stride_head,
    dv_stride_row,
    batch_size,  # if PACKED: 1
    num_seqs,
    num_heads,
    group,  # query heads that share a KV head
    splits,  # parts of a group, each with sums of its own; a divisor of it
    T,  # if PACKED: of all sequences
    S,
    scale,  # as in the forward, down to growth
    softcap,
    window,
    threshold,
    growth,
    plain_scale,  # what q · k is multiplied by
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_ROWS: tl.constexpr,  # tiles of the programs that own keys
    KEY_COLS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # and of those that own queries
    QUERY_COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dq, dk, dv of attention from d_out and what the forward stored.

    Grid (splits · batch_size · Hkv · tiles of keys + batch_size · H · tiles of queries), as `count_tiles` counts them.
    The programs that own keys come first: they sum over the query heads of a group, so they take the longest.
    """
    inputs = (
        (q_ptr, q_stride_batch, q_stride_head, q_stride_row),
        (k_ptr, k_stride_batch, k_stride_head, k_stride_row),
        (v_ptr, v_stride_batch, v_stride_head, v_stride_row),
        (d_out_ptr, d_out_stride_batch, d_out_stride_head, d_out_stride_row),
    )
    mask = (mask_ptr, mask_stride_batch, mask_stride_head, mask_stride_row, mask_stride_col) if MASK else None
    slopes_ptr = slopes_ptr if ALIBI else None
    softcap = softcap if SOFTCAP else None
    window = window if WINDOW else None
    dropout = (tl.load(seed_ptr), threshold, growth, num_heads) if DROPOUT else None

    num_key_tiles = count_tiles(S, num_seqs, KEY_COLS, PACKED)
    num_query_tiles = count_tiles(T, num_seqs, QUERY_ROWS, PACKED)
    pid, num_kv_heads = tl.program_id(0), num_heads // group
    num_key_programs = splits * batch_size * num_kv_heads * num_key_tiles
    if pid < num_key_programs:
        tile, kv_head, of_split, sequence, first_q, first_k, seq_T, seq_S = place(
            pid, num_key_tiles, num_kv_heads, cu_k_ptr, cu_q_ptr, cu_k_ptr, num_seqs, T, S, KEY_COLS, PACKED
        )
        batch = of_split % batch_size
        sequence = sequence if PACKED else batch
        at = (tile, kv_head, batch, sequence, first_q, first_k, seq_T, seq_S)
        first_saved = batch.to(tl.int64) * num_heads * T + first_q
        heads = group // splits
        first_head = kv_head * group + of_split // batch_size * heads
        dk, dv = gradient_of_keys(
            at, first_head, heads, inputs, (lse_ptr + first_saved, delta_ptr + first_saved, T),
            scale, softcap, slopes_ptr, window, mask, dropout, D, BLOCK_D, KEY_ROWS, KEY_COLS, CAUSAL,
        )  # fmt: skip
        col = tl.arange(0, KEY_COLS)
        there = tile * KEY_COLS + col < seq_S
        first_k += tile.to(tl.int64) * KEY_COLS
        dk_tensor = (dk_ptr, dk_stride_batch, dk_stride_head, dk_stride_row)
        dv_tensor = (dv_ptr, dv_stride_batch, dv_stride_head, dv_stride_row)
        dk *= plain_scale
        store_rows(of_head(dk_tensor, of_split, kv_head, first_k), col, dk, there, D, BLOCK_D)
        store_rows(of_head(dv_tensor, of_split, kv_head, first_k), col, dv, there, D, BLOCK_D)
    else:
        at = place(
            pid - num_key_programs, num_query_tiles, num_heads, cu_q_ptr, cu_q_ptr, cu_k_ptr, num_seqs, T, S,
            QUERY_ROWS, PACKED,
        )  # fmt: skip
        tile, head, batch, sequence, first_q, first_k, seq_T, seq_S = at
        first_saved = batch.to(tl.int64) * num_heads * T + first_q
        dq = gradient_of_queries(
            at, group, inputs, (lse_ptr + first_saved, delta_ptr + first_saved, T),
            scale, softcap, slopes_ptr, window, mask, dropout, D, BLOCK_D, QUERY_ROWS, QUERY_COLS, CAUSAL,
        )  # fmt: skip
        row = tl.arange(0, QUERY_ROWS)
        there = tile * QUERY_ROWS + row < seq_T
        first_q += tile.to(tl.int64) * QUERY_ROWS
        dq_tensor = (dq_ptr, dq_stride_batch, dq_stride_head, dq_stride_row)
        store_rows(of_head(dq_tensor, batch, head, first_q), row, dq * plain_scale, there, D, BLOCK_D)
