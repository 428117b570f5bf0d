"""Any number of new queries per sequence over keys and values in blocks: decoding and chunks of prompts (lesson 9).

Lesson 7's work plan says which tiles a program computes, and lesson 7's `merge_plan_kernel` merges the splits.
Kwon et al. 2023; chunked prefill: Agrawal et al. 2024 (Sarathi-Serve).
"""

import triton
import triton.language as tl

from pagewise.kernels.decode import attend_to_tiles, rows_of_chunk, store_partials, store_results
from pagewise.kernels.flash_decoding import keys_of_sequence, load_split


@triton.jit(
    do_not_specialize=["block_tables", "capacity", "window"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "cu_seqlens_q_ptr", "chunk_seqs_ptr", "slopes_ptr"],
)
def paged_attention_varlen_kernel(
    q,  # [total_q, H, D]
    k_cache,  # [N, P, Hkv, D]
    v_cache,  # [N, P, Hkv, D]
    block_tables,  # [B, M] int32
    seq_lens_ptr,  # [B] int32
    cu_seqlens_q_ptr,  # [B + 1] int32: queries cu[b] … cu[b + 1] − 1 are sequence b's
    chunk_seqs_ptr,  # [chunks] int32: the sequence of each chunk of rows
    slopes_ptr,  # [H] float32, or None
    out,  # [total_q, H, D]; this and lse are written for items that are not split
    lse,  # [total_q, H] float32
    partials,  # float32: m and l [slots · ROWS], acc [slots · ROWS · D]. None: no item is split
    programs_ptr,  # the plan's programs, splits and items, as in lesson 7
    splits_ptr,
    items_ptr,
    capacity,  # M · P
    window,  # 2³¹ − 1: no window
    scale,  # includes k_scale
    softcap,  # or None
    v_scale,
    P: tl.constexpr,  # tokens per block
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from D on, at least 16
    HKV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # query rows per item
    TILE: tl.constexpr,  # keys per step
    FLOAT8_BITS: tl.constexpr,  # as in lesson 5
):
    """out[of b] = attention(q[of b], keys, values, causal) · v_scale over the seq_lens[b] keys of sequence b.

    Grid (programs). From `flash_decoding_kernel` to this kernel: the number of queries is looked up for each sequence,
    and an item is a chunk of the rows of one sequence and KV head. An item reads only the keys that its rows see.
    """
    q_ptr, q_query, q_head, _ = q
    k_ptr, k_block, k_token, k_head, _ = k_cache
    v_ptr, v_block, v_token, v_head, _ = v_cache
    tables_ptr, tables_row, tables_column = block_tables
    out_ptr, out_query, out_head, _ = out
    lse_ptr, lse_query, _ = lse
    program = tl.program_id(0)
    for index in range(tl.load(programs_ptr + program), tl.load(programs_ptr + program + 1)):
        item, first_tile, end_tile, slot = load_split(splits_ptr, index)
        seq, kv_head = tl.load(chunk_seqs_ptr + item // HKV).to(tl.int64), item % HKV
        first_row, num_rows = tl.load(items_ptr + 6 * item + 4), tl.load(items_ptr + 6 * item + 5)
        query, group_head, is_row = rows_of_chunk(first_row // ROWS, num_rows, GROUP, ROWS)
        head, packed_query = kv_head * GROUP + group_head, tl.load(cu_seqlens_q_ptr + seq).to(tl.int64) + query
        length, is_possible = keys_of_sequence(seq, seq_lens_ptr, capacity)
        position = (length - num_rows // GROUP + query).to(tl.int32)
        end_key = tl.minimum(tl.max(position, axis=0) + 1, length)
        first_key = tl.maximum(tl.maximum(tl.min(position, axis=0) + 1, 0) - window, 0)

        rows = (q_ptr + packed_query * q_query + head * q_head, is_row, head, position)
        k_memory, v_memory = (k_ptr + kv_head * k_head, k_block, k_token), (v_ptr + kv_head * v_head, v_block, v_token)
        memory = (k_memory, v_memory, (tables_ptr + seq * tables_row, tables_column))
        ranges = (first_tile, end_tile, first_key, end_key)
        m, l, acc = attend_to_tiles(
            rows, slopes_ptr, memory, ranges, scale, softcap, window, P, D, BLOCK_D, TILE, FLOAT8_BITS, True
        )
        if partials is not None:
            slots = slot * ROWS + tl.arange(0, ROWS)
            store_partials(partials, slots, is_row & (slot >= 0), m, l, acc, D)
        l = tl.where(is_possible, l, float("nan"))
        out_offsets, lse_offsets = packed_query * out_query + head * out_head, packed_query * lse_query + head
        store_results(out_ptr, lse_ptr, out_offsets, lse_offsets, is_row & (slot == -1), m, l, acc, v_scale, D)
