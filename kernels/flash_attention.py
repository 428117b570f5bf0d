"""FlashAttention-2: attention of whole matrices whose scores never leave the chip. The forward (lesson 6).

A program owns a tile of queries and folds tiles of keys and values into (m, l, acc), scaling once at the end and
keeping the log-sum-exp only. Tiles that the mask hides are not visited, and only tiles that it cuts pay for it.
Dao 2023, Algorithm 1. The backward is in `flash_attention_backward.py`.
"""

import triton
import triton.language as tl

from pagewise.kernels.partial import empty, fold_base_2, output
from pagewise.kernels.scores import LN_2, LOG2_E, biased, capped, kept, visible


def tiles(rows, cols, num_warps, num_stages):
    """How a program's work is cut, as a launch takes it."""
    return {"ROWS": rows, "COLS": cols, "num_warps": num_warps, "num_stages": num_stages}


def forward_tiles(block_d, itemsize, major, heavy):
    """The tiles worth trying, the likeliest first, for compute capability `major`; 0: interpreted.

    They were chosen so that little is spilled (tests/flash_attention/RESOURCES.md), and a GPU finds the fastest by
    itself. heavy: a mask in memory or dropout, which take registers of their own.
    """
    if not major:
        return (tiles(64, 64, 4, 1),)
    if itemsize == 4:  # no tensor core multiplies float32 exactly
        return (tiles(32, 32, 4, 2) if block_d <= 64 else tiles(16 if heavy else 32, 16, 8, 1),)
    if heavy:
        return (tiles(64, 64, 4, 2),) if block_d <= 64 else (tiles(64, 32, 8, 2), tiles(128, 32, 8, 2))
    if block_d <= 64:
        return (tiles(128, 64, 4, 3 if block_d > 16 else 2), tiles(128, 64, 8, 3), tiles(128, 128, 8, 3))
    if block_d <= 128:
        return (tiles(128, 64, 8, 3), tiles(128, 64, 8, 2), tiles(128, 128, 8, 2), tiles(64, 64, 4, 3))
    return (tiles(128, 64, 8, 2), tiles(128, 32, 8, 2)) if major >= 9 else (tiles(64, 32, 8, 2), tiles(128, 32, 8, 2))


@triton.jit
def find_sequence(tile, cu_seqlens_ptr, num_seqs, TILE: tl.constexpr):
    """(sequence, which of its tiles this is) of packed sequences that each start a tile of their own.

    Sequence b gets the tiles from cu_seqlens[b] // TILE + b on: enough for all its rows, and perhaps one too many.
    So a tile finds its sequence in log₂ num_seqs looks, and nobody on the host needs to know a length.
    """
    low, high = tl.full([], 0, tl.int32), num_seqs  # the sequence is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        after = tl.load(cu_seqlens_ptr + middle) // TILE + middle <= tile
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    return low, tile - (tl.load(cu_seqlens_ptr + low) // TILE + low)


@triton.jit
def count_tiles(length, num_seqs, TILE: tl.constexpr, PACKED: tl.constexpr):
    """Tiles of a sequence; if PACKED: of all sequences, whose lengths together are `length`."""
    return length // TILE + num_seqs if PACKED else tl.cdiv(length, TILE)


@triton.jit
def place(
    index,
    num_tiles,
    num_heads,
    cu_ptr,
    cu_q_ptr,
    cu_k_ptr,
    num_seqs,
    T,
    S,
    TILE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Where program `index` works: (tile, head, batch, sequence, its first query, its first key, its T, its S).

    Tiles run fastest, then heads. Packed sequences are one batch, and `cu_ptr` is of what is cut into tiles.
    """
    tile, head, batch = index % num_tiles, index // num_tiles % num_heads, index // num_tiles // num_heads
    sequence, first_q, first_k = batch, batch.to(tl.int64) * 0, batch.to(tl.int64) * 0
    if PACKED:
        sequence, tile = find_sequence(tile, cu_ptr, num_seqs, TILE)
        first_q, first_k = tl.load(cu_q_ptr + sequence).to(tl.int64), tl.load(cu_k_ptr + sequence).to(tl.int64)
        T = (tl.load(cu_q_ptr + sequence + 1) - first_q).to(tl.int32)
        S = (tl.load(cu_k_ptr + sequence + 1) - first_k).to(tl.int32)
    return tile, head, batch, sequence, first_q, first_k, T, S


@triton.jit
def of_head(tensor, batch, head, first_row):
    """The matrix (pointer, stride of rows) of one head in a tensor (pointer, strides of batch, head and row)."""
    ptr, stride_batch, stride_head, stride_row = tensor
    ptr += batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head + first_row * stride_row
    return ptr, stride_row


@triton.jit
def load_rows(matrix, rows, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a matrix (pointer, its stride of rows) as a tile [rows, BLOCK_D]; 0 where not `there` (None: all are)."""
    ptr, stride_row = matrix
    dim = tl.arange(0, BLOCK_D)[None, :]
    at = ptr + rows[:, None] * stride_row + dim
    if there is not None:
        tile = tl.load(at, mask=there[:, None] & (dim < D), other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(at, mask=dim < D, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_rows(matrix, rows, tile, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [rows, BLOCK_D] into those rows of a matrix that are `there`, in its dtype."""
    ptr, stride_row = matrix
    dim = tl.arange(0, BLOCK_D)[None, :]
    at = ptr + rows[:, None] * stride_row + dim
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=there[:, None] & (dim < D))


@triton.jit
def store_stats(m_ptr, log_l_ptr, rows, m, l, there):
    """m and log₂ l apart: their sum, the log-sum-exp, would round away what scores that large differ by."""
    tl.store(m_ptr + rows, tl.where(l == 0.0, float("inf"), m), mask=there)
    tl.store(log_l_ptr + rows, tl.log2(tl.where(l == 0.0, 1.0, l)), mask=there)


@triton.jit
def key_tiles(first_row, last_row, sizes, window, CAUSAL: tl.constexpr, CUT: tl.constexpr, COLS: tl.constexpr):
    """Which tiles of keys these queries see: (first, first whole, behind the last whole, behind the last).

    A whole tile is seen in full by all of them. CUT: a mask of which nothing is known may cut any.
    Also the keys that some of the queries may see: (first, behind the last).
    """
    T, S = sizes
    start, stop = 0, S
    whole_start, whole_stop = 0, S
    if CAUSAL:
        stop = tl.minimum(S, tl.maximum(0, last_row + 1 + S - T))
        whole_stop = tl.minimum(S, tl.maximum(0, first_row + 1 + S - T))
    if window is not None:
        start = tl.minimum(stop, tl.maximum(0, first_row + 1 + S - T - window))
        whole_start = tl.minimum(stop, tl.maximum(0, last_row + 1 + S - T - window))
    first, behind = start // COLS, (stop + COLS - 1) // COLS
    first_whole = first if CUT else tl.minimum((whole_start + COLS - 1) // COLS, behind)
    behind_whole = first if CUT else tl.maximum(whole_stop // COLS, first_whole)
    return first, first_whole, behind_whole, behind, start, stop


@triton.jit(do_not_specialize=["num_seqs", "num_heads", "group", "T", "S", "window", "threshold"])
def flash_attention_kernel(
    q_ptr,  # [B, H, T, D]
    k_ptr,  # [B, Hkv, S, D]
    v_ptr,  # [B, Hkv, S, D]
    slopes_ptr,  # [H] float32; read if ALIBI
    mask_ptr,  # [B, H, T, S] bytes; read if MASK
    seed_ptr,  # [] int64; read if DROPOUT
    cu_q_ptr,  # [B + 1] int32; read if PACKED: the rows of sequence b in q [1, H, total, D], k and v likewise
    cu_k_ptr,  # [B + 1] int32
    out_ptr,  # [B, H, T, D]
    lse_ptr,  # [B, H, T] float32
    rest_ptr,  # as out: what rounding took from it; written if REST
    m_ptr,  # [B, H, T] float32: the largest score in units of log 2, +∞ if it saw no key; this and l if LEARNS
    log_l_ptr,  # [B, H, T] float32: log₂ Σ 2^(score − m)
    q_stride_batch,
    q_stride_head,
    q_stride_row,
    k_stride_batch,
    k_stride_head,
    k_stride_row,
    v_stride_batch,
    v_stride_head,
    v_stride_row,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_row,
    mask_stride_col,
    out_stride_batch,
    out_stride_head,
    out_stride_row,
    num_seqs,
    num_heads,
    group,  # query heads that share a KV head
    T,  # if PACKED: of all sequences
    S,
    scale,  # · log₂ e; with SOFTCAP: of the tanh's argument
    softcap,  # · log₂ e
    window,
    threshold,  # a weight stays if its 16-bit draw is at least this
    growth,  # of those that stay
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from D on
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
    LEARNS: tl.constexpr,
    REST: tl.constexpr,  # out is rounded
):
    """out, lse = attention(q, k, v, causal, window, scale, softcap, alibi_slopes, mask, dropout, return_lse=True).

    Grid (count_tiles · H · B), or (count_tiles · H) if PACKED. One program: ROWS queries of one head.
    """
    total, num_tiles = T, count_tiles(T, num_seqs, ROWS, PACKED)
    tile, head, batch, sequence, first_q, first_k, T, S = place(
        tl.program_id(0), num_tiles, num_heads, cu_q_ptr, cu_q_ptr, cu_k_ptr, num_seqs, T, S, ROWS, PACKED
    )
    if PACKED:
        if tile * ROWS >= T:
            return
    elif CAUSAL:
        tile = num_tiles - 1 - tile  # the longest first
    q_matrix = of_head((q_ptr, q_stride_batch, q_stride_head, q_stride_row), batch, head, first_q)
    k_matrix = of_head((k_ptr, k_stride_batch, k_stride_head, k_stride_row), batch, head // group, first_k)
    v_matrix = of_head((v_ptr, v_stride_batch, v_stride_head, v_stride_row), batch, head // group, first_k)
    out_matrix = of_head((out_ptr, out_stride_batch, out_stride_head, out_stride_row), batch, head, first_q)
    first_row = (batch * num_heads + head).to(tl.int64) * total + first_q  # of what has a number per query
    mask_ptr += batch.to(tl.int64) * mask_stride_batch + head.to(tl.int64) * mask_stride_head

    sizes, softcap, window = (T, S), softcap if SOFTCAP else None, window if WINDOW else None
    mask = (mask_ptr, mask_stride_row, mask_stride_col) if MASK else None
    slope = tl.load(slopes_ptr + head) * LOG2_E if ALIBI else None
    seed = tl.load(seed_ptr) if DROPOUT else None

    rows = tile * ROWS + tl.arange(0, ROWS)
    q = load_rows(q_matrix, rows.to(tl.int64), rows < T, D, BLOCK_D)
    last_row = tl.minimum(tile * ROWS + ROWS, T) - 1
    first, first_whole, behind_whole, behind, start, stop = key_tiles(
        tile * ROWS, last_row, sizes, window, CAUSAL, MASK, COLS
    )
    m, l, acc = empty(ROWS, BLOCK_D)
    for part in tl.static_range(0 if WINDOW else 1, 3):  # tiles that the window cuts, whole tiles, tiles that are cut
        begin = first if part == 0 else (first_whole if part == 1 else behind_whole)
        end = first_whole if part == 0 else (behind_whole if part == 1 else behind)
        for j in range(begin, end):
            cols = j * COLS + tl.arange(0, COLS)
            seen, there = None, None
            if part != 1:
                seen = visible(rows[:, None], cols[None, :], sizes, window, mask, CAUSAL)
                # a weight of 0 would not hide a NaN: keys and values that nobody here sees are read as 0
                there = tl.max(seen.to(tl.int32), axis=0) > 0 if MASK else (cols >= start) & (cols < stop)
            k = load_rows(k_matrix, cols.to(tl.int64), there, D, BLOCK_D)
            products = tl.dot(q, tl.trans(k), input_precision="ieee")  # S = Q Kᵀ
            scores = biased(capped(products, scale, softcap), rows[:, None], cols[None, :], sizes, slope)
            if part != 1:
                scores = tl.where(seen, scores, float("-inf"))
            m, l, rescale, weights = fold_base_2(m, l, scores)
            if DROPOUT:
                stays = kept(tile * ROWS, j * COLS, sequence * num_heads + head, seed, threshold, ROWS, COLS)
                weights = tl.where(stays, weights, 0.0)
            v = load_rows(v_matrix, cols.to(tl.int64), there, D, BLOCK_D)
            acc *= rescale[:, None]  # O' = exp(m − m') · O + P V
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")

    out, lse = output(m * LN_2, l, acc)
    if DROPOUT:
        out *= growth
    store_rows(out_matrix, rows.to(tl.int64), out, rows < T, D, BLOCK_D)
    tl.store(lse_ptr + first_row + rows, lse, mask=rows < T)
    if LEARNS:
        store_stats(m_ptr + first_row, log_l_ptr + first_row, rows, m, l, rows < T)
    if REST:
        rest_matrix = of_head((rest_ptr, out_stride_batch, out_stride_head, out_stride_row), batch, head, first_q)
        rest = out - out.to(out_ptr.dtype.element_ty).to(tl.float32)
        store_rows(rest_matrix, rows.to(tl.int64), rest, rows < T, D, BLOCK_D)
