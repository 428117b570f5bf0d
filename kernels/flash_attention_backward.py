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

from pagewise.kernels.arguments import Scoring
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
def store_gradients(
    inputs,
    outputs,
    saved,
    scoring,
    window,
    dropout,
    packed,
    counts,
    T,
    S,
    KEY_SIZES: tl.constexpr,
    QUERY_SIZES: tl.constexpr,
):
    """Store the gradients that this program owns: of a tile of keys, or of a tile of queries.

    inputs: q, k, v, d_out. outputs: dq, dk, dv. counts: tiles of keys, tiles of queries, batches, query heads, query
    heads per KV head, splits. The other arguments are those of `flash_attention_options_backward_kernel`.
    """
    num_key_tiles, num_query_tiles, batch_size, num_heads, group, splits = counts
    dq, dk, dv = outputs
    pid, num_kv_heads = tl.program_id(0), num_heads // group
    num_key_programs = splits * batch_size * num_kv_heads * num_key_tiles
    saved = (saved, T)
    if pid < num_key_programs:
        tile, kv_head = pid % num_key_tiles, pid // num_key_tiles % num_kv_heads
        split_and_batch = pid // num_key_tiles // num_kv_heads
        split, batch = split_and_batch // batch_size, split_and_batch % batch_size
        tile, segment = segment_of(tile, batch, packed, T, S, KEY_SIZES.COLS, True)
        of_kv_head = (kv_head, kv_head * group + split * (group // splits), group // splits, num_heads)
        of_keys = (dk, dv, split_and_batch)
        store_gradient_of_keys(of_keys, tile, of_kv_head, segment, inputs, saved, scoring, window, dropout, KEY_SIZES)
    else:
        pid -= num_key_programs
        tile, head = pid % num_query_tiles, pid // num_query_tiles % num_heads
        batch = pid // num_query_tiles // num_heads
        tile, segment = segment_of(tile, batch, packed, T, S, QUERY_SIZES.ROWS, False)
        heads = (head, head // group, num_heads)
        store_gradient_of_queries(dq, tile, heads, segment, inputs, saved, scoring, window, dropout, QUERY_SIZES)


COUNTS = ["num_key_tiles", "num_query_tiles", "batch_size", "num_heads", "group", "splits", "T", "S"]


@triton.jit(do_not_specialize=COUNTS)
def flash_attention_backward_kernel(
    q,  # [B, H, T, D], as every tensor of more than one dimension: (pointer, stride of each dimension)
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    d_out,  # [B, H, T, D]
    saved,  # `Saved`
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
    scale,  # · log₂ e
    KEY_SIZES: tl.constexpr,  # `Sizes` of the programs that own keys
    QUERY_SIZES: tl.constexpr,  # `Sizes` of the programs that own queries
):
    """dQ, dK and dV, causal or not. Grid (splits · B · Hkv · num_key_tiles + B · H · num_query_tiles).

    Steps from `flash_dq_kernel`:
    1. dK and dV: the first programs own tiles of keys. They sum over the query heads of a group, so they take longest.
    2. Skip: tiles that the mask hides are not visited, and only tiles that it cuts pay for it.
    3. Saved: in float32 m and log₂ l instead of lse, because their sum would round away what large scores differ by.
    """
    counts = (num_key_tiles, num_query_tiles, batch_size, num_heads, group, splits)
    scoring = Scoring(scale, None, None, None)
    inputs, outputs = (q, k, v, d_out), (dq, dk, dv)
    store_gradients(inputs, outputs, saved, scoring, None, None, None, counts, T, S, KEY_SIZES, QUERY_SIZES)


@triton.jit(do_not_specialize=[*COUNTS, "window"])
def flash_attention_options_backward_kernel(
    q,  # this to S, KEY_SIZES and QUERY_SIZES as in `flash_attention_backward_kernel`
    k,
    v,
    d_out,
    saved,
    dq,
    dk,
    dv,
    scoring,  # this to packed, and window, as in `flash_attention_kernel`
    dropout,
    packed,
    num_key_tiles,  # if packed: of all sequences together, as num_query_tiles, T and S
    num_query_tiles,
    batch_size,
    num_heads,
    group,
    splits,
    T,
    S,
    window,
    KEY_SIZES: tl.constexpr,
    QUERY_SIZES: tl.constexpr,
):
    """The same as `flash_attention_backward_kernel`, with every option and for packed sequences."""
    counts = (num_key_tiles, num_query_tiles, batch_size, num_heads, group, splits)
    inputs, outputs = (q, k, v, d_out), (dq, dk, dv)
    store_gradients(inputs, outputs, saved, scoring, window, dropout, packed, counts, T, S, KEY_SIZES, QUERY_SIZES)
