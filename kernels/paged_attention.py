"""Paged decode: the newest query of each sequence over keys and values that lie in blocks (lesson 5)."""

import triton
import triton.language as tl


@triton.jit
def float8_from_bits(bits, EXPONENT_BITS: tl.constexpr):
    """bits.view(float8_e4m3fn or float8_e5m2).half(), exactly: for GPUs that cannot convert (e4m3 below sm_89).

    e5m2 is the upper byte of a float16. e4m3 has an exponent bit less, and its bias is 7 instead of 15: put in place,
    the number is 2⁸ times too small, subnormals included.
    """
    bits = bits.to(tl.uint16)
    if EXPONENT_BITS == 5:
        return (bits << 8).to(tl.float16, bitcast=True)
    number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def tanh(x):
    """torch.tanh(x), also relatively exact near 0, where 1 − exp(−2|x|) cancels: there, its series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.09, near, tl.where(x < 0, -far, far))


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

    seq_len = tl.load(lens_ptr + seq)
    possible = (seq_len >= 0) & (seq_len <= capacity)
    length = tl.where(possible, seq_len, 0)
    first_key = tl.maximum(length - window, 0)
    first_tile = first_key // TILE
    num_tiles = ((length + TILE - 1) // TILE - first_tile).to(tl.int64)
    start_tile = first_tile + (num_tiles * split // num_splits).to(tl.int32)
    stop_tile = first_tile + (num_tiles * (split + 1) // num_splits).to(tl.int32)

    q_offsets = seq * q_stride_seq + head[:, None].to(tl.int64) * q_stride_head + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_head[:, None] & is_dim[None, :], other=0.0)  # [BLOCK_H, BLOCK_D]
    if GROUP == 1:
        q = q.to(tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=is_head, other=0.0)[:, None]
    k_ptr += kv_head.to(tl.int64) * k_stride_head
    v_ptr += kv_head.to(tl.int64) * v_stride_head
    tables_ptr += seq * tables_stride_row

    ROWS: tl.constexpr = TILE if GROUP == 1 else BLOCK_H
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
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
        if FLOAT8_BITS:
            k, v = float8_from_bits(k, FLOAT8_BITS), float8_from_bits(v, FLOAT8_BITS)

        if GROUP == 1:
            scores = tl.sum(q * k.to(tl.float32), axis=1)[:, None] * scale  # [ROWS, 1]
            key, visible = key[:, None], visible[:, None]
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale  # [ROWS, TILE]
            key, visible = key[None, :], visible[None, :]
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        if ALIBI:
            scores += slope * (key - (length - 1)).to(tl.float32)
        scores = tl.where(visible, scores, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, axis=1))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # (−∞) − (−∞) would be NaN
        rescale = tl.exp(m - m_finite)
        weights = tl.exp(scores - m_finite[:, None])
        l = l * rescale + tl.sum(weights, axis=1)
        acc *= rescale[:, None]
        if GROUP == 1:
            acc += weights * v.to(tl.float32)
        else:
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = m_new

    if GROUP == 1:  # merge the partials of the tile's keys into the head's
        m_new = tl.max(m[:, None], axis=0)
        rescale = tl.exp(m[:, None] - tl.where(m_new == float("-inf"), 0.0, m_new)[None, :])
        l = tl.sum(l[:, None] * rescale, axis=0)
        acc = tl.sum(acc * rescale, axis=0)[None, :]
        m = m_new
    l = tl.where(possible, l, float("nan"))

    row = seq * num_heads + head
    if SPLIT:
        row = row * num_splits + split
        tl.store(m_ptr + row, m, mask=is_head)
        tl.store(l_ptr + row, l, mask=is_head)
        tl.store(acc_ptr + row[:, None] * D + dim[None, :], acc, mask=is_head[:, None] & is_dim[None, :])
    else:
        l = tl.where(l == 0.0, 1.0, l)  # where m is −∞
        out = acc / l[:, None] * v_scale
        out_mask = is_head[:, None] & is_dim[None, :]
        tl.store(out_ptr + row[:, None] * D + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)
        tl.store(lse_ptr + row, m + tl.log(l), mask=is_head)


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
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, SPLITS):
        there = start + part < num_splits
        at = row * num_splits + start + part
        m_part = tl.load(m_ptr + at, mask=there, other=float("-inf"))
        l_part = tl.load(l_ptr + at, mask=there, other=0.0)
        acc_mask = there[:, None] & (dim < D)[None, :]
        acc_part = tl.load(acc_ptr + at[:, None] * D + dim[None, :], mask=acc_mask, other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, axis=0))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale, weights = tl.exp(m - m_finite), tl.exp(m_part - m_finite)
        l = l * rescale + tl.sum(weights * l_part, axis=0)
        acc = acc * rescale + tl.sum(weights[:, None] * acc_part, axis=0)
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    out = acc / l * v_scale
    tl.store(out_ptr + row * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)
    tl.store(lse_ptr + row + tl.arange(0, 1), m + tl.log(l))
