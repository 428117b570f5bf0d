"""Float8 numbers by their bits, for GPUs that cannot convert: what is written to a paged cache and read from it.

A byte is a sign, EXPONENT_BITS (4: e4m3fn, 5: e5m2), and the rest mantissa.
"""

import triton
import triton.language as tl


@triton.jit
def encode_float8(x, EXPONENT_BITS: tl.constexpr):
    """x.clamp(−largest, largest).to(float8).view(uint8) for float32 x: nearest, ties to even; NaN is 0x7F.

    The function computes with integers on the bits of x, which every GPU can do. The upper M of the 23 mantissa bits
    stay. To round to nearest, add half of the last bit that stays, minus one unless that bit is odd. A carry runs into
    the exponent, as it should. Below the smallest normal number the spacing of numbers is fixed. There, a power of two
    is added whose last bit is worth one spacing, and the adder rounds.
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
def widen(x, EXPONENT_BITS: tl.constexpr):
    """Float8 as float16, which has all its numbers, unless Triton converts it right wherever it is used; else x.

    EXPONENT_BITS is 0, or 4 or 5 where x is bytes, for GPUs that cannot convert (e4m3 below sm_89). e5m2 is the upper
    byte of a float16. e4m3 has an exponent bit less, and its bias is 7 instead of 15. In the place of a float16, its
    numbers are 2⁸ times too small, subnormals included. Triton's way from e5m2 to bfloat16 is a product with 2¹¹² on
    sm_90, which makes finite numbers of inf and NaN.
    """
    if EXPONENT_BITS == 5:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif EXPONENT_BITS == 4:
        bits = x.to(tl.uint16)
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    elif x.dtype == tl.float8e5:
        x = x.to(tl.float16)
    return x
