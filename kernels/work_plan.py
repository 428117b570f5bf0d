"""Items, splits and work plans: which rows, keys and tiles a program of the decode kernels has (from lesson 7 on).

The query rows of one KV head are pairs of a query and a head of its group. An *item* is ROWS of them, over all keys
that they see. A *split* is some of an item's tiles of TILE keys, and leaves lesson 3's (m, l, acc). Splits by number or
size are arithmetic. Where programs share the work of all items, `work_plan_kernel` makes a plan on the device. No host
reads a length, so lengths may change between two replays of a CUDA graph. Osama et al. 2023 (Stream-K).
"""

import triton
import triton.language as tl


@triton.jit
def count_tiles(first_key, end_key, TILE: tl.constexpr):
    """Return how many tiles of TILE keys hold keys first_key … end_key − 1. end_key may be int32's largest number."""
    return tl.where(first_key < end_key, (end_key - 1) // TILE - first_key // TILE + 1, 0)


@triton.jit
def rows_of_item(item, cu_seqlens_q, num_seqs, num_queries, HKV: tl.constexpr, SIZES: tl.constexpr):
    """Return (sequence, KV head, first row, number of rows of the sequence, its first packed query) of an item.

    Without num_seqs, every sequence has the items of num_queries queries: item i is sequence, then KV head, then chunk
    of rows. With num_seqs, item i is chunk, then KV head. The first chunk of sequence b is
    cu_seqlens_q[b] · GROUP // ROWS + b, which leaves enough for each sequence before it; some chunks have no rows. A
    batch of packed sequences takes two launches, with num_seqs for those of several queries. In each, the others have
    no rows.
    """
    GROUP: tl.constexpr = SIZES.GROUP
    ROWS: tl.constexpr = SIZES.ROWS
    if num_seqs is None:
        chunks = (num_queries * GROUP + ROWS - 1) // ROWS
        seq, kv_head, chunk = item // (HKV * chunks), item // chunks % HKV, item % chunks
    else:
        kv_head, chunk, seq, end = item % HKV, item // HKV, item * 0, num_seqs
        while end - seq > 1:  # the last sequence whose first chunk is not after this one
            middle = (seq + end) // 2
            is_after = (tl.load(cu_seqlens_q + middle).to(tl.int64) * GROUP // ROWS).to(tl.int32) + middle > chunk
            seq, end = tl.where(is_after, seq, middle), tl.where(is_after, middle, end)
    first_query, own_queries = item * 0, num_queries + item * 0
    if cu_seqlens_q is not None:
        first_query = tl.load(cu_seqlens_q + seq)
        own_queries = tl.load(cu_seqlens_q + seq + 1) - first_query
        is_here = own_queries == 1 if num_seqs is None else own_queries > 1
        own_queries = tl.where(is_here, own_queries, 0)
    if num_seqs is not None:
        chunk -= (first_query.to(tl.int64) * GROUP // ROWS).to(tl.int32) + seq
    return seq, kv_head, chunk * ROWS, own_queries * GROUP, first_query


@triton.jit
def keys_of_item(seq, first_row, num_rows, seq_lens, capacity, window, SIZES: tl.constexpr, CAUSAL: tl.constexpr):
    """Return (first key, end key, number of keys of the sequence, whether that is possible) that an item's rows read.

    A sequence whose length is below 0 or above `capacity` has 0 keys, and an item without rows reads none.
    """
    length = tl.cast(capacity, tl.int32) + seq * 0 if seq_lens is None else tl.load(seq_lens + seq)
    is_possible = (length >= 0) & (length <= capacity)
    length = tl.where(is_possible, length, 0)
    queries = num_rows // SIZES.GROUP
    first_position = length - queries + first_row // SIZES.GROUP
    last_query = tl.minimum((first_row + SIZES.ROWS - 1) // SIZES.GROUP, queries - 1)
    end_key = tl.maximum(length - queries + last_query + 1, 0) if CAUSAL else length
    end_key = tl.where(first_row < num_rows, end_key, 0)
    first_key = tl.maximum(tl.maximum(first_position + 1, 0) - window, 0)  # no difference leaves int32
    return first_key, end_key, length, is_possible


@triton.jit
def tiles_of_split(split, num_splits, split_tiles, num_tiles):
    """Return (how many splits an item of num_tiles tiles has, first and end tile of this one), counted from 0.

    With split_tiles = 0 there are num_splits, or as many as tiles. Otherwise a split has split_tiles tiles.
    """
    by_size = split_tiles > 0
    of_size = (num_tiles + split_tiles - 1) // tl.maximum(split_tiles, 1)
    count = tl.maximum(tl.where(by_size, of_size, tl.minimum(num_splits, num_tiles)), 1)
    tiles = num_tiles.to(tl.int64)
    start = tl.where(by_size, tl.cast(split, tl.int64) * split_tiles, tiles * split // count)
    end = tl.where(by_size, tl.minimum(start + split_tiles, tiles), tiles * (split + 1) // count)
    return count, start.to(tl.int32), end.to(tl.int32)


@triton.jit
def sections(plan):
    """Return the rows of a work plan [5, …] int32.

    ends          [items + 1]     the work before each item, and the work of all
    begins        [programs + 1]  the work before each program, and the work of all
    first_items   [programs + 1]  the item in which that work lies
    first_slots   [items]         the slot of an item's first split
    counts        [items]         how many splits it has
    """
    ptr, row, _ = plan
    return ptr, ptr + row, ptr + 2 * row, ptr + 3 * row, ptr + 4 * row


@triton.jit(
    do_not_specialize=["num_items", "num_programs", "min_tiles", "capacity", "window"],
    do_not_specialize_on_alignment=["seq_lens", "cu_seqlens_q"],
)
def work_plan_kernel(
    plan,  # [5, …] int32
    seq_lens,
    cu_seqlens_q,
    num_items,
    num_programs,
    min_tiles,  # fewest tiles of a program
    num_queries,
    capacity,
    window,
    SIZES: tl.constexpr,
    HKV: tl.constexpr,
    CAUSAL: tl.constexpr,
    LANES: tl.constexpr,  # items that are handled at once
):
    """Lay the work of all items end to end and give each program an equal range of it (`equal_ranges` on the device).

    An item's work is its tiles, and one unit before them for the start of a program. An item without keys has this unit
    alone, and one without rows has none. Program p of n that share W has the work from W · p // n on. The split of an
    item in program p has slot p + item. Grid (1).
    """
    ends, begins, first_items, first_slots, counts = sections(plan)
    lane, total = tl.arange(0, LANES), 0
    for start in range(0, num_items, LANES):
        item = start + lane
        seq, _, first_row, num_rows, _ = rows_of_item(
            tl.minimum(item, num_items - 1), cu_seqlens_q, None, num_queries, HKV, SIZES
        )
        first_key, end_key, _, _ = keys_of_item(seq, first_row, num_rows, seq_lens, capacity, window, SIZES, CAUSAL)
        exists = (item < num_items) & (first_row < num_rows)
        work = tl.where(exists, count_tiles(first_key, end_key, SIZES.TILE) + 1, 0)
        tl.store(ends + item, total + tl.cumsum(work) - work, mask=item < num_items)
        total += tl.sum(work)
    tl.store(ends + num_items, total)
    tl.debug_barrier()  # other threads read the ends below

    sharing = tl.minimum(tl.maximum(total // min_tiles, 1), num_programs).to(tl.int64)
    wide = tl.maximum(total, 1).to(tl.int64)
    for start in range(0, num_programs + 1, LANES):
        program = start + lane
        begin = tl.minimum(wide * program // sharing, total).to(tl.int32)
        low, high = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32) + num_items - 1
        unit = tl.minimum(begin, total - 1)
        while tl.max(high - low) > 0:  # the last item that begins at this unit or before it
            middle = (low + high + 1) // 2
            is_after = tl.load(ends + middle) > unit
            low, high = tl.where(is_after, low, middle), tl.where(is_after, middle - 1, high)
        tl.store(begins + program, begin, mask=program <= num_programs)
        tl.store(first_items + program, low, mask=program <= num_programs)

    for start in range(0, num_items, LANES):
        item = start + lane
        begin = tl.load(ends + item, mask=item < num_items, other=0).to(tl.int64)
        end = tl.load(ends + item + 1, mask=item < num_items, other=0).to(tl.int64)
        # Program p begins at unit x or before it if W · p < (x + 1) · n.
        first = (tl.minimum(begin + 2, end) * sharing - 1) // wide
        last = (end * sharing - 1) // wide
        tl.store(first_slots + item, (first + item).to(tl.int32), mask=item < num_items)
        tl.store(counts + item, tl.where(end > begin, last - first + 1, 0).to(tl.int32), mask=item < num_items)
