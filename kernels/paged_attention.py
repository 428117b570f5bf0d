"""Paged decode: the newest query of each sequence over keys and values that lie in blocks (lesson 5)."""

import triton
import triton.language as tl

from pagewise.kernels.float8 import widen
from pagewise.kernels.partial import empty, fold, merge, output
from pagewise.kernels.scores import tanh


@triton.jit
def masked_scores(products, visible, distance, scale, softcap, slope):
    """Scores of the products q · k with keys that are `distance` (≤ 0) from the newest. softcap, slope: or None."""
    scores = products * scale
    if softcap is not None:
        scores = softcap * tanh(scores / softcap)
    if slope is not None:
        scores += slope * distance.to(tl.float32)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def attend_tile(
    m, l, acc, q, k, v, visible, distance, scale, softcap, slope, PARTS: tl.constexpr, FLOAT8_BITS: tl.constexpr
):
    """(m, l, acc) with a tile of keys and values [TILE, BLOCK_D], as stored, folded in: the two ways to multiply."""
    if PARTS > 1:  # a row for each key of the tile
        scores = tl.sum(q.to(tl.float32) * widen(k, FLOAT8_BITS).to(tl.float32), axis=1)[:, None]  # s = q · k
        scores = masked_scores(scores, visible[:, None], distance[:, None], scale, softcap, slope)
        m, l, rescale, weights = fold(m, l, scores)
        acc *= rescale[:, None]  # acc' = exp(m − m') · acc + p · v
        acc += weights * widen(v, FLOAT8_BITS).to(tl.float32)
    else:  # a row for each head
        k = widen(k, FLOAT8_BITS).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # S = Q Kᵀ
        scores = masked_scores(scores, visible[None, :], distance[None, :], scale, softcap, slope)
        m, l, rescale, weights = fold(m, l, scores)
        acc *= rescale[:, None]  # acc' = exp(m − m') · acc + P V
        weights, v = weights.to(q.dtype), widen(v, FLOAT8_BITS).to(q.dtype)
        acc = tl.dot(weights, v, acc, input_precision="ieee")
    return m, l, acc


@triton.jit(
    do_not_specialize=["tables_stride_row", "capacity", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "slopes_ptr"],
)
def paged_decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [N, P, Hkv, D], as v
    v_ptr,
    tables_ptr,  # [B, M] int32
    lens_ptr,  # [B] int32
    slopes_ptr,  # [H] float32; read if ALIBI
    out_ptr,  # [B, H, D]; this and lse are written unless SPLIT
    lse_ptr,  # [B, H] float32
    m_ptr,  # [B, H, num_splits] float32; this, l and acc are written if SPLIT
    l_ptr,  # [B, H, num_splits] float32
    acc_ptr,  # [B, H, num_splits, D] float32
    q_stride_seq,
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
    capacity,  # M · P: the longest sequence that a row of the table can hold
    window,  # 2³¹ − 1: no window
    scale,  # includes the scale of stored keys
    softcap,
    v_scale,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from D on
    GROUP: tl.constexpr,  # query heads that share a KV head
    BLOCK_H: tl.constexpr,  # of these, as many at once; 1 if GROUP is 1, else at least 16 for the tensor cores
    TILE: tl.constexpr,  # keys at once
    FLOAT8_BITS: tl.constexpr,  # 4 or 5: k and v are bytes, float8 with that many exponent bits
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """keys = k[tables[b]].flatten(0, 1)[:lens[b]], values likewise; out[b] = attention(q[b], keys, values) · v_scale.

    Grid (B, Hkv · ⌈GROUP / BLOCK_H⌉, num_splits). One program: BLOCK_H heads of one sequence that share their keys,
    over the split's share of the tiles. It carries a `Partial` (m, l, acc) per head. For a single head, which would
    leave a matrix product idle, it carries one per key of a tile, and threads exchange no maximum before the end.
    """
    seq, split, num_splits = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    CHUNKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // CHUNKS
    in_group = tl.program_id(1) % CHUNKS * BLOCK_H + tl.arange(0, BLOCK_H)
    head, is_head = kv_head * GROUP + in_group, in_group < GROUP
    dim, token = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    is_dim = dim < D
    PARTS: tl.constexpr = TILE if GROUP == 1 else 1  # partials per head

    # which tiles
    seq_len = tl.load(lens_ptr + seq)
    possible = (seq_len >= 0) & (seq_len <= capacity)
    length = tl.where(possible, seq_len, 0)
    first_key = tl.maximum(length - window, 0)
    first_tile = first_key // TILE
    num_tiles = ((length + TILE - 1) // TILE - first_tile).to(tl.int64)
    start_tile = first_tile + (num_tiles * split // num_splits).to(tl.int32)
    stop_tile = first_tile + (num_tiles * (split + 1) // num_splits).to(tl.int32)

    # the query
    q_offsets = seq * q_stride_seq + head[:, None].to(tl.int64) * q_stride_head + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_head[:, None] & is_dim[None, :], other=0.0)  # [BLOCK_H, BLOCK_D]
    slope = tl.load(slopes_ptr + head, mask=is_head, other=0.0)[:, None] if ALIBI else None
    softcap = softcap if SOFTCAP else None

    # tile by tile: the blocks its keys lie in, k and v, the fold
    k_ptr += kv_head.to(tl.int64) * k_stride_head
    v_ptr += kv_head.to(tl.int64) * v_stride_head
    tables_ptr += seq * tables_stride_row
    m, l, acc = empty(BLOCK_H * PARTS, BLOCK_D)
    for tile in range(start_tile, stop_tile):
        key = tile * TILE + token
        visible = (key >= first_key) & (key < length)
        block = tl.load(tables_ptr + key // P * tables_stride_column, mask=visible, other=0).to(tl.int64)
        offset = (key % P).to(tl.int64)
        k_offsets = (block * k_stride_block + offset * k_stride_token)[:, None] + dim[None, :]
        v_offsets = (block * v_stride_block + offset * v_stride_token)[:, None] + dim[None, :]
        # unused slots may hold NaN, which a weight of 0 would not hide: they are read as 0
        inside = visible[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + k_offsets, mask=inside, other=0.0)  # [TILE, BLOCK_D]
        v = tl.load(v_ptr + v_offsets, mask=inside, other=0.0)
        distance = key - (length - 1)  # from the newest key
        m, l, acc = attend_tile(m, l, acc, q, k, v, visible, distance, scale, softcap, slope, PARTS, FLOAT8_BITS)

    if PARTS > 1:  # merge them into the head's
        none_m, none_l, none_acc = empty(1, BLOCK_D)
        m, l, acc = merge(none_m, none_l, none_acc, m, l, acc)
    l = tl.where(possible, l, float("nan"))

    row = seq * num_heads + head
    is_number = is_head[:, None] & is_dim[None, :]
    if SPLIT:
        row = row * num_splits + split
        tl.store(m_ptr + row, m, mask=is_head)
        tl.store(l_ptr + row, l, mask=is_head)
        tl.store(acc_ptr + row[:, None] * D + dim[None, :], acc, mask=is_number)
    else:
        out, lse = output(m, l, acc)
        out = (out * v_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * D + dim[None, :], out, mask=is_number)
        tl.store(lse_ptr + row, lse, mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    m_ptr,  # [B, H, num_splits] float32
    l_ptr,  # [B, H, num_splits] float32
    acc_ptr,  # [B, H, num_splits, D] float32
    out_ptr,  # [B, H, D]
    lse_ptr,  # [B, H] float32
    num_splits,
    v_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Partial.merge of all splits of a head, then .output() · v_scale and .lse().

    Grid (B, H). SPLITS of them are read at once: one by one each would wait for the last.
    """
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dim, part = tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    m, l, acc = empty(1, BLOCK_D)
    for start in range(0, num_splits, SPLITS):
        there = start + part < num_splits
        at = row * num_splits + start + part
        m_parts = tl.load(m_ptr + at, mask=there, other=float("-inf"))
        l_parts = tl.load(l_ptr + at, mask=there, other=0.0)
        acc_mask = there[:, None] & (dim < D)[None, :]
        acc_parts = tl.load(acc_ptr + at[:, None] * D + dim[None, :], mask=acc_mask, other=0.0)
        m, l, acc = merge(m, l, acc, m_parts, l_parts, acc_parts)
    out, lse = output(m, l, acc)
    out = (out * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + dim[None, :], out, mask=(dim < D)[None, :])
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)
