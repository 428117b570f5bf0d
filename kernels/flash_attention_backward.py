"""FlashAttention-2, backward: the scores are computed again, tile by tile, instead of being stored (lesson 6).

With S = scores of q · k · scale, P = exp(S − lse) and delta_i = Σ_d dO_id · O_id − dlse_i:

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − delta)        dQ = scale · dS K        dK = scale · dSᵀ Q

A sum over queries belongs to a key, and a sum over keys belongs to a query. A program therefore owns either rows of dK
and dV or rows of dQ, and no two programs add to the same number. Equal inputs give equal bits. The price is seven
products instead of five: S and dP are computed twice. The paper adds to dQ in memory (Dao 2023, Algorithm 2).

`flash_dq_kernel` is the first rung, `flash_attention_backward_kernel` is what the package runs.
"""

import triton
import triton.language as tl

from pagewise.kernels.flash_attention import load_rows, matrix_of_head, segment_of, store_rows
from pagewise.kernels.flash_attention_gradients import store_gradient_of_keys, store_gradient_of_queries
from pagewise.kernels.scores import LOG2_E, visible


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
    lse,  # [B · H · T] float32, as the following two
    d_lse,
    delta,
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
    sees = tl.load(lse + numbers, mask=rows < T, other=0.0) != float("-inf")
    tl.store(delta + numbers, tl.where(sees, delta_tile, 0.0), mask=rows < T)


SIZES = ["num_key_tiles", "num_query_tiles", "batch_size", "num_heads", "group", "splits", "T", "S"]


@triton.jit(do_not_specialize=[*SIZES, "window", "threshold"])
def flash_attention_backward_kernel(
    q,  # [B, H, T, D], as every tensor of more than one dimension: (pointer, stride of each dimension)
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    d_out,  # [B, H, T, D]
    m_ptr,  # [B · H · T] float32; this and log₂ l as the forward stored them
    log_l_ptr,  # [B · H · T] float32
    delta,  # [B · H · T] float32
    slopes,  # [H] float32; this to cu_seqlens_k, and scale to growth: as in the forward
    attn_mask,
    seed,
    cu_seqlens_q,
    cu_seqlens_k,
    key_sequences,  # [num_key_tiles] int32: the sequence of each tile of keys; None if sequences are not packed
    query_sequences,  # [num_query_tiles] int32
    dq,  # [B, H, T, D]
    dk,  # [splits · B, Hkv, S, D], float32 if splits > 1
    dv,  # [splits · B, Hkv, S, D]
    num_key_tiles,
    num_query_tiles,
    batch_size,
    num_heads,
    group,  # query heads per KV head
    splits,  # of the query heads of a KV head; each has sums of its own. A divisor of group
    T,
    S,
    scale,
    softcap,
    window,
    threshold,
    growth,
    plain_scale,  # the factor of q · k
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_ROWS: tl.constexpr,  # tiles of the programs that own keys
    KEY_COLS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # tiles of the programs that own queries
    QUERY_COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dQ, dK and dV with every option. Grid (splits · B · Hkv · num_key_tiles + B · H · num_query_tiles).

    Steps from `flash_dq_kernel`:
    1. dK and dV: the first programs own tiles of keys. They sum over the query heads of a group, so they take longest.
    2. Skip: tiles that the mask hides are not visited.
    3. Saved: m and log₂ l instead of lse, because their sum would round away what large scores differ by.
    4. Options and packed sequences, as in the forward.
    """
    pid, num_kv_heads = tl.program_id(0), num_heads // group
    num_key_programs = splits * batch_size * num_kv_heads * num_key_tiles
    scoring = (scale, softcap, slopes, window, attn_mask)
    dropout = (tl.load(seed), threshold, growth, num_heads) if seed is not None else None
    inputs, saved = (q, k, v, d_out), (m_ptr, log_l_ptr, delta, num_heads, T)
    if pid < num_key_programs:
        tile, kv_head = pid % num_key_tiles, pid // num_key_tiles % num_kv_heads
        split_and_batch = pid // num_key_tiles // num_kv_heads
        split, batch = split_and_batch // batch_size, split_and_batch % batch_size
        tile, segment = segment_of(tile, batch, key_sequences, cu_seqlens_k, cu_seqlens_q, cu_seqlens_k, T, S, KEY_COLS)
        of_kv_head = (kv_head, kv_head * group + split * (group // splits), group // splits)
        d_kv = (dk, dv, split_and_batch, plain_scale)
        store_gradient_of_keys(
            d_kv, tile, of_kv_head, segment, inputs, saved, scoring, dropout, D, BLOCK_D, KEY_ROWS, KEY_COLS, CAUSAL
        )
    else:
        pid -= num_key_programs
        tile, head = pid % num_query_tiles, pid // num_query_tiles % num_heads
        batch = pid // num_query_tiles // num_heads
        tile, segment = segment_of(
            tile, batch, query_sequences, cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, T, S, QUERY_ROWS
        )
        d_q, of_head = (dq, plain_scale), (head, head // group)
        store_gradient_of_queries(
            d_q, tile, of_head, segment, inputs, saved, scoring, dropout, D, BLOCK_D, QUERY_ROWS, QUERY_COLS, CAUSAL
        )
