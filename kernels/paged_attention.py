"""Decoding: the newest queries of each sequence over keys and values in blocks, or in one piece (lessons 5 and 7)."""

import triton
import triton.language as tl

from pagewise.kernels.flash_decoding import (
    item_at,
    keys_seen,
    num_pieces,
    piece_of,
    piece_within,
    programs_sharing,
    range_of,
    result_of,
    store_rows,
    tiles_of,
    work_before,
    work_of,
)
from pagewise.kernels.float8 import widen
from pagewise.kernels.partial import add_up, empty, fold, fold_lazily, fold_unified, merge, reduced
from pagewise.kernels.scores import tanh


@triton.jit
def masked_scores(products, visible, distance, scale, softcap, slope):
    """Scores of the products q · k with keys that are `distance` from the query's own. softcap, slope: or None."""
    scores = products * scale
    if softcap is not None:
        scores = softcap * tanh(scores / softcap)
    if slope is not None:
        scores -= slope * tl.abs(distance.to(tl.float32))
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def fold_scores(m, l, acc, scores, reference, DTYPE: tl.constexpr, SOFTMAX: tl.constexpr):
    """(m, l, acc, weights): a tile of scores folded in, but for acc' = acc + weights @ v."""
    if SOFTMAX == "unified":
        m, l, weights = fold_unified(m, l, scores, reference, DTYPE)
    elif SOFTMAX == "lazy":
        m, l, rescale, weights = fold_lazily(m, l, scores, reference, DTYPE)
        if tl.min(rescale, axis=0) < 1.0:
            acc *= rescale[:, None]
    else:
        m, l, rescale, weights = fold(m, l, scores)
        acc *= rescale[:, None]  # exp(m − m') · acc
    return m, l, acc, weights


@triton.jit
def attend_tile(
    m, l, acc, q, k, v, visible, distance, scale, softcap, slope, reference,
    PARTS: tl.constexpr, FLOAT8_BITS: tl.constexpr, SOFTMAX: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) with a tile of keys and values [TILE, BLOCK_D], as stored, folded in: the two ways to multiply.

    visible, distance: [TILE, 1] if PARTS > 1, else [rows, TILE].
    """
    if PARTS > 1:  # a row for each key of the tile
        scores = tl.sum(q.to(tl.float32) * widen(k, FLOAT8_BITS).to(tl.float32), axis=1)[:, None]  # s = q · k
        scores = masked_scores(scores, visible, distance, scale, softcap, slope)
        m, l, acc, weights = fold_scores(m, l, acc, scores, reference, q.dtype, SOFTMAX)
        acc += weights * widen(v, FLOAT8_BITS).to(tl.float32)
    else:  # a row for each query and head
        k = widen(k, FLOAT8_BITS).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # S = Q Kᵀ
        scores = masked_scores(scores, visible, distance, scale, softcap, slope)
        m, l, acc, weights = fold_scores(m, l, acc, scores, reference, q.dtype, SOFTMAX)
        v = widen(v, FLOAT8_BITS).to(q.dtype)
        if WIDE:
            acc = tl.dot(weights, v.to(tl.float32), acc, input_precision="tf32")
        else:
            acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
    return m, l, acc


@triton.jit(
    do_not_specialize=["num_seqs", "tables_stride_row", "capacity", "window", "cut", "slots"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "slopes_ptr"],
)
def decode_kernel(
    q_ptr,  # [B, H, T, D]
    k_ptr,  # [N, Hkv, P, D], as v
    v_ptr,
    tables_ptr,  # [B, M] int32, or None: all keys of sequence b lie in block b
    lens_ptr,  # [B] int32, or None: all have `capacity` keys
    slopes_ptr,  # [H] float32, or None
    out_ptr,  # [B, H, T, D]; this and lse are written for items that are one piece
    lse_ptr,  # [B, H, T] float32
    m_ptr,  # [slots, BLOCK_R] float32; this, l and acc are written for other pieces
    l_ptr,  # [slots, BLOCK_R] float32
    acc_ptr,  # [slots, BLOCK_R, D] float32
    flags_ptr,  # [B, H, T] uint8, or None; unified: written, else only rows whose flag is set are computed
    q_stride_seq,
    q_stride_head,
    q_stride_query,
    k_stride_block,
    k_stride_head,
    k_stride_token,
    v_stride_block,
    v_stride_head,
    v_stride_token,
    tables_stride_row,
    tables_stride_column,
    num_seqs,
    num_heads,
    num_queries,
    capacity,  # the longest sequence that there is room for
    window,  # 2³¹ − 1: no window
    scale,  # includes the scale of stored keys
    softcap,
    v_scale,
    cut,  # see kernels/flash_decoding.py, as CUT
    slots,  # for each item, if it is cut by itself
    reference,  # φ of the unified softmax, τ of the lazy one
    band_low,  # of φ: as `left_the_band` takes them
    band_high,
    smallest,
    P: tl.constexpr,  # tokens of a block; not read without tables
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from D on
    GROUP: tl.constexpr,  # query heads that share a KV head
    BLOCK_R: tl.constexpr,  # query rows (of T · GROUP) at once; 1 if that is all, else at least 16 for the tensor cores
    TILE: tl.constexpr,  # keys at once
    MIN_TILES: tl.constexpr,
    FLOAT8_BITS: tl.constexpr,  # 4 or 5: k and v are bytes, float8 with that many exponent bits
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CUT: tl.constexpr,
    SPLIT: tl.constexpr,  # False: every item is one piece
    SOFTMAX: tl.constexpr,  # "synchronised", "unified" or "lazy"
    WIDE: tl.constexpr,  # weights may be larger than float16 holds
):
    """out[b] = attention(q[b], keys, values) · v_scale over keys = k[tables[b]], end to end, up to lens[b].

    Grid (num_programs) or, if every item is cut by itself, (items · slots). An item is BLOCK_R query rows of one
    sequence that share their keys. A program carries a `Partial` (m, l, acc) per row. For a single row, which would
    leave a matrix product idle, it carries one per key of a tile, and threads exchange no maximum before the end.
    """
    program = tl.program_id(0).to(tl.int64)
    row_chunks = (num_queries * GROUP + BLOCK_R - 1) // BLOCK_R
    chunks = num_heads // GROUP * row_chunks
    dim, token = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    is_dim = dim < D
    PARTS: tl.constexpr = TILE if BLOCK_R == 1 else 1  # partials per row
    softcap = softcap if SOFTCAP else None

    # which items (none, if the range is empty; a return here would cost the compiler what it knows of alignment)
    if CUT == "share":
        total = chunks * work_before(num_seqs, lens_ptr, num_seqs, num_queries, capacity, window, TILE)
        low, high = range_of(program, total, programs_sharing(total, cut, MIN_TILES))
        first_item, begin = item_at(low, chunks, lens_ptr, num_seqs, num_queries, capacity, window, TILE)
        last_item, _ = item_at(high - 1, chunks, lens_ptr, num_seqs, num_queries, capacity, window, TILE)
    else:
        first_item = program // slots
        last_item = first_item

    for item in range(first_item, last_item + 1):
        # which tiles
        item = tl.cast(item, tl.int64)  # as it is, unless interpreted
        seq, kv_head = item // chunks, item % chunks // row_chunks
        first_key, length, possible = keys_seen(seq, lens_ptr, num_seqs, num_queries, capacity, window)
        tiles = tiles_of(first_key, length, TILE)
        if CUT == "share":
            start, stop = piece_within(low, high, begin, tiles)
            slot = program + item
            begin += work_of(tiles)
            is_piece = start < stop
        else:
            start, stop = piece_of(tiles, program % slots, cut, CUT)
            slot, is_piece = program, program % slots < num_pieces(tiles, cut, CUT)
        is_whole = (start == 0) & (stop == tiles)
        first_tile = (first_key // TILE).to(tl.int64)

        # the queries
        row = item % row_chunks * BLOCK_R + tl.arange(0, BLOCK_R)
        head, query, is_row = kv_head * GROUP + row % GROUP, row // GROUP, row < num_queries * GROUP
        if SOFTMAX != "unified" and flags_ptr is not None:
            flags = flags_ptr + result_of(seq, head, query, num_heads, num_queries)
            is_row = is_row & (tl.load(flags, mask=is_row, other=0) != 0)
            stop = tl.where(tl.max(is_row.to(tl.int32), axis=0) > 0, stop, start)
        q_offsets = seq * q_stride_seq + head * q_stride_head + query * q_stride_query
        q_mask = is_row[:, None] & is_dim[None, :]
        q = tl.load(q_ptr + q_offsets[:, None] + dim[None, :], mask=q_mask, other=0.0)  # [BLOCK_R, BLOCK_D]
        position = length - num_queries + query
        slope = None if slopes_ptr is None else tl.load(slopes_ptr + head, mask=is_row, other=0.0)[:, None]

        # tile by tile: where its keys lie, k and v, the fold
        m, l, acc = empty(BLOCK_R * PARTS, BLOCK_D)
        if SOFTMAX == "unified":  # of each place in a tile, until they are reduced
            places = tl.zeros([BLOCK_R * PARTS, TILE // PARTS], tl.float32)
            m, l = m[:, None] + places, l[:, None] + places
        for tile in range((first_tile + start).to(tl.int32), (first_tile + stop).to(tl.int32)):
            key = tile * TILE + token
            seen = (key >= first_key) & (key < length)
            if tables_ptr is None:
                block, offset = seq, key.to(tl.int64)
            else:
                entry = tables_ptr + seq * tables_stride_row + key // P * tables_stride_column
                block = tl.load(entry, mask=seen, other=0).to(tl.int64)
                offset = (key % P).to(tl.int64)
            k_offsets = kv_head * k_stride_head + block * k_stride_block + offset * k_stride_token
            v_offsets = kv_head * v_stride_head + block * v_stride_block + offset * v_stride_token
            # unused slots may hold NaN, which a weight of 0 would not hide: they are read as 0
            inside = seen[:, None] & is_dim[None, :]
            k = tl.load(k_ptr + k_offsets[:, None] + dim[None, :], mask=inside, other=0.0)  # [TILE, BLOCK_D]
            v = tl.load(v_ptr + v_offsets[:, None] + dim[None, :], mask=inside, other=0.0)
            if PARTS > 1:
                visible, distance = seen[:, None], key[:, None] - (length - 1)
            else:
                visible, distance = seen[None, :], key[None, :] - position[:, None]
                if CAUSAL:
                    visible = visible & (distance <= 0) & (distance > -window)
            m, l, acc = attend_tile(
                m, l, acc, q, k, v, visible, distance, scale, softcap, slope, reference,
                PARTS, FLOAT8_BITS, SOFTMAX, WIDE,
            )  # fmt: skip
        if SOFTMAX == "unified":
            m, l = reduced(m, l)

        if PARTS > 1:  # merge them into the row's
            none_m, none_l, none_acc = empty(1, BLOCK_D)
            if SOFTMAX == "unified":
                m, l, acc = add_up(none_m, none_l, none_acc, m, l, acc)
            else:
                m, l, acc = merge(none_m, none_l, none_acc, m, l, acc)
        if SPLIT:
            part = tl.where(is_whole, 0, slot) * BLOCK_R + tl.arange(0, BLOCK_R)
            is_part = is_row & is_piece & (is_whole == 0)
            tl.store(m_ptr + part, m, mask=is_part)
            tl.store(l_ptr + part, l, mask=is_part)
            tl.store(acc_ptr + part[:, None] * D + dim[None, :], acc, mask=is_part[:, None] & is_dim[None, :])
        l = tl.where(possible, l, float("nan"))
        at = result_of(seq, head, query, num_heads, num_queries)
        store_rows(
            out_ptr, lse_ptr, flags_ptr, at, is_row & is_piece & is_whole, m, l, acc, v_scale,
            reference, band_low, band_high, smallest, D, BLOCK_D, SOFTMAX,
        )  # fmt: skip
