"""Any number of new queries per sequence over keys and values in blocks: decoding and chunks of prompts (lesson 9)."""

import triton
import triton.language as tl

from pagewise.kernels.flash_decoding import num_pieces, piece_of, store_rows, tiles_of
from pagewise.kernels.paged_attention import attend_tile
from pagewise.kernels.partial import empty, merge


@triton.jit
def rows_of(chunk, sequences_ptr, ends_ptr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """(seq, queries, before, row): a chunk's sequence, its number of queries, the queries before them, and the rows.

    The first chunk of sequence b is before · GROUP // BLOCK_R + b, which leaves each as many as it needs.
    """
    seq = tl.load(sequences_ptr + chunk).to(tl.int64)
    before, end = tl.load(ends_ptr + seq).to(tl.int64), tl.load(ends_ptr + seq + 1).to(tl.int64)
    row = (chunk - before * GROUP // BLOCK_R - seq) * BLOCK_R + tl.arange(0, BLOCK_R)
    return seq, (end - before).to(tl.int32), before, row.to(tl.int32)


@triton.jit
def keys_of(seq, queries, row, lens_ptr, capacity, window, GROUP: tl.constexpr):
    """(first, stop, length, possible): keys first … stop − 1 are those that some of these rows see.

    possible: the length is one that there can be; if not, no key is seen.
    """
    length = tl.load(lens_ptr + seq)
    possible = (length >= 0) & (length <= capacity)
    length = tl.where(possible, length, 0)
    earliest = length - queries + tl.min(row, axis=0) // GROUP
    latest = length - queries + tl.minimum(tl.max(row, axis=0) // GROUP, queries - 1)
    stop = tl.where(tl.min(row, axis=0) < queries * GROUP, tl.maximum(latest + 1, 0), 0)
    return tl.minimum(tl.maximum(earliest + 1 - window, 0), stop), stop, length, possible


@triton.jit(
    do_not_specialize=["tables_stride_row", "capacity", "window", "cut", "slots"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "ends_ptr", "sequences_ptr", "slopes_ptr"],
)
def varlen_kernel(
    q_ptr,  # [total_q, H, D]
    k_ptr,  # [N, P, Hkv, D], as v
    v_ptr,
    tables_ptr,  # [B, M] int32
    lens_ptr,  # [B] int32
    ends_ptr,  # [B + 1] int32: the queries before those of sequence b
    sequences_ptr,  # [chunks] int32: the sequence whose rows a chunk has
    slopes_ptr,  # [H] float32, or None
    out_ptr,  # [total_q, H, D]; this and lse are written for items that are one piece
    lse_ptr,  # [total_q, H] float32
    m_ptr,  # [programs, BLOCK_R] float32; this, l and acc are written for other pieces
    l_ptr,  # [programs, BLOCK_R] float32
    acc_ptr,  # [programs, BLOCK_R, D] float32
    q_stride_query,
    q_stride_head,
    k_stride_block,
    k_stride_token,
    k_stride_head,
    v_stride_block,
    v_stride_token,
    v_stride_head,
    tables_stride_row,
    tables_stride_column,
    num_heads,
    capacity,  # M · P
    window,  # 2³¹ − 1: no window
    scale,  # includes the scale of stored keys
    softcap,
    v_scale,
    cut,  # see kernels/flash_decoding.py, as CUT
    slots,  # for each item
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,  # query rows (of T · GROUP) at once
    TILE: tl.constexpr,  # keys at once
    FLOAT8_BITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CUT: tl.constexpr,  # "num" or "size"
    SPLIT: tl.constexpr,  # False: every item is one piece
):
    """out[of b] = attention(q[of b], keys, values, causal) · v_scale over keys = k[tables[b]], end to end, to lens[b].

    Grid (chunks · Hkv · slots), with total_q · GROUP // BLOCK_R + B chunks: some have no rows, so that no length need
    be known to launch. An item is a chunk of the rows of one sequence that share a KV head.
    """
    program = tl.program_id(0).to(tl.int64)
    item, kv_heads = program // slots, num_heads // GROUP
    kv_head = item % kv_heads
    dim, token = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    is_dim = dim < D
    softcap = softcap if SOFTCAP else None

    # which rows, which tiles
    seq, queries, before, row = rows_of(item // kv_heads, sequences_ptr, ends_ptr, GROUP, BLOCK_R)
    first_key, last, length, possible = keys_of(seq, queries, row, lens_ptr, capacity, window, GROUP)
    tiles = tiles_of(first_key, last, TILE)
    start, stop = piece_of(tiles, program % slots, cut, CUT)
    is_piece, is_whole = program % slots < num_pieces(tiles, cut, CUT), (start == 0) & (stop == tiles)
    first_tile = (first_key // TILE).to(tl.int64)

    # the queries
    head, query, is_row = kv_head * GROUP + row % GROUP, row // GROUP, row < queries * GROUP
    q_offsets = (before + query) * q_stride_query + head * q_stride_head
    q_mask = is_row[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + q_offsets[:, None] + dim[None, :], mask=q_mask, other=0.0)  # [BLOCK_R, BLOCK_D]
    position = length - queries + query
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head, mask=is_row, other=0.0)[:, None]

    # tile by tile: where its keys lie, k and v, the fold
    m, l, acc = empty(BLOCK_R, BLOCK_D)
    for tile in range((first_tile + start).to(tl.int32), (first_tile + stop).to(tl.int32)):
        key = tile * TILE + token
        seen = (key >= first_key) & (key < last)
        entry = tables_ptr + seq * tables_stride_row + key // P * tables_stride_column
        block, offset = tl.load(entry, mask=seen, other=0).to(tl.int64), (key % P).to(tl.int64)
        k_offsets = kv_head * k_stride_head + block * k_stride_block + offset * k_stride_token
        v_offsets = kv_head * v_stride_head + block * v_stride_block + offset * v_stride_token
        # unused slots may hold NaN, which a weight of 0 would not hide: they are read as 0
        inside = seen[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + k_offsets[:, None] + dim[None, :], mask=inside, other=0.0)  # [TILE, BLOCK_D]
        v = tl.load(v_ptr + v_offsets[:, None] + dim[None, :], mask=inside, other=0.0)
        distance = key[None, :] - position[:, None]
        visible = seen[None, :] & (distance <= 0) & (distance > -window)
        m, l, acc = attend_tile(
            m, l, acc, q, k, v, visible, distance, scale, softcap, slope, None, 1, FLOAT8_BITS, "synchronised", False
        )

    if SPLIT:
        part = program * BLOCK_R + tl.arange(0, BLOCK_R)
        is_part = is_row & is_piece & (is_whole == 0)
        tl.store(m_ptr + part, m, mask=is_part)
        tl.store(l_ptr + part, l, mask=is_part)
        tl.store(acc_ptr + part[:, None] * D + dim[None, :], acc, mask=is_part[:, None] & is_dim[None, :])
    l = tl.where(possible, l, float("nan"))
    at = (before + query) * num_heads + head
    store_rows(
        out_ptr, lse_ptr, None, at, is_row & is_piece & is_whole, m, l, acc, v_scale,
        None, None, None, None, D, BLOCK_D, "synchronised",
    )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "window", "cut", "slots"])
def merge_varlen_kernel(
    m_ptr,  # [programs, BLOCK_R] float32
    l_ptr,  # [programs, BLOCK_R] float32
    acc_ptr,  # [programs, BLOCK_R, D] float32
    lens_ptr,  # [B] int32
    ends_ptr,  # [B + 1] int32
    sequences_ptr,  # [chunks] int32
    out_ptr,  # [total_q, H, D]
    lse_ptr,  # [total_q, H] float32
    num_heads,
    capacity,
    window,
    cut,
    slots,
    v_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Partial.merge of all pieces of a row in the order of their keys, then .output() · v_scale and .lse().

    Grid (chunks · Hkv, BLOCK_R). AT_ONCE pieces are read at once. The rows of an item that is one piece are written.
    """
    item, in_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = num_heads // GROUP
    seq, queries, before, row = rows_of(item // kv_heads, sequences_ptr, ends_ptr, GROUP, BLOCK_R)
    first_key, last, _, _ = keys_of(seq, queries, row, lens_ptr, capacity, window, GROUP)
    pieces = num_pieces(tiles_of(first_key, last, TILE), cut, CUT)
    row = tl.min(row, axis=0) + in_chunk
    if (row >= queries * GROUP) | (pieces == 1):
        return

    dim, part = tl.arange(0, BLOCK_D), tl.arange(0, AT_ONCE)
    m, l, acc = empty(1, BLOCK_D)
    for start in range(0, pieces, AT_ONCE):
        there = start + part < pieces
        at = (item * slots + start + part) * BLOCK_R + in_chunk
        m_parts = tl.load(m_ptr + at, mask=there, other=float("-inf"))
        l_parts = tl.load(l_ptr + at, mask=there, other=0.0)
        acc_mask = there[:, None] & (dim < D)[None, :]
        acc_parts = tl.load(acc_ptr + at[:, None] * D + dim[None, :], mask=acc_mask, other=0.0)
        m, l, acc = merge(m, l, acc, m_parts, l_parts, acc_parts)
    at = (before + row // GROUP) * num_heads + item % kv_heads * GROUP + row % GROUP
    only = tl.arange(0, 1)
    store_rows(
        out_ptr, lse_ptr, None, at + only, only == 0, m, l, acc, v_scale,
        None, None, None, None, D, BLOCK_D, "synchronised",
    )  # fmt: skip
