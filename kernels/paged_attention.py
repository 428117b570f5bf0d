"""Paged decode in Triton: one new query per sequence over keys and values in blocks (lesson 5).

    paged_decode_kernel   first rung: one program per sequence and KV head, and nothing else
    merge_splits_kernel   the merge of splits that the first rungs of later lessons leave, with lesson 3's formula

`decode_attention_kernel` is what the package runs. Kwon et al. 2023 (PagedAttention).
"""

import triton
import triton.language as tl

from pagewise.kernels.partial import empty, merge, output


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
    ROWS: tl.constexpr,  # a power of two from GROUP on: 16, the rows of a tensor-core instruction, or more
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


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    partials,  # float32: m and l [rows · num_splits], acc [rows · num_splits · D]
    out_ptr,  # [rows · D]
    lse_ptr,  # [rows] float32
    num_splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOADS: tl.constexpr,  # splits that are read at once: one at a time, each would wait for the one before
):
    """Merge the splits of a row in the order of their keys: out = acc / l and lse. Grid (rows)."""
    m_ptr, l_ptr, acc_ptr = partials
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)[None, :]
    m, l, acc = empty(1, BLOCK_D)
    for start in range(0, num_splits, LOADS):
        split = start + tl.arange(0, LOADS)
        slots, mask = row * num_splits + split, split < num_splits
        m_parts = tl.load(m_ptr + slots, mask=mask, other=float("-inf"))
        l_parts = tl.load(l_ptr + slots, mask=mask, other=0.0)
        acc_parts = tl.load(acc_ptr + slots[:, None] * D + dim, mask=mask[:, None] & (dim < D), other=0.0)
        m, l, acc = merge(m, l, acc, m_parts, l_parts, acc_parts)
    out, lse = output(m, l, acc)
    tl.store(out_ptr + row * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)
