// CUDA's mathematics: functions with its names, conversions with its rounding.
#pragma once

#include "simt_integers.h"
#include "simt_rounding.h"

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

namespace simt {
template <class A, class B>
using common = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>>;
}
template <class A, class B, class T = simt::common<A, B>>
SIMT_INLINE constexpr T min(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return (T)(std::fmin((T)a, (T)b));
    return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B, class T = simt::common<A, B>>
SIMT_INLINE constexpr T max(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return (T)(std::fmax((T)a, (T)b));
    return (T)a > (T)b ? (T)a : (T)b;
}

// the C library has these names too
#define __expf simt_expf
#define __exp10f simt_exp10f
#define __logf simt_logf
#define __log2f simt_log2f
#define __log10f simt_log10f
#define __powf simt_powf
#define __sinf simt_sinf
#define __cosf simt_cosf
#define __tanf simt_tanf
#define __tanhf simt_tanhf
#define __sincosf simt_sincosf
#define SIMT_MATH(T, name, arguments, expression) SIMT_INLINE T name arguments { return expression; }
SIMT_MATH(float, simt_expf, (float x), std::exp(x))
SIMT_MATH(float, simt_exp10f, (float x), std::pow(10.0f, x))
SIMT_MATH(float, simt_logf, (float x), std::log(x))
SIMT_MATH(float, simt_log2f, (float x), std::log2(x))
SIMT_MATH(float, simt_log10f, (float x), std::log10(x))
SIMT_MATH(float, simt_powf, (float x, float y), std::pow(x, y))
SIMT_MATH(float, simt_sinf, (float x), std::sin(x))
SIMT_MATH(float, simt_cosf, (float x), std::cos(x))
SIMT_MATH(float, simt_tanf, (float x), std::tan(x))
SIMT_MATH(float, simt_tanhf, (float x), std::tanh(x))
SIMT_MATH(float, __fdividef, (float x, float y), x / y)
SIMT_MATH(float, __saturatef, (float x), x > 0 ? (x < 1 ? x : 1.0f) : 0.0f)
SIMT_MATH(float, rsqrtf, (float x), 1.0f / std::sqrt(x))
SIMT_MATH(double, rsqrt, (double x), 1.0 / std::sqrt(x))
SIMT_MATH(float, rcbrtf, (float x), 1.0f / std::cbrt(x))
SIMT_MATH(float, sinpif, (float x), std::sin(x * 3.14159265358979323846f))
SIMT_MATH(float, cospif, (float x), std::cos(x * 3.14159265358979323846f))
SIMT_MATH(float, normcdff, (float x), 0.5f * std::erfc(-x * 0.70710678118654752440f))
SIMT_MATH(float, fdividef, (float x, float y), x / y)
SIMT_INLINE void simt_sincosf(float x, float* s, float* c) { *s = std::sin(x), *c = std::cos(x); }
SIMT_MATH(float, __frcp_rn, (float x), 1.0f / x)
SIMT_MATH(float, __fsqrt_rn, (float x), std::sqrt(x))
SIMT_MATH(float, __frsqrt_rn, (float x), 1.0f / std::sqrt(x))
SIMT_MATH(float, __fadd_rn, (float x, float y), x + y)
SIMT_MATH(float, __fsub_rn, (float x, float y), x - y)
SIMT_MATH(float, __fmul_rn, (float x, float y), x * y)
SIMT_MATH(float, __fdiv_rn, (float x, float y), x / y)
SIMT_MATH(float, __fmaf_rn, (float x, float y, float z), std::fma(x, y, z))
SIMT_MATH(double, __fma_rn, (double x, double y, double z), std::fma(x, y, z))
SIMT_MATH(double, __dadd_rn, (double x, double y), x + y)
SIMT_MATH(double, __dmul_rn, (double x, double y), x * y)

#define SIMT_ROUND(name, To, From)                                                                       \
    SIMT_MATH(To, name##_rn, (From x), simt::to_integer<To>(std::nearbyint(x)))                          \
    SIMT_MATH(To, name##_rz, (From x), simt::to_integer<To>(std::trunc(x)))                              \
    SIMT_MATH(To, name##_rd, (From x), simt::to_integer<To>(std::floor(x)))                              \
    SIMT_MATH(To, name##_ru, (From x), simt::to_integer<To>(std::ceil(x)))
SIMT_ROUND(__float2int, int, float)
SIMT_ROUND(__float2uint, unsigned, float)
SIMT_ROUND(__float2ll, long long, float)
SIMT_ROUND(__float2ull, unsigned long long, float)
SIMT_ROUND(__double2int, int, double)
SIMT_ROUND(__double2ll, long long, double)
#undef SIMT_ROUND
SIMT_MATH(float, __int2float_rn, (int x), (float)x)
SIMT_MATH(float, __uint2float_rn, (unsigned x), (float)x)
SIMT_MATH(float, __ll2float_rn, (long long x), (float)x)
SIMT_MATH(double, __int2double_rn, (int x), (double)x)
SIMT_MATH(float, __double2float_rn, (double x), (float)x)
SIMT_MATH(int, __float_as_int, (float x), simt::from_bits<int>(simt::bits(x)))
SIMT_MATH(unsigned, __float_as_uint, (float x), simt::from_bits<unsigned>(simt::bits(x)))
SIMT_MATH(float, __int_as_float, (int x), simt::from_bits<float>(simt::bits(x)))
SIMT_MATH(float, __uint_as_float, (unsigned x), simt::from_bits<float>(simt::bits(x)))
SIMT_MATH(long long, __double_as_longlong, (double x), simt::from_bits<long long>(simt::bits(x)))
SIMT_MATH(double, __longlong_as_double, (long long x), simt::from_bits<double>(simt::bits(x)))

// What NVIDIA's half and bfloat16 have on the device only. Products of two halves are exact in double.
#define SIMT_HALF1(H, name, expression)                                          \
    SIMT_INLINE H h##name(H a) { float x = (float)a; return H(float(expression)); } \
    SIMT_INLINE H##2_ h2##name(H##2_ a) { return H##2_(h##name(a.x), h##name(a.y)); }
#define SIMT_HALF(H)                                                                                              \
    SIMT_HALF1(H, exp, std::exp(x)) SIMT_HALF1(H, exp2, std::exp2(x)) SIMT_HALF1(H, exp10, std::pow(10.0f, x))     \
    SIMT_HALF1(H, log, std::log(x)) SIMT_HALF1(H, log2, std::log2(x)) SIMT_HALF1(H, log10, std::log10(x))          \
    SIMT_HALF1(H, sqrt, std::sqrt(x)) SIMT_HALF1(H, rsqrt, 1 / std::sqrt(x)) SIMT_HALF1(H, rcp, 1 / x)             \
    SIMT_HALF1(H, sin, std::sin(x)) SIMT_HALF1(H, cos, std::cos(x)) SIMT_HALF1(H, tanh, std::tanh(x))              \
    SIMT_HALF1(H, floor, std::floor(x)) SIMT_HALF1(H, ceil, std::ceil(x))                                          \
    SIMT_HALF1(H, trunc, std::trunc(x)) SIMT_HALF1(H, rint, std::nearbyint(x))                                     \
    SIMT_INLINE H __hfma(H a, H b, H c) { return H((double)(float)a * (double)(float)b + (double)(float)c); }      \
    SIMT_INLINE H##2_ __hfma2(H##2_ a, H##2_ b, H##2_ c) { return H##2_(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }
using __half2_ = __half2;
using __nv_bfloat162_ = __nv_bfloat162;
SIMT_HALF(__half)
SIMT_HALF(__nv_bfloat16)
SIMT_MATH(int, __half2int_rn, (__half x), __float2int_rn(__half2float(x)))
SIMT_MATH(int, __bfloat162int_rn, (__nv_bfloat16 x), __float2int_rn(__bfloat162float(x)))
SIMT_MATH(unsigned, __half2uint_rn, (__half x), __float2uint_rn(__half2float(x)))
#undef SIMT_HALF
#undef SIMT_HALF1
