"""FlashAttention-2, forward: attention over whole matrices whose scores never leave the chip (lesson 6).

A program owns a tile of queries. It folds tiles of keys and values into

    m = max s        l = Σ exp(s − m)        acc = Σ exp(s − m) · v

and divides acc by l once, after the last tile. Exponents are in base 2, because a GPU computes powers of 2 only: the
scale contains the factor log₂ e, and exp(s) = 2^(s · log₂ e). Dao 2023, Algorithm 1.

`flash_forward_kernel` is the first rung, complete and small. `flash_attention_kernel` is what the package runs.
"""

import triton
import triton.language as tl

from pagewise.kernels.partial import empty, finite, output
from pagewise.kernels.scores import LN_2, LOG2_E, biased, capped, kept, key_range, mask_of_head, visible


@triton.jit
def flash_forward_kernel(
    q,  # [B, H, T, D], as every tensor here: (pointer, strides of batch, head, row and column)
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    out,  # [B, H, T, D]
    lse,  # [B, H, T] float32
    group,  # query heads per KV head
    T,
    S,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the next power of two from D on
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """out, lse = attention(q, k, v, causal=CAUSAL, return_lse=True). Grid (⌈T / ROWS⌉, H, B)."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    q_at = q[0] + batch * q[1] + head * q[2] + row[:, None].to(tl.int64) * q[3] + dim[None, :]
    q_tile = tl.load(q_at, mask=(row[:, None] < T) & (dim[None, :] < D), other=0.0)
    k_head, v_head = k[0] + batch * k[1] + head // group * k[2], v[0] + batch * v[1] + head // group * v[2]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, S, COLS):
        col = start + tl.arange(0, COLS)
        real = (col[:, None] < S) & (dim[None, :] < D)
        k_tile = tl.load(k_head + col[:, None].to(tl.int64) * k[3] + dim[None, :], mask=real, other=0.0)
        v_tile = tl.load(v_head + col[:, None].to(tl.int64) * v[3] + dim[None, :], mask=real, other=0.0)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [ROWS, COLS]
        seen = col[None, :] < S
        if CAUSAL:
            seen &= col[None, :] <= row[:, None] + S - T
        scores = tl.where(seen, products * (scale * LOG2_E), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # (−∞) − (−∞) would be NaN
        weights = tl.exp2(scores - m_finite[:, None])
        alpha = tl.exp2(m - m_finite)
        l = alpha * l + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, alpha[:, None] * acc, input_precision="ieee")
        m = m_new
    divisor = tl.where(l == 0.0, 1.0, l)  # a query that sees no key: 0, and lse = −∞
    out_at = out[0] + batch * out[1] + head * out[2] + row[:, None].to(tl.int64) * out[3] + dim[None, :]
    tile = (acc / divisor[:, None]).to(out[0].dtype.element_ty)
    tl.store(out_at, tile, mask=(row[:, None] < T) & (dim[None, :] < D))
    tl.store(lse[0] + batch * lse[1] + head * lse[2] + row, m * LN_2 + tl.log(divisor), mask=row < T)


@triton.jit
def segment_of(tile, batch, sequences, cu_seqlens, cu_seqlens_q, cu_seqlens_k, T, S, TILE: tl.constexpr):
    """A tile within its sequence, and the sequence: (batch, sequence, first query row, first key row, T, S).

    Packed sequence b has the tiles from cu_seqlens[b] // TILE + b on (`tuning.sequence_of_each_tile`). Tensors that are
    not packed have one sequence per batch; their `sequences` is None.
    """
    sequence, first_q, first_k = batch, batch.to(tl.int64) * 0, batch.to(tl.int64) * 0
    if sequences is not None:
        sequence = tl.load(sequences + tile)
        tile -= tl.load(cu_seqlens + sequence) // TILE + sequence
        first_q, first_k = tl.load(cu_seqlens_q + sequence).to(tl.int64), tl.load(cu_seqlens_k + sequence).to(tl.int64)
        T = (tl.load(cu_seqlens_q + sequence + 1) - first_q).to(tl.int32)
        S = (tl.load(cu_seqlens_k + sequence + 1) - first_k).to(tl.int32)
    return tile, (batch, sequence, first_q, first_k, T, S)


@triton.jit
def matrix_of_head(tensor, batch, head, first_row):
    """The matrix (pointer, stride of rows) of one head, from `first_row` on."""
    ptr, stride_batch, stride_head, stride_row, _ = tensor
    ptr += batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head + first_row * stride_row
    return ptr, stride_row


@triton.jit
def load_rows(matrix, rows, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a matrix (pointer, stride of rows) as a tile [rows, BLOCK_D]; 0 where mask is False. mask: or None."""
    ptr, stride_row = matrix
    dim = tl.arange(0, BLOCK_D)[None, :]
    elements = ptr + rows[:, None] * stride_row + dim
    if mask is not None:
        tile = tl.load(elements, mask=mask[:, None] & (dim < D), other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(elements, mask=dim < D, other=0.0)
    else:
        tile = tl.load(elements)
    return tile


@triton.jit
def store_rows(matrix, rows, tile, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile [rows, BLOCK_D] into these rows of a matrix where mask is True, in the matrix's dtype."""
    ptr, stride_row = matrix
    dim = tl.arange(0, BLOCK_D)[None, :]
    elements = ptr + rows[:, None] * stride_row + dim
    tl.store(elements, tile.to(ptr.dtype.element_ty), mask=mask[:, None] & (dim < D))


@triton.jit
def fold_tiles(
    first,  # tile of keys
    end,  # the tile after the last
    state,  # m, l, acc
    queries,  # q [ROWS, BLOCK_D], rows [ROWS]: their indices
    keys,  # k and v of the KV head as (pointer, stride of rows); start and stop of the keys that some query here sees
    scoring,  # (T, S), scale, softcap, window
    slope,  # · log₂ e; None without ALiBi
    attn_mask,  # (pointer, strides of row and column); None without a mask
    dropout,  # seed, threshold, number of the head among all, first row; None without dropout
    D: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CUT: tl.constexpr,  # whether some key of these tiles is hidden from some query
):
    """(m, l, acc) after the tiles first … end − 1 of keys."""
    m, l, acc = state
    q, rows = queries
    k_matrix, v_matrix, start, stop = keys
    sizes, scale, softcap, window = scoring
    BLOCK_D: tl.constexpr = q.shape[1]
    for j in range(first, end):
        cols = j * COLS + tl.arange(0, COLS)
        seen, mask = None, None
        if CUT:
            seen = visible(rows[:, None], cols[None, :], sizes, window, attn_mask, CAUSAL)
            # a weight of 0 does not hide a NaN in v, so a key that no query here sees is read as 0
            mask = tl.max(seen.to(tl.int32), axis=0) > 0 if attn_mask is not None else (cols >= start) & (cols < stop)
        k = load_rows(k_matrix, cols.to(tl.int64), mask, D, BLOCK_D)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # S = Q Kᵀ
        scores = biased(capped(products, scale, softcap), rows[:, None], cols[None, :], sizes, slope)
        if CUT:
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp2(m - finite(m_new))
        weights = tl.exp2(scores - finite(m_new)[:, None])  # P = exp(S − m)
        l = l * alpha + tl.sum(weights, axis=1)
        m = m_new
        if dropout is not None:
            seed, threshold, head, first_row = dropout
            keep = kept(first_row, j * COLS, head, seed, threshold, rows.shape[0], COLS)
            weights = tl.where(keep, weights, 0.0)
        v = load_rows(v_matrix, cols.to(tl.int64), mask, D, BLOCK_D)
        acc *= alpha[:, None]  # O' = exp(m − m') · O + P V
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return m, l, acc


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "group", "T", "S", "window", "threshold"])
def flash_attention_kernel(
    q,  # [B, H, T, D], as every tensor of more than one dimension: (pointer, stride of each dimension)
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    out,  # [B, H, T, D]
    lse,  # [B · H · T] float32
    m_ptr,  # [B · H · T] float32; this and log_l_ptr are what the backward needs, None without a gradient
    log_l_ptr,  # [B · H · T] float32
    slopes,  # [H] float32; None without ALiBi
    attn_mask,  # [B, H, T, S] bytes; None without a mask
    seed,  # [1] int64; None without dropout
    cu_seqlens_q,  # [B + 1] int32: packed sequence b is rows cu[b] … cu[b + 1] − 1 of q [1, H, total, D]; or None
    cu_seqlens_k,  # [B + 1] int32
    sequences,  # [num_tiles] int32: the sequence of each tile; None if sequences are not packed
    num_tiles,
    num_heads,
    group,  # query heads per KV head
    T,  # if packed: of all sequences together
    S,
    scale,  # · log₂ e; with a softcap: the scale of the tanh's argument
    softcap,  # · log₂ e; None without a softcap
    window,  # None without a window
    threshold,  # a weight is kept if its 16-bit draw is at least this
    growth,  # factor of the weights that are kept
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the next power of two from D on
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """out, lse = attention(q, k, v, …, return_lse=True) with every option. Grid (num_tiles · H · B).

    Steps from `flash_forward_kernel`:
    1. Skip: tiles of keys that the mask hides from all queries are not visited. The others are three ranges: tiles
       that the window cuts, whole tiles, tiles that the diagonal or the end cuts. Only cut tiles pay for a mask.
    2. Order: with a causal mask the longest tiles of queries start first.
    3. Options: softcap, ALiBi, a mask in memory, dropout. An option that is None costs nothing.
    4. Packed sequences: a tile finds its sequence in a list, and the sequence's rows in cu_seqlens (sums of lengths).
    5. Backward: m and log₂ l are stored apart if a gradient is needed.
    """
    pid, total = tl.program_id(0), T
    tile, head, batch = pid % num_tiles, pid // num_tiles % num_heads, pid // num_tiles // num_heads
    tile, segment = segment_of(tile, batch, sequences, cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, T, S, ROWS)
    _, sequence, first_q, first_k, T, S = segment
    if sequences is not None:
        if tile * ROWS >= T:  # a sequence may have one tile too many
            return
    elif CAUSAL:
        tile = num_tiles - 1 - tile
    slope = tl.load(slopes + head) * LOG2_E if slopes is not None else None
    dropout = (tl.load(seed), threshold, sequence * num_heads + head, tile * ROWS) if seed is not None else None
    mask = mask_of_head(attn_mask, batch, head) if attn_mask is not None else None
    scoring = ((T, S), scale, softcap, window)

    rows = tile * ROWS + tl.arange(0, ROWS)
    queries = (load_rows(matrix_of_head(q, batch, head, first_q), rows.to(tl.int64), rows < T, D, BLOCK_D), rows)
    last_row = tl.minimum(tile * ROWS + ROWS, T) - 1
    start, stop, whole_start, whole_stop = key_range(tile * ROWS, last_row, (T, S), window, CAUSAL)
    k_matrix = matrix_of_head(k, batch, head // group, first_k)
    keys = (k_matrix, matrix_of_head(v, batch, head // group, first_k), start, stop)
    first, end = start // COLS, tl.cdiv(stop, COLS)
    state = empty(ROWS, BLOCK_D)
    if attn_mask is None:  # a mask in memory may cut any tile
        whole = tl.minimum(tl.cdiv(whole_start, COLS), end)
        if window is not None:
            state = fold_tiles(first, whole, state, queries, keys, scoring, slope, mask, dropout, D, COLS, CAUSAL, True)
        first = tl.maximum(whole_stop // COLS, whole)
        state = fold_tiles(whole, first, state, queries, keys, scoring, slope, mask, dropout, D, COLS, CAUSAL, False)
    state = fold_tiles(first, end, state, queries, keys, scoring, slope, mask, dropout, D, COLS, CAUSAL, True)

    m, l, acc = state
    out_tile, lse_tile = output(m * LN_2, l, acc)
    if dropout is not None:
        out_tile *= growth
    store_rows(matrix_of_head(out, batch, head, first_q), rows.to(tl.int64), out_tile, rows < T, D, BLOCK_D)
    numbers = (batch * num_heads + head).to(tl.int64) * total + first_q + rows  # where one number per query is
    tl.store(lse + numbers, lse_tile, mask=rows < T)
    if m_ptr is not None:
        # A query that sees no key gets log₂ l = +∞, so that the backward computes 2^(score − m − log₂ l) = 0.
        log_l = tl.where(l == 0.0, float("inf"), tl.log2(tl.where(l == 0.0, 1.0, l)))
        tl.store(m_ptr + numbers, finite(m), mask=rows < T)
        tl.store(log_l_ptr + numbers, log_l, mask=rows < T)
