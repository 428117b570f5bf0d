"""FlashAttention-2, forward: attention over whole matrices whose scores never leave the chip (lesson 6).

A program owns a tile of queries. It folds tiles of keys and values into

    m = max s        l = Σ exp(s − m)        acc = Σ exp(s − m) · v

and divides acc by l once, after the last tile. Exponents are in base 2, because a GPU computes powers of 2 only: the
scale contains the factor log₂ e, and exp(s) = 2^(s · log₂ e). Dao 2023, Algorithm 1.

`flash_forward_kernel` is the first rung, complete and small. `flash_attention_kernel` is what the package runs.
"""

import triton
import triton.language as tl

from pagewise.kernels.arguments import Scoring
from pagewise.kernels.decode import rows_at
from pagewise.kernels.partial import LN_2, LOG2_E, empty, finite, output
from pagewise.kernels.scores import biased, capped, kept, key_range, mask_of, sees_keys, slope_of, visible


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
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
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
def segment_of(tile, batch, packed, T, S, TILE: tl.constexpr, OF_KEYS: tl.constexpr):
    """A tile of keys or queries within its sequence: (tile, sequence, first query row, first key row, T, S).

    Packed sequence b has the tiles from cu_seqlens[b] // TILE + b on (`tuning.sequence_of_each_tile`). Tensors that are
    not packed have one sequence per batch.
    """
    sequence = batch
    first_q, first_k = batch.to(tl.int64) * 0, batch.to(tl.int64) * 0
    if packed is not None:
        sequence = tl.load((packed.k_tiles if OF_KEYS else packed.q_tiles) + tile)
        tile -= tl.load((packed.cu_seqlens_k if OF_KEYS else packed.cu_seqlens_q) + sequence) // TILE + sequence
        first_q = tl.load(packed.cu_seqlens_q + sequence).to(tl.int64)
        first_k = tl.load(packed.cu_seqlens_k + sequence).to(tl.int64)
        T = (tl.load(packed.cu_seqlens_q + sequence + 1) - first_q).to(tl.int32)
        S = (tl.load(packed.cu_seqlens_k + sequence + 1) - first_k).to(tl.int32)
    return tile, sequence, first_q, first_k, T, S


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
    return rows_at(ptr + rows * stride_row, mask, D, BLOCK_D)


@triton.jit
def store_rows(matrix, rows, tile, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile [rows, BLOCK_D] into these rows of a matrix where mask is True, in the matrix's dtype."""
    ptr, stride_row = matrix
    dim = tl.arange(0, BLOCK_D)[None, :]
    elements = ptr + rows[:, None].to(tl.int64) * stride_row + dim
    tl.store(elements, tile.to(ptr.dtype.element_ty), mask=mask[:, None] & (dim < D))


@triton.jit
def load_tile(
    matrix, first, start, stop, seen, ROWS: tl.constexpr, SIZES: tl.constexpr, CUT: tl.constexpr, TMA: tl.constexpr
):
    """Rows first … first + ROWS − 1 of a matrix (pointer, stride of rows), of which start … stop − 1 are needed.

    A weight of 0 does not hide a NaN. So the others are not read where CUT is True: a row that is needed stands in
    their place, or 0 where a mask in memory says which are needed (seen, else None). TMA: matrix is `described`.
    """
    if TMA:
        tile = matrix.load([first - start, 0])
    else:
        ptr, stride_row = matrix
        ptr += tl.cast(first, tl.int64) * stride_row
        row = tl.arange(0, ROWS)
        if CUT and seen is None:
            row = tl.minimum(tl.maximum(row, start - first), stop - 1 - first)
        tile = load_rows((ptr, stride_row), row, seen, SIZES.D, SIZES.BLOCK_D)
    return tile


@triton.jit
def described(matrix, start, stop, SIZES: tl.constexpr):
    """A descriptor of rows start … stop − 1 of a matrix, in tiles of COLS. Rows outside of it are read as 0."""
    ptr, stride_row = matrix
    ptr += tl.cast(start, tl.int64) * stride_row
    extent = tl.maximum(stop - start, 1)  # 0 is not allowed
    return tl.make_tensor_descriptor(ptr, [extent, SIZES.D], [stride_row, 1], [SIZES.COLS, SIZES.BLOCK_D])


@triton.jit
def fold_tiles(
    first,  # tile of keys
    end,  # the tile after the last
    state,  # m, l, acc
    queries,  # q [ROWS, BLOCK_D], the index of the first; T and S
    keys,  # k and v as (pointer, stride of rows) or descriptors; start and stop of the keys that some query here sees
    scoring,  # `Scoring` of the head
    window,  # None if no key of these tiles lies before a window
    dropout,  # `Dropout` or None, and the number of the head among all heads of all sequences
    SIZES: tl.constexpr,
    CUT: tl.constexpr,  # whether some key of these tiles is hidden from some query
    SCALE_FIRST: tl.constexpr,
    TMA: tl.constexpr,
):
    """(m, l, acc) after the tiles first … end − 1 of keys."""
    m, l, acc = state
    q, first_row, T, S = queries
    k_matrix, v_matrix, start, stop = keys
    dropout, head = dropout
    COLS: tl.constexpr = SIZES.COLS
    rows, col = first_row + tl.arange(0, SIZES.ROWS), tl.arange(0, COLS)
    for j in range(first, end):
        first_col, some = j * COLS, None
        cols = first_col + col
        if scoring.attn_mask is not None:
            seen = visible(rows[:, None], cols[None, :], (T, S), window, scoring.attn_mask, SIZES.CAUSAL)
            some = tl.max(seen.to(tl.int32), axis=0) > 0
        k = load_tile(k_matrix, first_col, start, stop, some, COLS, SIZES, CUT, TMA)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # S = Q Kᵀ
        factor = scoring.scale  # the largest product has the largest score, so the exponent can take the scale
        if SCALE_FIRST:
            scores, factor = capped(scores, scoring.scale, scoring.softcap), 1.0
            scores = biased(scores, rows[:, None], cols[None, :], (T, S), scoring.slopes)
        if CUT:
            if scoring.attn_mask is None:
                seen = sees_keys(col, first_col, rows, (T, S), window, SIZES.CAUSAL)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - finite(m_new)[:, None])  # P = exp(S − m)
        alpha = tl.exp2(m - finite(m_new))
        l = l * alpha + tl.sum(weights, axis=1)
        m = m_new
        if dropout is not None:
            weights = tl.where(kept(first_row, first_col, dropout, head, SIZES.ROWS, COLS), weights, 0.0)
        v = load_tile(v_matrix, first_col, start, stop, some, COLS, SIZES, CUT, TMA)
        acc *= alpha[:, None]  # O' = exp(m − m') · O + P V
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return m, l, acc


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "group", "T", "S", "window"])
def flash_attention_kernel(
    q,  # [B, H, T, D], as every tensor of more than one dimension: (pointer, stride of each dimension)
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    out,  # [B, H, T, D]
    lse,  # [B · H · T] float32
    saved,  # `Saved`
    scoring,  # `Scoring`, this and the following from kernels/arguments.py
    dropout,  # `Dropout`, or None
    packed,  # `Packed`, or None
    num_tiles,
    num_heads,
    group,  # query heads per KV head
    T,  # if packed: of all sequences together
    S,
    window,  # None without a window
    SIZES: tl.constexpr,  # `Sizes`
    SCALE_FIRST: tl.constexpr,  # False: scale > 0, and there is no softcap and no slope
    TMA: tl.constexpr,  # whether k and v are read by descriptors
):
    """out, lse = attention(q, k, v, …, return_lse=True) with every option. Grid (num_tiles · H · B).

    Steps from `flash_forward_kernel`:
    1. Skip: tiles of keys that the mask hides from all queries are not visited. The others are three ranges: tiles
       that the window cuts, whole tiles, tiles that the diagonal or the end cuts. Only cut tiles pay for a mask.
    2. Scale: the maximum is that of the products, and the scale is in the exponent, 2^(s · scale − m).
    3. Order: with a causal mask the longest tiles of queries start first.
    4. Options: softcap, ALiBi, a mask in memory, dropout. An option that is None costs nothing.
    5. Packed sequences: a tile finds its sequence in a list, and the sequence's rows in cu_seqlens (sums of lengths).
    6. Backward: m and log₂ l are stored apart if a gradient in float32 is needed.
    7. Hopper: from sm_90 on, the tensor memory accelerator reads k and v by descriptors.
    """
    pid, total = tl.program_id(0), T
    tile, head, batch = pid % num_tiles, pid // num_tiles % num_heads, pid // num_tiles // num_heads
    tile, sequence, first_q, first_k, T, S = segment_of(tile, batch, packed, T, S, SIZES.ROWS, False)
    if packed is not None:
        if tile * SIZES.ROWS >= T:  # a sequence may have one tile too many
            return
    elif SIZES.CAUSAL:
        tile = num_tiles - 1 - tile
    scoring = Scoring(scoring.scale, scoring.softcap, slope_of(scoring, head), mask_of(scoring, batch, head))
    drops = (dropout, sequence * num_heads + head)
    first_row = tile * SIZES.ROWS
    rows = first_row + tl.arange(0, SIZES.ROWS)
    q_matrix = matrix_of_head(q, batch, head, first_q)
    queries = (load_rows(q_matrix, rows.to(tl.int64), rows < T, SIZES.D, SIZES.BLOCK_D), first_row, T, S)

    start, stop, first, whole, cut, end = key_range(first_row, T, S, window, SIZES)
    k_matrix = matrix_of_head(k, batch, head // group, first_k)
    v_matrix = matrix_of_head(v, batch, head // group, first_k)
    if TMA:
        k_matrix, v_matrix = described(k_matrix, start, stop, SIZES), described(v_matrix, start, stop, SIZES)
    keys = (k_matrix, v_matrix, start, stop)
    state = empty(SIZES.ROWS, SIZES.BLOCK_D)
    if scoring.attn_mask is None:  # a mask in memory may cut any tile
        if window is not None:
            state = fold_tiles(
                first, whole, state, queries, keys, scoring, window, drops, SIZES, True, SCALE_FIRST, TMA
            )
        state = fold_tiles(whole, cut, state, queries, keys, scoring, None, drops, SIZES, False, SCALE_FIRST, TMA)
        first, window = cut, None
    state = fold_tiles(first, end, state, queries, keys, scoring, window, drops, SIZES, True, SCALE_FIRST, TMA)

    m, l, acc = state
    out_tile, lse_tile = output(m * LN_2, l, acc)
    if dropout is not None:
        out_tile *= dropout.growth
    out_matrix = matrix_of_head(out, batch, head, first_q)
    store_rows(out_matrix, rows, out_tile, rows < T, SIZES.D, SIZES.BLOCK_D)
    numbers = (batch * num_heads + head).to(tl.int64) * total + first_q + rows  # where one number per query is
    tl.store(lse + numbers, lse_tile, mask=rows < T)
    if saved.m is not None:
        # A query that sees no key gets log₂ l = +∞, so that the backward computes 2^(score − m − log₂ l) = 0.
        log_l = tl.where(l == 0.0, float("inf"), tl.log2(tl.where(l == 0.0, 1.0, l)))
        tl.store(saved.m + numbers, finite(m), mask=rows < T)
        tl.store(saved.log_l + numbers, log_l, mask=rows < T)
