"""Writing keys and values into the paged cache (lesson 5)."""

import triton
import triton.language as tl


@triton.jit
def float8_bits(x, EXPONENT_BITS: tl.constexpr):
    """x.clamp(−largest, largest).to(float8).view(uint8) for float32 x: nearest, ties to even; NaN is 0x7F.

    In integers on the bits of x, so that every GPU can. Of 23 mantissa bits the upper M stay. Adding half of what is
    cut off, less one unless the last bit that stays is odd, rounds them, and a carry runs into the exponent as it
    should. Below the smallest normal number the quantum is fixed: adding a power of two whose own last bit is worth one
    quantum lets the adder round.
    """
    M: tl.constexpr = 7 - EXPONENT_BITS
    BIAS: tl.constexpr = 2 ** (EXPONENT_BITS - 1) - 1
    LARGEST: tl.constexpr = 448.0 if EXPONENT_BITS == 4 else 57344.0
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    MAGIC: tl.constexpr = 2.0 ** (1 - BIAS - M + 23)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    odd = (bits >> (23 - M)) & 1
    normal = ((bits + ((1 << (22 - M)) - 1) + odd) >> (23 - M)) - ((127 - BIAS) << M)
    subnormal = (magnitude + MAGIC).to(tl.uint32, bitcast=True) & 0x7FFFFF
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    byte = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal) | sign
    return tl.where(x == x, byte, 0x7F).to(tl.uint8)


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
        k = float8_bits(tl.div_rn(k.to(tl.float32), k_scale), FLOAT8_BITS)
        v = float8_bits(tl.div_rn(v.to(tl.float32), v_scale), FLOAT8_BITS)
    k_offsets = head * k_cache_stride_head + dim // X * k_cache_stride_vec + dim % X
    v_offsets = head * v_cache_stride_head + dim * v_cache_stride_dim
    tl.store(k_cache_ptr + block * k_cache_stride_block + token * k_cache_stride_token + k_offsets, k, mask=inside)
    tl.store(v_cache_ptr + block * v_cache_stride_block + token * v_cache_stride_token + v_offsets, v, mask=inside)
