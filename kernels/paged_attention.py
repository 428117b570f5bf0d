"""Paged decode in Triton: one new query per sequence over keys and values in blocks (lesson 5).

    paged_decode_kernel      first rung: one program per sequence and KV head, and nothing else
    paged_attention_kernel   last rung: the kernel that the package runs
    merge_splits_kernel      the merge of its splits, with lesson 3's formula

Kwon et al. 2023 (PagedAttention).
"""

import triton
import triton.language as tl

from pagewise.kernels.float8 import widen
from pagewise.kernels.partial import empty, fold, merge, output
from pagewise.kernels.scores import tanh


@triton.jit
def paged_decode_kernel(
    q,  # [B, H, D]
    k_cache,  # [N, P, Hkv, D]
    v_cache,  # [N, P, Hkv, D]
    block_tables,  # [B, M] int32
    seq_lens_ptr,  # [B] int32
    out,  # [B, H, D]
    scale,
    P: tl.constexpr,  # tokens per block
    D: tl.constexpr,  # a power of two, at least 16
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # a power of two from GROUP on, at least 16: the tensor cores take no fewer rows
    TILE: tl.constexpr,  # keys per step
):
    """out[b] = softmax(scale · q[b] kᵀ) v over the seq_lens[b] keys whose blocks block_tables[b] names.

    Grid (B, Hkv). A program attends with all query heads of one KV head, so each key and value is read once.
    """
    q_ptr, q_seq, q_head, _ = q
    out_ptr, out_seq, out_head, _ = out
    k_ptr, k_block, k_token, k_head, _ = k_cache
    v_ptr, v_block, v_token, v_head, _ = v_cache
    tables_ptr, tables_row, tables_column = block_tables
    seq, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, dim = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    head, is_head = (kv_head * GROUP + row)[:, None], (row < GROUP)[:, None]
    length = tl.load(seq_lens_ptr + seq)

    query = tl.load(q_ptr + seq * q_seq + head * q_head + dim, mask=is_head, other=0.0)  # [ROWS, D]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, TILE):
        key = start + tl.arange(0, TILE)
        is_key = key < length  # slots after the last key may hold NaN, which a weight of 0 does not hide
        block = tl.load(tables_ptr + seq * tables_row + key // P * tables_column, mask=is_key, other=0).to(tl.int64)
        k_offset = (block * k_block + key % P * k_token + kv_head * k_head)[:, None] + dim
        v_offset = (block * v_block + key % P * v_token + kv_head * v_head)[:, None] + dim
        k = tl.load(k_ptr + k_offset, mask=is_key[:, None], other=0.0)  # [TILE, D]
        v = tl.load(v_ptr + v_offset, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TILE]
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp(m - m_new)
        weights = tl.exp(scores - m_new[:, None])
        l = alpha * l + tl.sum(weights, axis=1)
        acc = alpha[:, None] * acc + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        m = m_new
    result = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # an empty sequence gives 0
    tl.store(out_ptr + seq * out_seq + head * out_head + dim, result.to(out_ptr.dtype.element_ty), mask=is_head)


@triton.jit
def count_tiles(first_key, end_key, TILE: tl.constexpr):
    """Return how many tiles of TILE keys hold keys first_key … end_key − 1. end_key may be int32's largest number."""
    return tl.where(first_key < end_key, (end_key - 1) // TILE - first_key // TILE + 1, 0).to(tl.int64)


@triton.jit
def masked_scores(products, visible, distance, scale, softcap, slope):
    """Return the scores of products q · k, −∞ where not `visible`. softcap and slope may be None.

    distance: position of the key − position of the query.
    """
    scores = products * scale
    if softcap is not None:
        scores = softcap * tanh(scores / softcap)
    if slope is not None:
        scores -= slope * tl.abs(distance.to(tl.float32))
    return tl.where(visible, scores, float("-inf"))


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
    rows,  # q [ROWS, BLOCK_D], and the position of each query among the keys [ROWS]
    slope,  # of ALiBi [ROWS, 1], or None
    memory,  # k and v of one KV head: (pointer, strides of blocks and tokens); the block table: (pointer, stride)
    tiles,  # the first tile, and the end of the last
    keys,  # the first key, and the end of the last: others are not read
    scale,
    softcap,  # or None
    window,
    P: tl.constexpr,  # None: all keys are in one block, whose number stands for the block table
    D: tl.constexpr,
    TILE: tl.constexpr,
    FLOAT8_BITS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return lesson 3's (m, l, acc) of query rows over tiles of TILE keys each."""
    q, position = rows
    k_memory, v_memory, table = memory
    k_ptr, k_block, k_token = k_memory
    v_ptr, v_block, v_token = v_memory
    first_tile, end_tile = tiles
    first_key, end_key = keys
    ROWS: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    dim = tl.arange(0, BLOCK_D)[None, :]
    m, l, acc = empty(ROWS, BLOCK_D)
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

        distance = key[None, :] - position[:, None]
        visible = is_read[None, :]
        if CAUSAL:
            visible = visible & (distance <= 0) & (distance > -window)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = masked_scores(products, visible, distance, scale, softcap, slope)
        m, l, alpha, weights = fold(m, l, scores)
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
def store_partials(m_ptr, l_ptr, acc_ptr, slots, mask, m, l, acc, D: tl.constexpr):
    """Store (m, l, acc) of the rows that `mask` selects at `slots` of m [slots], l [slots] and acc [slots, D]."""
    dim = tl.arange(0, acc.shape[1])[None, :]
    tl.store(m_ptr + slots, m, mask=mask)
    tl.store(l_ptr + slots, l, mask=mask)
    tl.store(acc_ptr + slots[:, None] * D + dim, acc, mask=mask[:, None] & (dim < D))


@triton.jit(
    do_not_specialize=["block_tables", "capacity", "window", "num_splits"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "slopes_ptr"],
)
def paged_attention_kernel(
    q,  # [B, H, D]
    k_cache,  # [N, P, Hkv, D]
    v_cache,  # [N, P, Hkv, D]
    block_tables,  # [B, M] int32
    seq_lens_ptr,  # [B] int32
    slopes_ptr,  # [H] float32, or None
    out,  # [B, H, D]; written if num_splits is 1, as lse
    lse,  # [B, H] float32
    m_ptr,  # [B · H · num_splits] float32, or None if num_splits is 1, as l and acc
    l_ptr,
    acc_ptr,  # [B · H · num_splits · D] float32
    num_heads,
    capacity,  # M · P: the most keys that a row of the block tables can name
    window,  # 2³¹ − 1: no window
    num_splits,
    scale,  # includes k_scale
    softcap,  # or None
    v_scale,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from D on, at least 16
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # query heads per program
    TILE: tl.constexpr,  # keys per step
    FLOAT8_BITS: tl.constexpr,  # 4 or 5: the caches are bytes, float8 with that many exponent bits; else 0
):
    """out[b] = attention(q[b], keys, values, causal) · v_scale over the seq_lens[b] keys that block_tables[b] names.

    Grid (B, Hkv · ⌈GROUP / ROWS⌉, num_splits). From `paged_decode_kernel` to this kernel:

    1. Any head size D, and any GROUP: the heads of a KV head are cut into chunks of ROWS.
    2. ALiBi, softcap and window. Tiles before the window are not visited.
    3. A float8 cache, whose bytes are converted here where the GPU does not convert them.
    4. Splits by number: split i of n attends to tiles t·i // n … t·(i+1) // n − 1 and leaves (m, l, acc).
    5. A length that cannot be (below 0, above `capacity`) gives NaN and follows no entry of the table.
    """
    q_ptr, q_seq, q_head, _ = q
    k_ptr, k_block, k_token, k_head, _ = k_cache
    v_ptr, v_block, v_token, v_head, _ = v_cache
    tables_ptr, tables_row, tables_column = block_tables
    out_ptr, out_seq, out_head, _ = out
    lse_ptr, _, _ = lse
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    seq, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_head = (tl.program_id(1) // CHUNKS).to(tl.int64)
    _, group_head, is_row = rows_of_chunk(tl.program_id(1) % CHUNKS, GROUP, GROUP, ROWS)
    head = kv_head * GROUP + group_head

    length = tl.load(seq_lens_ptr + seq)
    is_possible = (length >= 0) & (length <= capacity)
    end_key = tl.where(is_possible, length, 0)
    first_key = tl.maximum(end_key - window, 0)
    first_tile, num_tiles = first_key // TILE, count_tiles(first_key, end_key, TILE)

    query = load_queries(q_ptr + seq * q_seq + head * q_head, is_row, D, BLOCK_D)
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head, mask=is_row, other=0.0)[:, None]
    rows = (query, tl.zeros([ROWS], tl.int32) + (end_key - 1))
    k_memory, v_memory = (k_ptr + kv_head * k_head, k_block, k_token), (v_ptr + kv_head * v_head, v_block, v_token)
    memory = (k_memory, v_memory, (tables_ptr + seq * tables_row, tables_column))
    start = first_tile + (num_tiles * split // num_splits).to(tl.int32)
    end = first_tile + (num_tiles * (split + 1) // num_splits).to(tl.int32)
    tiles, keys = (start, end), (first_key, end_key)
    m, l, acc = attend_to_tiles(
        rows, slope, memory, tiles, keys, scale, softcap, window, P, D, TILE, FLOAT8_BITS, CAUSAL=False
    )
    l = tl.where(is_possible, l, float("nan"))
    result = seq * num_heads + head
    if m_ptr is None:
        store_results(out_ptr, lse_ptr, seq * out_seq + head * out_head, result, is_row, m, l, acc, v_scale, D)
    else:
        store_partials(m_ptr, l_ptr, acc_ptr, result * num_splits + split, is_row, m, l, acc, D)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    m_ptr,  # [rows · num_splits] float32
    l_ptr,  # [rows · num_splits] float32
    acc_ptr,  # [rows · num_splits · D] float32
    out_ptr,  # [rows · D]
    lse_ptr,  # [rows] float32
    num_splits,
    v_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOADS: tl.constexpr,  # splits that are read at once: one at a time, each would wait for the one before
):
    """Merge the splits of a row in the order of their keys: out = acc / l · v_scale and lse. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    m, l, acc = empty(1, BLOCK_D)
    for start in range(0, num_splits, LOADS):
        split = start + tl.arange(0, LOADS)
        slots, mask = row * num_splits + split, split < num_splits
        m, l, acc = merge_slots(m, l, acc, m_ptr, l_ptr, acc_ptr, slots, mask, D, BLOCK_D)
    only = row + tl.arange(0, 1)
    store_results(out_ptr, lse_ptr, only * D, only, only >= 0, m, l, acc, v_scale, D)


@triton.jit
def merge_slots(m, l, acc, m_ptr, l_ptr, acc_ptr, slots, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return one row's (m, l, acc) with the partials at `slots` merged in, those that `mask` selects."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    m_parts = tl.load(m_ptr + slots, mask=mask, other=float("-inf"))
    l_parts = tl.load(l_ptr + slots, mask=mask, other=0.0)
    acc_parts = tl.load(acc_ptr + slots[:, None] * D + dim, mask=mask[:, None] & (dim < D), other=0.0)
    return merge(m, l, acc, m_parts, l_parts, acc_parts)
