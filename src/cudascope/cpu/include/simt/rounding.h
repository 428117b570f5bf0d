// Rounding: one operation in another mode than to nearest, and to integers as the hardware converts.
#pragma once

#include <cfenv>

#include "language.h"

namespace simt {
template <class T>
SIMT_INLINE T opaque(T x) {  // what the compiler neither computes beforehand nor moves past a change of the mode
    volatile T kept = x;
    return kept;
}

template <int mode, class Op, class... T>
SIMT_INLINE auto rounded(Op op, T... x) {
    if constexpr (mode == FE_TONEAREST) {
        return op(x...);
    } else {
        fesetround(mode);
        auto result = opaque(op(opaque(x)...));
        fesetround(FE_TONEAREST);
        return result;
    }
}

// x rounded to odd: of the two nearest numbers the one whose last bit is 1, if x lies between them by `error`. A later
// rounding to fewer bits, in any mode, then gives what one rounding of the exact number gives.
SIMT_INLINE double to_odd(double x, double error) {
    uint64_t pattern = bits(x);
    if (error == 0 || !std::isfinite(x) || pattern & 1) return x;
    return from_bits<double>((error > 0) == (x > 0) ? pattern + 1 : pattern - 1);
}
SIMT_INLINE float to_odd_float(double x) {
    constexpr float largest = std::numeric_limits<float>::max();
    if (std::isfinite(x) && std::fabs(x) > largest) return std::copysign(largest, (float)x);
    float nearest = (float)x;
    if (!std::isfinite(nearest)) return nearest;
    uint32_t pattern = bits(nearest);
    if ((double)nearest == x || pattern & 1) return nearest;
    return from_bits<float>(std::fabs((double)nearest) < std::fabs(x) ? pattern + 1 : pattern - 1);
}
SIMT_INLINE double odd_fma(double x, double y, double z) {  // of numbers whose product is exact
    double product = x * y, sum = product + z, more = sum - product;
    return to_odd(sum, product - (sum - more) + (z - more));
}

// Saturates. NaN gives 0, and where 64 bits are on either side the pattern 0x80….
template <class To, class From>
SIMT_INLINE To to_integer(From x) {
    if (std::isnan(x)) return sizeof(To) == 8 || sizeof(From) == 8 ? (To)1 << (8 * sizeof(To) - 1) : (To)0;
    constexpr To lowest = std::numeric_limits<To>::lowest(), highest = std::numeric_limits<To>::max();
    if (x <= (From)lowest) return lowest;
    return x >= (From)highest ? highest : (To)x;
}
}  // namespace simt

#define SIMT_MODES(define, ...)                                                                       \
    define(rn, FE_TONEAREST, __VA_ARGS__) define(rz, FE_TOWARDZERO, __VA_ARGS__)                      \
    define(rd, FE_DOWNWARD, __VA_ARGS__) define(ru, FE_UPWARD, __VA_ARGS__)
#define SIMT_IN_MODE(suffix, mode, To, name, parameters, expression, ...)                             \
    SIMT_INLINE To name##_##suffix parameters {                                                       \
        return simt::rounded<mode>([] parameters -> To { return expression; }, __VA_ARGS__);          \
    }
#define SIMT_OF_ONE(To, name, From, expression) SIMT_MODES(SIMT_IN_MODE, To, name, (From x), expression, x)
#define SIMT_OF_TWO(T, name, expression) SIMT_MODES(SIMT_IN_MODE, T, name, (T x, T y), expression, x, y)
#define SIMT_ARITHMETIC(T, prefix, fused)                                                                       \
    SIMT_OF_TWO(T, prefix##add, x + y) SIMT_OF_TWO(T, prefix##sub, x - y) SIMT_OF_TWO(T, prefix##mul, x * y)    \
    SIMT_OF_TWO(T, prefix##div, x / y) SIMT_OF_ONE(T, prefix##rcp, T, 1 / x)                                    \
    SIMT_OF_ONE(T, prefix##sqrt, T, std::sqrt(x))                                                               \
    SIMT_MODES(SIMT_IN_MODE, T, fused, (T x, T y, T z), std::fma(x, y, z), x, y, z)
SIMT_ARITHMETIC(float, __f, __fmaf)
SIMT_ARITHMETIC(double, __d, __fma)
SIMT_INLINE float __frsqrt_rn(float x) { return (float)(1 / std::sqrt((double)x)); }
SIMT_INLINE float __fmaf_ieee_rn(float x, float y, float z) { return std::fma(x, y, z); }

SIMT_OF_ONE(float, __double2float, double, (float)x) SIMT_OF_ONE(float, __int2float, int, (float)x)
SIMT_OF_ONE(float, __uint2float, unsigned, (float)x) SIMT_OF_ONE(float, __ll2float, long long, (float)x)
SIMT_OF_ONE(float, __ull2float, unsigned long long, (float)x) SIMT_OF_ONE(double, __ll2double, long long, (double)x)
SIMT_OF_ONE(double, __ull2double, unsigned long long, (double)x)
SIMT_INLINE double __int2double_rn(int x) { return x; }
SIMT_INLINE double __uint2double_rn(unsigned x) { return x; }

#define SIMT_TO_INTEGER(name, To, From)                                                     \
    SIMT_INLINE To name##_rn(From x) { return simt::to_integer<To>(std::nearbyint(x)); }    \
    SIMT_INLINE To name##_rz(From x) { return simt::to_integer<To>(std::trunc(x)); }        \
    SIMT_INLINE To name##_rd(From x) { return simt::to_integer<To>(std::floor(x)); }        \
    SIMT_INLINE To name##_ru(From x) { return simt::to_integer<To>(std::ceil(x)); }
#define SIMT_TO_INTEGERS(name, From)                                                                        \
    SIMT_TO_INTEGER(name##int, int, From) SIMT_TO_INTEGER(name##uint, unsigned, From)                       \
    SIMT_TO_INTEGER(name##ll, long long, From) SIMT_TO_INTEGER(name##ull, unsigned long long, From)
SIMT_TO_INTEGERS(__float2, float)
SIMT_TO_INTEGERS(__double2, double)

#define SIMT_BITS(To, name, From) \
    SIMT_INLINE To name(From x) { return simt::from_bits<To>(simt::bits(x)); }
SIMT_BITS(int, __float_as_int, float) SIMT_BITS(unsigned, __float_as_uint, float)
SIMT_BITS(float, __int_as_float, int) SIMT_BITS(float, __uint_as_float, unsigned)
SIMT_BITS(long long, __double_as_longlong, double) SIMT_BITS(double, __longlong_as_double, long long)
SIMT_INLINE int __double2hiint(double x) { return (int)(simt::bits(x) >> 32); }
SIMT_INLINE int __double2loint(double x) { return (int)simt::bits(x); }
SIMT_INLINE double __hiloint2double(int high, int low) {
    return simt::from_bits<double>((uint64_t)(unsigned)high << 32 | (unsigned)low);
}
#undef SIMT_BITS
#undef SIMT_TO_INTEGERS
#undef SIMT_TO_INTEGER
#undef SIMT_ARITHMETIC
#undef SIMT_OF_TWO
#undef SIMT_OF_ONE
#undef SIMT_IN_MODE
#undef SIMT_MODES
