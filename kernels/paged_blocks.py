"""Writing keys and values into the paged cache (lesson 5)."""

import triton
import triton.language as tl

from pagewise.kernels.float8 import encode_float8


@triton.jit
def write_kv_cache_kernel(
    slots_ptr,  # [T] int64
    k_ptr,  # [T, Hkv, D], as v
    v_ptr,
    k_cache_ptr,  # [N, P, Hkv, D], or with X < D [N, Hkv, D / X, P, X]
    v_cache_ptr,  # [N, P, Hkv, D] or [N, Hkv, D, P]
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    k_cache_stride_block,
    k_cache_stride_token,
    k_cache_stride_head,
    k_cache_stride_vec,
    v_cache_stride_block,
    v_cache_stride_token,
    v_cache_stride_head,
    v_cache_stride_dim,
    k_scale,
    v_scale,
    P: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,  # elements of a head that lie side by side in k_cache
    FLOAT8_BITS: tl.constexpr,  # 0: copy; 4 or 5: caches are bytes, to be float8 with that many exponent bits
    BLOCK: tl.constexpr,
):
    """k_cache[slot // P, slot % P] = k[t] / k_scale for slot = slots[t], v likewise; a slot of −1 writes nowhere.

    Grid (T, ⌈Hkv · D / BLOCK⌉): a program writes BLOCK numbers of one token.
    """
    t = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, dim = (number // D).to(tl.int64), (number % D).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    block, token = slot // P, slot % P
    inside = (slot >= 0) & (number < HKV * D)

    k = tl.load(k_ptr + t * k_stride_token + head * k_stride_head + dim * k_stride_dim, mask=inside)
    v = tl.load(v_ptr + t * v_stride_token + head * v_stride_head + dim * v_stride_dim, mask=inside)
    if FLOAT8_BITS:
        k = encode_float8(tl.div_rn(k.to(tl.float32), k_scale), FLOAT8_BITS)
        v = encode_float8(tl.div_rn(v.to(tl.float32), v_scale), FLOAT8_BITS)
    k_offsets = head * k_cache_stride_head + dim // X * k_cache_stride_vec + dim % X
    v_offsets = head * v_cache_stride_head + dim * v_cache_stride_dim
    tl.store(k_cache_ptr + block * k_cache_stride_block + token * k_cache_stride_token + k_offsets, k, mask=inside)
    tl.store(v_cache_ptr + block * v_cache_stride_block + token * v_cache_stride_token + v_offsets, v, mask=inside)
