"""Paged decode in Triton: one new query per sequence over keys and values in blocks (lesson 5).

    paged_decode_kernel      first rung: one program per sequence and KV head, and nothing else
    paged_attention_kernel   last rung: the kernel that the package runs
    merge_splits_kernel      the merge of its splits, with lesson 3's formula

Kwon et al. 2023 (PagedAttention).
"""

import triton
import triton.language as tl

from pagewise.kernels.decode import attend_to_tiles, count_tiles, merge_slots, store_partials, store_results
from pagewise.kernels.partial import empty


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
    ROWS: tl.constexpr,  # a power of two from GROUP on, at least 16: tl.dot takes no fewer rows
    TILE: tl.constexpr,  # keys per step
):
    """out[b] = softmax(scale · q[b] kᵀ) v over the first seq_lens[b] keys in the blocks that block_tables[b] lists.

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
    out,  # [B, H, D]; this and lse are written only if num_splits is 1
    lse,  # [B, H] float32
    partials,  # float32: m and l [B · H · num_splits], acc [B · H · num_splits · D]. None if num_splits is 1
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
    4. Splits. Split i of n takes the tiles t·i // n to t·(i+1) // n − 1 of the t tiles of a sequence, and leaves
       (m, l, acc). n is at most t and depends on no other sequence. The remaining splits of the grid are empty.
    5. An invalid length (below 0, above `capacity`) gives NaN. The kernel then reads no entry of the table.
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
    group_head = tl.program_id(1) % CHUNKS * ROWS + tl.arange(0, ROWS)
    head, is_row = kv_head * GROUP + group_head, group_head < GROUP

    length = tl.load(seq_lens_ptr + seq)
    is_possible = (length >= 0) & (length <= capacity)
    end_key = tl.where(is_possible, length, 0)
    first_key = tl.maximum(end_key - window, 0)
    first_tile, num_tiles = first_key // TILE, count_tiles(first_key, end_key, TILE)

    rows = (q_ptr + seq * q_seq + head * q_head, is_row, head, tl.zeros([ROWS], tl.int32) + (end_key - 1))
    k_memory, v_memory = (k_ptr + kv_head * k_head, k_block, k_token), (v_ptr + kv_head * v_head, v_block, v_token)
    memory = (k_memory, v_memory, (tables_ptr + seq * tables_row, tables_column))
    n = tl.maximum(tl.minimum(num_splits, num_tiles), 1)
    start = first_tile + tl.minimum(num_tiles * split // n, num_tiles).to(tl.int32)
    end = first_tile + tl.minimum(num_tiles * (split + 1) // n, num_tiles).to(tl.int32)
    ranges = (start, end, first_key, end_key)
    m, l, acc = attend_to_tiles(
        rows, slopes_ptr, memory, ranges, scale, softcap, window, P, D, BLOCK_D, TILE, FLOAT8_BITS, False
    )
    l = tl.where(is_possible, l, float("nan"))
    result = seq * num_heads + head
    if partials is None:
        store_results(out_ptr, lse_ptr, seq * out_seq + head * out_head, result, is_row, m, l, acc, v_scale, D)
    else:
        store_partials(partials, result * num_splits + split, is_row, m, l, acc, D)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    partials,  # float32: m and l [rows · num_splits], acc [rows · num_splits · D]
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
        m, l, acc = merge_slots(m, l, acc, partials, slots, mask, D, BLOCK_D)
    only = row + tl.arange(0, 1)
    store_results(out_ptr, lse_ptr, only * D, only, only >= 0, m, l, acc, v_scale, D)
