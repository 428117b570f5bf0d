"""Attention over cached keys, for few queries or chunks of prompts: what the package runs in lessons 5, 7 and 9.

    decode_attention_kernel   items of query rows over splits of their keys
    merge_items_kernel        the merge of an item's splits, with lesson 3's formula

`work_plan.py` says what items and splits are. Kwon et al. 2023 (PagedAttention); Dao et al. 2023 (Flash-Decoding).
"""

import triton
import triton.language as tl

from pagewise.kernels.float8 import widen
from pagewise.kernels.partial import LN_2, LOG2_E, empty, finite
from pagewise.kernels.scores import capped
from pagewise.kernels.work_plan import count_tiles, keys_of_item, rows_of_item, sections, tiles_of_split


@triton.jit
def times(index, stride):
    """index · stride in 64 bits, for an index from 0 on. A GPU multiplies two unsigned 32-bit numbers at once."""
    stride = stride + tl.zeros([], tl.int32)  # a stride of 1 is a constant without a type
    if stride.dtype == tl.int64:
        return index.to(tl.int64) * stride
    return (index.to(tl.uint32).to(tl.uint64) * stride.to(tl.uint32).to(tl.uint64)).to(tl.int64)


@triton.jit
def rows_at(pointers, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return queries, keys or values [n, BLOCK_D] from a pointer to each; 0 where mask is False. mask: or None."""
    elements, dim = pointers[:, None] + tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_D)[None, :]
    if mask is not None:
        return tl.load(elements, mask=mask[:, None] & (dim < D), other=0.0)
    return tl.load(elements, mask=dim < D, other=0.0) if D < BLOCK_D else tl.load(elements)


@triton.jit
def fold_tiles(
    tiles,  # first, end; those from `whole` on are `skipped` tiles further: (first, end, whole, skipped)
    state,  # m in units of log 2, l, acc
    queries,  # q [ROWS, BLOCK_D] and their positions among the keys [ROWS]
    memory,  # of k and of v of one KV head, pointer and strides of blocks and tokens; the sequence's row of the table
    keys,  # the first key that some row reads, and the end
    scoring,  # scale, softcap, slope · log₂ e of each row, window
    SIZES: tl.constexpr,
    FLOAT8_BITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CUT: tl.constexpr,  # whether some key of these tiles is hidden from some row
):
    """Return (m, l, acc) after these tiles of keys.

    A tile within one block, or of dense keys, has one address and a step from key to key.
    """
    k_ptr, k_block, k_token, v_ptr, v_block, v_token, table = memory
    P: tl.constexpr = SIZES.P
    first, end, whole, skipped = tiles
    m, l, acc = state
    q, position = queries
    first_key, end_key = keys
    scale, softcap, slope, window = scoring
    for index in range(first, end):
        start = tl.cast(tl.where(index < whole, index, index + skipped) if CUT else index, tl.int32) * SIZES.TILE
        place = tl.arange(0, SIZES.TILE)
        key = start + place
        is_read = (key >= first_key) & (key < end_key)
        if P is None or P >= SIZES.TILE:
            token, k_rows, v_rows = start, k_ptr, v_ptr
            if P is not None:
                block, token = tl.load(table + start // P), start % P
                k_rows, v_rows = k_ptr + times(block, k_block), v_ptr + times(block, v_block)
            k_rows = k_rows + times(token, k_token) + times(place, k_token)
            v_rows = v_rows + times(token, v_token) + times(place, v_token)
        else:  # a key that is not read may have any number in the block table
            entries = table + start // P + place // P
            block = tl.load(entries, mask=is_read, other=0) if CUT else tl.load(entries)
            k_rows = k_ptr + times(block, k_block) + times(place % P, k_token)
            v_rows = v_ptr + times(block, v_block) + times(place % P, v_token)
        mask = is_read if CUT else None  # a slot that no query sees may hold NaN, which a weight of 0 does not hide
        k = widen(rows_at(k_rows, mask, SIZES.D, SIZES.BLOCK_D), FLOAT8_BITS).to(q.dtype)
        v = widen(rows_at(v_rows, mask, SIZES.D, SIZES.BLOCK_D), FLOAT8_BITS).to(q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scale  # scale > 0: the largest product is the largest score, so the exponent can take the scale
        distance = key[None, :] - position[:, None]  # of the key from the query
        if softcap is not None:
            scores, factor = capped(scores, scale, softcap), 1.0
        if slope is not None:
            scores, factor = scores * factor - slope[:, None] * tl.abs(distance.to(tl.float32)), 1.0
        if CUT:
            visible = is_read[None, :]
            if CAUSAL:
                visible = visible & (distance <= 0) & (distance > -window)
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1) * factor)
        alpha = tl.exp2(m - finite(m_new))
        weights = tl.exp2(scores * factor - finite(m_new)[:, None])
        l = l * alpha + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, l, acc


@triton.jit
def store_results(results, seq, head, query, mask, m, l, acc, D: tl.constexpr):
    """Store out = acc / l · v_scale and the natural lse of rows, by their heads and queries. m: in units of log 2.

    A row that saw no key (l = 0) gives 0 and −∞.
    """
    out_ptr, out_seq, out_head, out_query, _ = results.out
    lse_ptr, lse_seq, lse_head, lse_query = results.lse
    dim = tl.arange(0, acc.shape[1])[None, :]
    l = tl.where(l == 0.0, 1.0, l)
    out = (acc * (results.v_scale / l)[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = out_ptr + seq * out_seq + head * out_head + query * out_query
    tl.store(out_rows[:, None] + dim, out, mask=mask[:, None] & (dim < D))
    tl.store(lse_ptr + seq * lse_seq + head * lse_head + query * lse_query, (m + tl.log2(l)) * LN_2, mask=mask)


@triton.jit
def store_partials(partials, slots, mask, m, l, acc, D: tl.constexpr):
    """Store (m, l, acc) of the rows that `mask` selects at `slots` of m [slots], l [slots] and acc [slots, D]."""
    m_ptr, l_ptr, acc_ptr = partials
    dim = tl.arange(0, acc.shape[1])[None, :]
    tl.store(m_ptr + slots, m, mask=mask)
    tl.store(l_ptr + slots, l, mask=mask)
    tl.store(acc_ptr + slots[:, None] * D + dim, acc, mask=mask[:, None] & (dim < D))


@triton.jit
def merge_slots(state, results, slot, left, SIZES: tl.constexpr, LOADS: tl.constexpr):
    """Merge a row's partials in slots slot, slot + ROWS, …, `left` of them and at most LOADS, into (m, l, acc).

    state: (m, l, acc) of the partials before, or None. m is in units of log 2, and acc is [1, BLOCK_D].
    """
    part, dim = tl.arange(0, LOADS), tl.arange(0, SIZES.BLOCK_D)[None, :]
    of_m, of_l = results.m + slot + part * SIZES.ROWS, results.l + slot + part * SIZES.ROWS
    of_acc = results.acc + slot * SIZES.D + ((part * SIZES.ROWS)[:, None] * SIZES.D + dim)
    if (left < LOADS) | (SIZES.D < SIZES.BLOCK_D):
        mask = part < left
        m_parts = tl.load(of_m, mask=mask, other=float("-inf"))
        l_parts = tl.load(of_l, mask=mask, other=0.0)
        acc_parts = tl.load(of_acc, mask=mask[:, None] & (dim < SIZES.D), other=0.0)
    else:  # the usual case comes last, so that it ends without a jump
        m_parts, l_parts, acc_parts = tl.load(of_m), tl.load(of_l), tl.load(of_acc)
    m = tl.max(m_parts, axis=0)
    if state is not None:
        m = tl.maximum(m, state[0])
    weights = tl.exp2(m_parts - finite(m))
    l, acc = tl.sum(weights * l_parts, axis=0), tl.sum(weights[:, None] * acc_parts, axis=0)[None, :]
    if state is not None:
        m_before, l_before, acc_before = state
        alpha = tl.exp2(m_before - finite(m))
        l, acc = l + l_before * alpha, acc + acc_before * alpha
    return m, l, acc


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "capacity", "window", "num_splits", "split_tiles"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "cu_seqlens_q"],
)
def decode_attention_kernel(
    q,  # [B, H, T, D], as every tensor of more than one dimension: (pointer, stride of each dimension)
    k,  # [N, P, Hkv, D]; dense: [B, Hkv, S, D]
    v,
    block_tables,  # [B, M] int32; None: dense
    table_stride,  # from row to row of block_tables
    seq_lens,  # [B] int32; None: `capacity` keys each
    cu_seqlens_q,  # [B + 1] int32: queries cu[b] … cu[b + 1] − 1 of q [1, H, total_q, D] are sequence b's; or None
    scoring,  # Scoring; its scale includes k_scale
    results,  # Results
    plan,  # as `work_plan_kernel` writes it; None: split i of an item is program item · num_splits + i
    num_seqs,  # as in `rows_of_item`
    num_queries,
    capacity,  # the most keys that a sequence can have
    window,  # 2³¹ − 1: no window
    num_splits,  # of an item, at most
    split_tiles,  # tiles of a split; 0: an item has num_splits, or as many as tiles
    SIZES: tl.constexpr,
    HKV: tl.constexpr,
    FLOAT8_BITS: tl.constexpr,  # 4 or 5: the caches are bytes, float8 with that many exponent bits; else 0
    CAUSAL: tl.constexpr,
):
    """out = attention(q, keys, values) · v_scale over the seq_lens[b] keys of sequence b, the queries at their end.

    Grid (items · num_splits), or (programs) with a plan. From the first rungs of lessons 5 and 7 to this kernel:

    1. Any head size and group. Rows are pairs of a query and a head of the group, in items of ROWS (lesson 7), also for
       packed queries, with a number of queries for each sequence (lesson 9).
    2. ALiBi, softcap and window (lesson 5). Tiles before the window are not visited. Only cut tiles pay for masks.
    3. A float8 cache, whose bytes are converted here where the GPU does not convert them (lesson 5).
    4. Keys in blocks or dense, with one loop: a tile is rows at addresses that the block table or a step gives.
    5. Splits by number or size, or a plan by which all programs share the work (lesson 7). An item that is one split is
       stored as a result. The other splits leave (m, l, acc) for `merge_items_kernel`.
    6. An invalid length (below 0, above `capacity`) gives NaN. The kernel then reads no key.
    """
    scale, softcap, slopes, _, _ = scoring
    k_ptr, k_block, k_head, k_token, _ = k
    v_ptr, v_block, v_head, v_token, _ = v
    if SIZES.P is not None:
        k_head, k_token, v_head, v_token = k_token, k_head, v_token, v_head
    q_ptr, q_seq, q_head, q_query, _ = q
    program = tl.program_id(0)
    if plan is None:
        first_item, end_item = program // num_splits, program // num_splits + 1
    else:
        ends, begins, first_items, _, _ = sections(plan)
        low, high = tl.load(begins + program), tl.load(begins + program + 1)
        first_item, end_item = tl.load(first_items + program), tl.load(first_items + program + 1) + 1
        end_item = tl.where(low < high, end_item, first_item)
    for index in range(first_item, end_item):
        item = tl.cast(index, tl.int32)  # Triton's interpreter counts with Python's integers
        seq, kv_head, first_row, num_rows, first_query = rows_of_item(
            item, cu_seqlens_q, num_seqs, num_queries, HKV, SIZES
        )
        first_key, end_key, length, is_possible = keys_of_item(
            seq, first_row, num_rows, seq_lens, capacity, window, SIZES, CAUSAL
        )
        num_tiles = count_tiles(first_key, end_key, SIZES.TILE)
        if plan is None:
            split = program % num_splits
            count, start, end = tiles_of_split(split, num_splits, split_tiles, num_tiles)
            slot, exists = item.to(tl.int64) * num_splits + split, split < count
        else:
            begin = tl.load(ends + item)
            start = tl.minimum(tl.maximum(low - begin - 1, 0), num_tiles)
            end = tl.minimum(tl.maximum(high - begin - 1, 0), num_tiles)
            slot = item.to(tl.int64) + program
            exists = (start < end) | ((num_tiles == 0) & (low <= begin) & (begin < high))
        if exists & (first_row < num_rows):
            row = first_row + tl.arange(0, SIZES.ROWS)
            is_row, query = row < num_rows, tl.minimum(row, num_rows - 1) // SIZES.GROUP
            position, query = length - num_rows // SIZES.GROUP + query, (first_query + query).to(tl.int64)
            head, block = kv_head.to(tl.int64), seq.to(tl.int64)
            row_seq, row_head = block if cu_seqlens_q is None else block * 0, head * SIZES.GROUP + row % SIZES.GROUP
            q_rows = q_ptr + row_seq * q_seq + row_head * q_head + query * q_query
            q_tile = rows_at(q_rows, is_row, SIZES.D, SIZES.BLOCK_D)
            if scale <= 0:  # the loop takes a positive scale
                q_tile *= tl.where(scale < 0, -1.0, 0.0).to(q_tile.dtype)
            slope, table = slopes, block_tables
            if slopes is not None:
                slope = tl.load(slopes + row_head, mask=is_row, other=0.0) * LOG2_E
            if SIZES.P is not None:
                table, block = block_tables + block * table_stride, block * 0
            k_at, v_at = k_ptr + block * k_block + head * k_head, v_ptr + block * v_block + head * v_head
            memory, queries = (k_at, k_block, k_token, v_at, v_block, v_token, table), (q_tile, position)
            of_scores = (tl.where(scale == 0, 1.0, tl.abs(scale)), softcap, slope, window)
            keys, first = (first_key, end_key), first_key // SIZES.TILE + start
            last, seen_by_all, end_by_all = first_key // SIZES.TILE + end, first_key, end_key
            if CAUSAL:
                seen_by_all = tl.maximum(first_key, tl.maximum(tl.max(position, axis=0) + 1, 0) - window)
                end_by_all = tl.minimum(end_key, tl.min(position, axis=0) + 1)
            whole = tl.minimum(tl.maximum(seen_by_all // SIZES.TILE + (seen_by_all % SIZES.TILE > 0), first), last)
            whole_end = tl.minimum(tl.maximum(end_by_all // SIZES.TILE, whole), last)
            skipped = whole_end - whole
            state = empty(SIZES.ROWS, SIZES.BLOCK_D)
            if skipped > 0:  # a loop that is not entered would still compute the addresses of its first loads
                tiles = (whole, whole_end, whole, 0)
                state = fold_tiles(tiles, state, queries, memory, keys, of_scores, SIZES, FLOAT8_BITS, CAUSAL, False)
            if first + skipped < last:
                tiles = (first, last - skipped, whole, skipped)
                state = fold_tiles(tiles, state, queries, memory, keys, of_scores, SIZES, FLOAT8_BITS, CAUSAL, True)
            m, l, acc = state
            l = tl.where(is_possible, l, float("nan"))
            if (start == 0) & (end == num_tiles):
                store_results(results, row_seq, row_head, query, is_row, m, l, acc, SIZES.D)
            elif results.m is not None:
                slots = slot * SIZES.ROWS + tl.arange(0, SIZES.ROWS)
                store_partials((results.m, results.l, results.acc), slots, is_row, m, l, acc, SIZES.D)


@triton.jit(
    do_not_specialize=["num_seqs", "capacity", "window", "num_splits", "split_tiles"],
    do_not_specialize_on_alignment=["seq_lens", "cu_seqlens_q"],
)
def merge_items_kernel(
    results,  # Results
    seq_lens,
    cu_seqlens_q,
    plan,
    num_seqs,
    num_queries,
    capacity,
    window,
    num_splits,
    split_tiles,
    SIZES: tl.constexpr,
    HKV: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOADS: tl.constexpr,  # splits that are read at once: one at a time, each would wait for the one before
):
    """Merge the splits of each item that has several, in the order of its keys: out = acc / l · v_scale and lse.

    Grid (items, rows). The arguments are those of `decode_attention_kernel`.
    """
    item, row_of_item = tl.program_id(0), tl.program_id(1)
    seq, kv_head, first_row, num_rows, first_query = rows_of_item(item, cu_seqlens_q, num_seqs, num_queries, HKV, SIZES)
    if plan is None:
        first_key, end_key, _, _ = keys_of_item(seq, first_row, num_rows, seq_lens, capacity, window, SIZES, CAUSAL)
        num_tiles = count_tiles(first_key, end_key, SIZES.TILE)
        count, _, _ = tiles_of_split(0, num_splits, split_tiles, num_tiles)
        first_slot = item.to(tl.int64) * num_splits
    else:
        _, _, _, first_slots, counts = sections(plan)
        first_slot, count = tl.load(first_slots + item).to(tl.int64), tl.load(counts + item)
    row = first_row + row_of_item
    if (count <= 1) | (row >= num_rows):
        return
    slot = first_slot * SIZES.ROWS + row_of_item
    m, l, acc = merge_slots(None, results, slot, count, SIZES, LOADS)
    for start in range(LOADS, count, LOADS):
        next_slot = slot + tl.cast(start, tl.int64) * SIZES.ROWS
        m, l, acc = merge_slots((m, l, acc), results, next_slot, count - start, SIZES, LOADS)
    m, l = tl.full([1], m, tl.float32), tl.full([1], l, tl.float32)
    query = (first_query + row // SIZES.GROUP).to(tl.int64) + tl.arange(0, 1)
    head = kv_head.to(tl.int64) * SIZES.GROUP + row % SIZES.GROUP
    seq = seq.to(tl.int64) if cu_seqlens_q is None else 0
    store_results(results, seq, head, query, query >= 0, m, l, acc, SIZES.D)
