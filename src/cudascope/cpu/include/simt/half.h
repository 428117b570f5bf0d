// What NVIDIA's half and bfloat16 have on the device only.
#pragma once

#include "rounding.h"

#define SIMT_HALF1(H, name, expression)                                             \
    SIMT_INLINE H h##name(H a) { float x = (float)a; return H(float(expression)); } \
    SIMT_INLINE H##2_ h2##name(H##2_ a) { return H##2_(h##name(a.x), h##name(a.y)); }
#define SIMT_FMA(H, suffix, limit)                                                                           \
    SIMT_INLINE H __hfma##suffix(H a, H b, H c) {  /* products of two halves are exact in double */          \
        double x = simt::odd_fma((double)(float)a, (double)(float)b, (double)(float)c);                      \
        return H(limit);                                                                                     \
    }                                                                                                        \
    SIMT_INLINE H##2_ __hfma2##suffix(H##2_ a, H##2_ b, H##2_ c) {                                           \
        return H##2_(__hfma##suffix(a.x, b.x, c.x), __hfma##suffix(a.y, b.y, c.y));                          \
    }
#define SIMT_HALF(H)                                                                                           \
    SIMT_HALF1(H, exp, std::exp(x)) SIMT_HALF1(H, exp2, std::exp2(x)) SIMT_HALF1(H, exp10, std::pow(10.0f, x)) \
    SIMT_HALF1(H, log, std::log(x)) SIMT_HALF1(H, log2, std::log2(x)) SIMT_HALF1(H, log10, std::log10(x))      \
    SIMT_HALF1(H, sqrt, std::sqrt(x)) SIMT_HALF1(H, rsqrt, 1 / std::sqrt(x)) SIMT_HALF1(H, rcp, 1 / x)         \
    SIMT_HALF1(H, sin, std::sin(x)) SIMT_HALF1(H, cos, std::cos(x)) SIMT_HALF1(H, tanh, std::tanh(x))          \
    SIMT_HALF1(H, tanh_approx, std::tanh(x))                                                                   \
    SIMT_HALF1(H, floor, std::floor(x)) SIMT_HALF1(H, ceil, std::ceil(x))                                      \
    SIMT_HALF1(H, trunc, std::trunc(x)) SIMT_HALF1(H, rint, std::nearbyint(x))                                 \
    SIMT_FMA(H, , x) SIMT_FMA(H, _relu, x < 0 ? 0.0 : x) SIMT_FMA(H, _sat, x > 0 ? (x < 1 ? x : 1.0) : 0.0)    \
    SIMT_INLINE H##2_ __hcmadd(H##2_ a, H##2_ b, H##2_ c) {  /* complex numbers */                             \
        H##2_ part = __hfma2(H##2_(a.x, a.x), b, c);                                                           \
        return H##2_(__hfma(H(-(float)a.y), b.y, part.x), __hfma(a.y, b.x, part.y));                           \
    }
using __half2_ = __half2;
using __nv_bfloat162_ = __nv_bfloat162;
SIMT_HALF(__half)
SIMT_HALF(__nv_bfloat16)
#undef SIMT_HALF
#undef SIMT_FMA
#undef SIMT_HALF1

#define SIMT_TO(H, h, To, name)                                                                       \
    SIMT_INLINE To __##h##2##name##_rn(H x) { return simt::to_integer<To>(std::nearbyint((float)x)); } \
    SIMT_INLINE To __##h##2##name##_rd(H x) { return simt::to_integer<To>(std::floor((float)x)); }     \
    SIMT_INLINE To __##h##2##name##_ru(H x) { return simt::to_integer<To>(std::ceil((float)x)); }
#define SIMT_TO_ALL(H, h)                                                                                        \
    SIMT_TO(H, h, int, int) SIMT_TO(H, h, unsigned, uint) SIMT_TO(H, h, long long, ll)                           \
    SIMT_TO(H, h, unsigned long long, ull) SIMT_TO(H, h, short, short) SIMT_TO(H, h, unsigned short, ushort)
SIMT_TO_ALL(__half, half)
SIMT_TO_ALL(__nv_bfloat16, bfloat16)
#undef SIMT_TO_ALL
#undef SIMT_TO
