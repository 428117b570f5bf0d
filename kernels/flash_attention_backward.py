"""FlashAttention-2's backward: scores are computed again from the log-sum-exp, tile by tile (lesson 6).

With P = exp(S − lse), where S are the scores of q · k · scale, and D_i = Σ_d dO_id · O_id − dlse_i:

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − D)        dQ = scale · dS K        dK = scale · dSᵀ Q

A sum over queries belongs to a key and a sum over keys to a query. So a program owns columns of dK and dV, or rows of
dQ, and sums alone (`flash_attention_gradients.py`): nothing is added to by two, and equal inputs give equal bits. In
the paper's loop dQ is added to in main memory instead. Dao 2023, Algorithm 2.
"""

import triton
import triton.language as tl

from pagewise.kernels.flash_attention import count_tiles, load_rows, of_head, place, store_rows
from pagewise.kernels.flash_attention_gradients import gradient_of_keys, gradient_of_queries


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
        return (tiles(32, 64, 8, 1), tiles(32, 32, 4, 1)) if block_d <= 128 else (tiles(16, 32, 8, 1),)
    if block_d <= 64:
        return (tiles(64, 128, 8, 3), tiles(64, 128, 8, 2), tiles(64, 64, 4, 2))
    if block_d <= 128:
        choices = tiles(32, 128, 8, 2), tiles(64, 128, 8, 2), tiles(64, 64, 8, 2)
        return choices if major >= 9 else choices[::-1]
    return (tiles(64, 32, 8, 1) if major >= 9 else tiles(32, 64, 8, 1), tiles(32, 32, 8, 1))


@triton.jit(do_not_specialize=["num_heads", "T"])
def flash_attention_delta_kernel(
    out_ptr,  # [B, H, T, D]
    rest_ptr,  # as out; read if REST
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
    REST: tl.constexpr,
):
    """delta = ((out + rest) · d_out).sum(-1) − d_lse, and 0 for a query that saw no key. Grid (⌈T / ROWS⌉ · H · B).

    It is subtracted from numbers that are like it where one weight is nearly 1: out alone, rounded, is not enough.
    """
    pid, num_tiles = tl.program_id(0), tl.cdiv(T, ROWS)
    tile, head, batch = pid % num_tiles, pid // num_tiles % num_heads, pid // num_tiles // num_heads
    out_matrix = of_head((out_ptr, out_stride_batch, out_stride_head, out_stride_row), batch, head, 0)
    d_out_matrix = of_head((d_out_ptr, d_out_stride_batch, d_out_stride_head, d_out_stride_row), batch, head, 0)
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = load_rows(out_matrix, rows, rows < T, D, BLOCK_D).to(tl.float32)
    if REST:
        rest_matrix = of_head((rest_ptr, out_stride_batch, out_stride_head, out_stride_row), batch, head, 0)
        out += load_rows(rest_matrix, rows, rows < T, D, BLOCK_D).to(tl.float32)
    d_out = load_rows(d_out_matrix, rows, rows < T, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * d_out, axis=1)  # D = rowsum(dO ∘ O)
    at = (pid // num_tiles).to(tl.int64) * T + rows
    delta -= tl.load(d_lse_ptr + at, mask=rows < T, other=0.0)
    saw = tl.load(lse_ptr + at, mask=rows < T, other=0.0) != float("-inf")
    tl.store(delta_ptr + at, tl.where(saw, delta, 0.0), mask=rows < T)


@triton.jit(
    do_not_specialize=["batch_size", "num_seqs", "num_heads", "group", "splits", "T", "S", "window", "threshold"]
)
def flash_attention_backward_kernel(
    q_ptr,  # [B, H, T, D]
    k_ptr,  # [B, Hkv, S, D]
    v_ptr,  # [B, Hkv, S, D]
    d_out_ptr,  # [B, H, T, D]
    m_ptr,  # [B, H, T] float32; this and log₂ l as the forward stored them
    log_l_ptr,  # [B, H, T] float32
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
        first = batch.to(tl.int64) * num_heads * T + first_q
        saved = (m_ptr + first, log_l_ptr + first, delta_ptr + first, T)
        heads = group // splits
        first_head = kv_head * group + of_split // batch_size * heads
        dk, dv = gradient_of_keys(
            at, first_head, heads, inputs, saved,
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
        first = batch.to(tl.int64) * num_heads * T + first_q
        saved = (m_ptr + first, log_l_ptr + first, delta_ptr + first, T)
        dq = gradient_of_queries(
            at, group, inputs, saved,
            scale, softcap, slopes_ptr, window, mask, dropout, D, BLOCK_D, QUERY_ROWS, QUERY_COLS, CAUSAL,
        )  # fmt: skip
        row = tl.arange(0, QUERY_ROWS)
        there = tile * QUERY_ROWS + row < seq_T
        first_q += tile.to(tl.int64) * QUERY_ROWS
        dq_tensor = (dq_ptr, dq_stride_batch, dq_stride_head, dq_stride_row)
        store_rows(of_head(dq_tensor, batch, head, first_q), row, dq * plain_scale, there, D, BLOCK_D)
