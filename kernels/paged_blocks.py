"""Writing keys and values into the paged cache (lesson 5)."""

import triton
import triton.language as tl

from pagewise.kernels.float8 import encode_float8


@triton.jit
def write_kv_cache_kernel(
    slots_ptr,  # [T] int64
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    k_cache,  # [N, Hkv, D / X, P, X]
    v_cache,  # [N, Hkv, D, P]
    k_scale,
    v_scale,
    P: tl.constexpr,  # tokens per block
    HKV: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,  # elements of a head that are neighbours in k_cache
    FLOAT8_BITS: tl.constexpr,  # 0: copy; 4 or 5: the caches are bytes, float8 with that many exponent bits
    BLOCK: tl.constexpr,  # numbers that a program writes
):
    """k_cache[slot // P, slot % P] = k[t] / k_scale for slot = slots[t], and so for v. A slot of −1 writes nowhere.

    Grid (T, ⌈Hkv · D / BLOCK⌉). The axes of a cache are in vLLM's order, and its strides tell how it is laid out.
    """
    k_ptr, k_token, k_head, k_dim = k
    v_ptr, v_token, v_head, v_dim = v
    k_cache_ptr, k_cache_block, k_cache_head, k_cache_vec, k_cache_token, k_cache_dim = k_cache
    v_cache_ptr, v_cache_block, v_cache_head, v_cache_dim, v_cache_token = v_cache
    t = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, dim = (number // D).to(tl.int64), (number % D).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    block, token = slot // P, slot % P
    inside = (slot >= 0) & (number < HKV * D)

    new_k = tl.load(k_ptr + t * k_token + head * k_head + dim * k_dim, mask=inside)
    new_v = tl.load(v_ptr + t * v_token + head * v_head + dim * v_dim, mask=inside)
    if FLOAT8_BITS:
        new_k = encode_float8(tl.div_rn(new_k.to(tl.float32), k_scale), FLOAT8_BITS)
        new_v = encode_float8(tl.div_rn(new_v.to(tl.float32), v_scale), FLOAT8_BITS)
    k_offsets = head * k_cache_head + dim // X * k_cache_vec + dim % X * k_cache_dim
    v_offsets = head * v_cache_head + dim * v_cache_dim
    tl.store(k_cache_ptr + block * k_cache_block + token * k_cache_token + k_offsets, new_k, mask=inside)
    tl.store(v_cache_ptr + block * v_cache_block + token * v_cache_token + v_offsets, new_v, mask=inside)
