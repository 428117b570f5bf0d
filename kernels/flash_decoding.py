"""Flash-Decoding in Triton: the keys of a sequence cut into splits that run side by side (lesson 7).

    split_decode_kernel     first rung: dense keys, splits by number. Lesson 5's `merge_splits_kernel` merges them
    flash_decoding_kernel   last rung: dense or paged keys, driven by a work plan
    merge_plan_kernel       the merge of the splits of a work plan

A work plan (`pagewise.flash_decoding.work_plan`) says which tiles of which item a program computes, and where the
result goes. An *item* is a chunk of query rows that share a KV head of one sequence. The host reads no seq_lens, so
lengths may change between two replays of a CUDA graph. Dao et al. 2023.
"""

import triton
import triton.language as tl

from pagewise.kernels.decode import attend_to_tiles, merge_slots, rows_of_chunk, store_partials, store_results
from pagewise.kernels.partial import empty


@triton.jit
def split_decode_kernel(
    q,  # [B, H, D]
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    m_ptr,  # [B · H · num_splits] float32, as l
    l_ptr,
    acc_ptr,  # [B · H · num_splits · D] float32
    num_heads,
    S,
    scale,
    D: tl.constexpr,  # a power of two, at least 16
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # a power of two from GROUP on, at least 16: tl.dot takes no fewer rows
    TILE: tl.constexpr,  # keys per step
):
    """Leave (m, l, acc) of attention over split i of the keys, for one query per sequence.

    Grid (B, Hkv, num_splits). With t = ⌈S / TILE⌉ tiles, split i of n has tiles t·i // n … t·(i+1) // n − 1. A split
    without keys leaves (−∞, 0, 0).
    """
    q_ptr, q_seq, q_head, _ = q
    k_ptr, k_seq, k_head, k_token, _ = k
    v_ptr, v_seq, v_head, v_token, _ = v
    seq, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    row, dim = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    head, is_head = kv_head * GROUP + row, row < GROUP

    query = tl.load(q_ptr + seq * q_seq + head[:, None] * q_head + dim, mask=is_head[:, None], other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    num_tiles = tl.cdiv(S, TILE)
    for tile in range(num_tiles * split // num_splits, num_tiles * (split + 1) // num_splits):
        key = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        is_key = key < S
        k_offset = seq * k_seq + kv_head * k_head + key[:, None] * k_token + dim
        v_offset = seq * v_seq + kv_head * v_head + key[:, None] * v_token + dim
        keys = tl.load(k_ptr + k_offset, mask=is_key[:, None], other=0.0)  # [TILE, D]
        values = tl.load(v_ptr + v_offset, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale  # [ROWS, TILE]
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp(m - m_new)
        weights = tl.exp(scores - m_new[:, None])
        l = alpha * l + tl.sum(weights, axis=1)
        acc = alpha[:, None] * acc + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        m = m_new
    slot = (seq * num_heads + head) * num_splits + split
    tl.store(m_ptr + slot, m, mask=is_head)
    tl.store(l_ptr + slot, l, mask=is_head)
    tl.store(acc_ptr + slot[:, None] * D + dim, acc, mask=is_head[:, None])


@triton.jit
def load_split(splits_ptr, index):
    """Return (item, first tile, end tile, slot) of entry `index` of a work plan's splits."""
    entry = splits_ptr + 4 * index
    item = tl.load(entry).to(tl.int64)
    return item, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3).to(tl.int64)


@triton.jit
def keys_of_sequence(seq, seq_lens_ptr, capacity):
    """Return (number of keys, whether that number is possible). An impossible number counts as 0 keys."""
    length = tl.cast(capacity, tl.int32) if seq_lens_ptr is None else tl.load(seq_lens_ptr + seq)
    is_possible = (length >= 0) & (length <= capacity)
    return tl.where(is_possible, length, 0), is_possible


@triton.jit(
    do_not_specialize=["block_tables", "num_queries", "capacity", "window"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "slopes_ptr"],
)
def flash_decoding_kernel(
    q,  # [B, H, T, D]
    k,  # [N, Hkv, P, D], or dense [B, Hkv, S, D]
    v,
    block_tables,  # [B, M] int32, or None: dense
    seq_lens_ptr,  # [B] int32, or None: `capacity` keys each
    slopes_ptr,  # [H] float32, or None
    out,  # [B, H, T, D]; this and lse are written for items that are not split
    lse,  # [B, H, T] float32
    partials,  # float32: m and l [slots · ROWS], acc [slots · ROWS · D]. None: no item is split
    programs_ptr,  # [programs + 1] int32: the first of each program's splits
    splits_ptr,  # [splits, 4] int32: item, first tile, end tile, slot of (m, l, acc). −1: store the result, −2: nothing
    num_queries,  # T
    capacity,  # the most keys that a sequence can have
    window,  # 2³¹ − 1: no window
    scale,  # includes k_scale
    softcap,  # or None
    v_scale,
    P: tl.constexpr,  # tokens per block, or None: dense
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from D on, at least 16
    HKV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # query rows per item
    TILE: tl.constexpr,  # keys per step
    FLOAT8_BITS: tl.constexpr,  # as in lesson 5
    CAUSAL: tl.constexpr,
):
    """out[b] = attention(q[b], keys, values) · v_scale over the seq_lens[b] keys of sequence b, the queries at its end.

    Grid (programs). From `split_decode_kernel` to this kernel:

    1. Lesson 5's steps: any head size and group, ALiBi, softcap, window, float8, paged keys, impossible lengths.
    2. T queries per sequence: rows are pairs of a query and a head of the group, in chunks of ROWS.
    3. A work plan in place of the grid: a table lists the splits of each program, from one item or several. An item is
       a KV head of a sequence, or a chunk of its rows.
    4. An item that is one split is stored as a result. The other splits leave (m, l, acc) for `merge_plan_kernel`.
    """
    q_ptr, q_seq, q_head, q_query, _ = q
    k_ptr, k_block, k_head, k_token, _ = k
    v_ptr, v_block, v_head, v_token, _ = v
    out_ptr, out_seq, out_head, out_query, _ = out
    lse_ptr, lse_seq, lse_head, _ = lse
    chunks = (num_queries * GROUP + ROWS - 1) // ROWS
    program = tl.program_id(0)
    for index in range(tl.load(programs_ptr + program), tl.load(programs_ptr + program + 1)):
        item, first_tile, end_tile, slot = load_split(splits_ptr, index)
        seq, kv_head = item // (HKV * chunks), item // chunks % HKV
        query, group_head, is_row = rows_of_chunk((item % chunks).to(tl.int32), num_queries * GROUP, GROUP, ROWS)
        head = kv_head * GROUP + group_head
        end_key, is_possible = keys_of_sequence(seq, seq_lens_ptr, capacity)
        first_key = tl.maximum(end_key - window, num_queries - 1) - (num_queries - 1)  # the first query's first key
        table = seq
        if P is not None:
            tables_ptr, tables_row, tables_column = block_tables
            table = (tables_ptr + seq * tables_row, tables_column)

        position = (end_key - num_queries + query).to(tl.int32)
        rows = (q_ptr + seq * q_seq + head * q_head + query * q_query, is_row, head, position)
        ranges = (first_tile, end_tile, first_key, end_key)
        memory = ((k_ptr + kv_head * k_head, k_block, k_token), (v_ptr + kv_head * v_head, v_block, v_token), table)
        m, l, acc = attend_to_tiles(
            rows, slopes_ptr, memory, ranges, scale, softcap, window, P, D, BLOCK_D, TILE, FLOAT8_BITS, CAUSAL
        )
        if partials is not None:
            slots = slot * ROWS + tl.arange(0, ROWS)
            store_partials(partials, slots, is_row & (slot >= 0), m, l, acc, D)
        l = tl.where(is_possible, l, float("nan"))
        out_offsets = seq * out_seq + head * out_head + query * out_query
        lse_offsets = seq * lse_seq + head * lse_head + query
        store_results(out_ptr, lse_ptr, out_offsets, lse_offsets, is_row & (slot == -1), m, l, acc, v_scale, D)


@triton.jit(do_not_specialize=["num_queries"])
def merge_plan_kernel(
    partials,  # float32: m and l [slots · ROWS], acc [slots · ROWS · D]
    items_ptr,  # [items, 6] int32: first slot, number of splits, first row of lse, KV head, first row, number of rows
    out_ptr,  # [rows of lse · D]
    lse_ptr,  # float32
    head_stride,  # rows of lse from one head of a query to the next
    query_stride,  # and from one query of a head to the next
    v_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LOADS: tl.constexpr,  # as in lesson 5
):
    """Merge the splits of each item in the order of its keys, row by row: out = acc / l · v_scale and lse.

    Grid (items, ROWS). An item with one split is stored already. An item with none saw no key. A negative number of
    splits marks a sequence whose length is impossible: it gives NaN.
    """
    entry, row_of_item = items_ptr + 6 * tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_slot, num_splits = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    row = tl.load(entry + 4) + row_of_item
    if (num_splits == 1) | (row >= tl.load(entry + 5)):
        return
    m, l, acc = empty(1, BLOCK_D)
    for start in range(0, num_splits, LOADS):
        split = start + tl.arange(0, LOADS)
        slots = (first_slot + split) * ROWS + row_of_item
        m, l, acc = merge_slots(m, l, acc, partials, slots, split < num_splits, D, BLOCK_D)
    l = tl.where(num_splits >= 0, l, float("nan"))
    head = tl.load(entry + 3) * GROUP + row % GROUP
    result = tl.load(entry + 2).to(tl.int64) + head * head_stride + row // GROUP * query_stride + tl.arange(0, 1)
    store_results(out_ptr, lse_ptr, result * D, result, result >= 0, m, l, acc, v_scale, D)
