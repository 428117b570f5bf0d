"""Flash-Decoding's first rung in Triton: the keys of a sequence cut into splits that run side by side (lesson 7).

Lesson 5's `merge_splits_kernel` merges the splits. `decode_attention_kernel` is what the package runs. Dao et al. 2023.
"""

import triton
import triton.language as tl


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
    part = (seq * num_heads + head) * num_splits + split
    tl.store(m_ptr + part, m, mask=is_head)
    tl.store(l_ptr + part, l, mask=is_head)
    tl.store(acc_ptr + part[:, None] * D + dim, acc, mask=is_head[:, None])
