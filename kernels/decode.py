"""The device functions that the decode kernels of lessons 5, 7, 8 and 9 share.

The query rows of one KV head are pairs of a query and a head of its group. A program handles ROWS of them, reads keys
and values in tiles of TILE tokens, and carries lesson 3's (m, l, acc).
"""

import triton
import triton.language as tl

from pagewise.kernels.float8 import widen
from pagewise.kernels.partial import empty, fold, merge, output
from pagewise.kernels.scores import tanh


@triton.jit
def count_tiles(first_key, end_key, TILE: tl.constexpr):
    """Return how many tiles of TILE keys hold keys first_key … end_key − 1. end_key may be int32's largest number."""
    return tl.where(first_key < end_key, (end_key - 1) // TILE - first_key // TILE + 1, 0).to(tl.int64)


@triton.jit
def rows_of_chunk(chunk, num_rows, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return (query, head in its group, whether the row exists) of the ROWS rows of a chunk.

    The query rows of one KV head are counted query by query: row r is query r // GROUP, head r % GROUP of the group.
    """
    row = chunk * ROWS + tl.arange(0, ROWS)
    return (row // GROUP).to(tl.int64), row % GROUP, row < num_rows


@triton.jit
def load_queries(row_ptrs, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a tile of queries [ROWS, BLOCK_D] from a pointer to each row, with 0 outside."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(row_ptrs[:, None] + dim, mask=is_row[:, None] & (dim < D), other=0.0)


@triton.jit
def attend_to_tiles(
    rows,  # of queries, [ROWS] each: pointer, whether the row exists, head, position among the keys
    slopes_ptr,  # of ALiBi [H], or None
    memory,  # k and v of one KV head: (pointer, strides of blocks and tokens); the block table: (pointer, stride)
    ranges,  # first tile, one past the last tile; first key, one past the last key. No other key is read
    scale,
    softcap,  # or None
    window,
    P: tl.constexpr,  # tokens per block. None: dense keys, and the index of the sequence replaces the block table
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    FLOAT8_BITS: tl.constexpr,
    CAUSAL: tl.constexpr,  # False: the range of keys hides what there is to hide
):
    """Return lesson 3's (m, l, acc) of query rows over tiles of TILE keys each."""
    row_ptrs, is_row, head, position = rows
    k_memory, v_memory, table = memory
    k_ptr, k_block, k_token = k_memory
    v_ptr, v_block, v_token = v_memory
    first_tile, end_tile, first_key, end_key = ranges
    q, dim = load_queries(row_ptrs, is_row, D, BLOCK_D), tl.arange(0, BLOCK_D)[None, :]
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head, mask=is_row, other=0.0)[:, None]
    m, l, acc = empty(q.shape[0], BLOCK_D)
    for tile in range(first_tile, end_tile):
        key = tile * TILE + tl.arange(0, TILE)
        is_read = (key >= first_key) & (key < end_key)
        if P is None:
            block, token = table, key.to(tl.int64)
        else:
            table_ptr, table_stride = table
            block = tl.load(table_ptr + key // P * table_stride, mask=is_read, other=0).to(tl.int64)
            token = (key % P).to(tl.int64)
        # slots that no query sees may hold NaN, which a weight of 0 does not hide: read them as 0
        mask = is_read[:, None] & (dim < D)
        k = tl.load(k_ptr + (block * k_block + token * k_token)[:, None] + dim, mask=mask, other=0.0)
        v = tl.load(v_ptr + (block * v_block + token * v_token)[:, None] + dim, mask=mask, other=0.0)
        k, v = widen(k, FLOAT8_BITS).to(q.dtype), widen(v, FLOAT8_BITS).to(q.dtype)  # [TILE, BLOCK_D]

        distance = key[None, :] - position[:, None]  # of the key from the query
        visible = is_read[None, :]
        if CAUSAL:
            visible = visible & (distance <= 0) & (distance > -window)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = products * scale
        if softcap is not None:
            scores = softcap * tanh(scores / softcap)
        if slope is not None:
            scores -= slope * tl.abs(distance.to(tl.float32))
        m, l, alpha, weights = fold(m, l, tl.where(visible, scores, float("-inf")))
        acc = tl.dot(weights.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m, l, acc


@triton.jit
def store_results(out_ptr, lse_ptr, out_offsets, lse_offsets, mask, m, l, acc, v_scale, D: tl.constexpr):
    """Store out = acc / l · v_scale and lse = m + log l of the rows that `mask` selects."""
    dim = tl.arange(0, acc.shape[1])[None, :]
    out, lse = output(m, l, acc)
    out = (out * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets[:, None] + dim, out, mask=mask[:, None] & (dim < D))
    tl.store(lse_ptr + lse_offsets, lse, mask=mask)


@triton.jit
def store_partials(partials, slots, mask, m, l, acc, D: tl.constexpr):
    """Store (m, l, acc) of the rows that `mask` selects at `slots` of m [slots], l [slots] and acc [slots, D]."""
    m_ptr, l_ptr, acc_ptr = partials
    dim = tl.arange(0, acc.shape[1])[None, :]
    tl.store(m_ptr + slots, m, mask=mask)
    tl.store(l_ptr + slots, l, mask=mask)
    tl.store(acc_ptr + slots[:, None] * D + dim, acc, mask=mask[:, None] & (dim < D))


@triton.jit
def merge_slots(m, l, acc, partials, slots, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return one row's (m, l, acc) with the partials at `slots` merged in, those that `mask` selects."""
    m_ptr, l_ptr, acc_ptr = partials
    dim = tl.arange(0, BLOCK_D)[None, :]
    m_parts = tl.load(m_ptr + slots, mask=mask, other=float("-inf"))
    l_parts = tl.load(l_ptr + slots, mask=mask, other=0.0)
    acc_parts = tl.load(acc_ptr + slots[:, None] * D + dim, mask=mask[:, None] & (dim < D), other=0.0)
    return merge(m, l, acc, m_parts, l_parts, acc_parts)
