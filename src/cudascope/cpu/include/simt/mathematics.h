// CUDA's mathematics: the functions that the C library lacks, or has under another name.
#pragma once

#include "language.h"

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
SIMT_MATH(float, fdividef, (float x, float y), x / y)
SIMT_INLINE void simt_sincosf(float x, float* s, float* c) { *s = std::sin(x), *c = std::cos(x); }

// sin(pi x) and the like: the rest of x after whole turns is exact.
#define SIMT_BOTH(name, ...) \
    SIMT_MATH(double, name, (double x), (__VA_ARGS__)) SIMT_MATH(float, name##f, (float x), (float)name((double)x))
SIMT_BOTH(sinpi, std::sin((x - 2 * std::nearbyint(x / 2)) * 3.14159265358979323846))
SIMT_BOTH(cospi, std::cos((x - 2 * std::nearbyint(x / 2)) * 3.14159265358979323846))
SIMT_BOTH(rcbrt, 1 / std::cbrt(x))
SIMT_BOTH(cyl_bessel_i0, std::cyl_bessel_i(0.0, std::fabs(x)))
SIMT_BOTH(cyl_bessel_i1, std::copysign(std::cyl_bessel_i(1.0, std::fabs(x)), x))
SIMT_INLINE void sincospi(double x, double* s, double* c) { *s = sinpi(x), *c = cospi(x); }
SIMT_INLINE void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }
SIMT_MATH(double, rhypot, (double x, double y), 1 / std::hypot(x, y))
SIMT_MATH(float, rhypotf, (float x, float y), 1 / std::hypot(x, y))
SIMT_MATH(double, norm3d, (double x, double y, double z), std::hypot(x, y, z))
SIMT_MATH(float, norm3df, (float x, float y, float z), std::hypot(x, y, z))
SIMT_MATH(double, rnorm3d, (double x, double y, double z), 1 / std::hypot(x, y, z))
SIMT_MATH(float, rnorm3df, (float x, float y, float z), 1 / std::hypot(x, y, z))
SIMT_MATH(double, norm4d, (double x, double y, double z, double w), std::hypot(std::hypot(x, y), std::hypot(z, w)))
SIMT_MATH(float, norm4df, (float x, float y, float z, float w), (float)norm4d(x, y, z, w))

// The error function's relatives, by Halley's iteration on erfc where a formula is lacking.
SIMT_INLINE double erfcinv(double y) {
    if (!(y >= 0 && y <= 2)) return NAN;
    if (y == 0 || y == 2) return y == 0 ? INFINITY : -INFINITY;
    double tail = y > 1 ? 2 - y : y, x = tail > 0.3 ? (1 - tail) * 0.886 : std::sqrt(-std::log(tail * 1.77));
    for (int i = 0; i < 6; ++i) {
        double step = (std::erfc(x) - tail) / (1.12837916709551257390 * std::exp(-x * x));
        x += step / (1 - x * step);
    }
    return y > 1 ? -x : x;
}
SIMT_INLINE double erfinv(double y) {
    if (!(std::fabs(y) < 0.5)) return std::copysign(erfcinv(1 - std::fabs(y)), y);
    double x = y * 0.886;
    for (int i = 0; i < 4; ++i) {
        double step = (std::erf(x) - y) / (1.12837916709551257390 * std::exp(-x * x));
        x -= step / (1 + x * step);
    }
    return x;
}
SIMT_INLINE double erfcx(double x) {  // exp(x^2) erfc(x)
    if (x < 10) {
        double square = x * x;
        return std::exp(square) * (1 + std::fma(x, x, -square)) * std::erfc(x);
    }
    double sum = 1, term = 1;
    for (int n = 1; n < 12; ++n) sum += term *= -(2 * n - 1) / (2 * x * x);
    return sum * 0.56418958354775628695 / x;
}
SIMT_MATH(float, erfcinvf, (float x), (float)erfcinv(x))
SIMT_MATH(float, erfinvf, (float x), (float)erfinv(x))
SIMT_MATH(float, erfcxf, (float x), (float)erfcx(x))
SIMT_BOTH(normcdf, 0.5 * std::erfc(-x * 0.70710678118654752440))
SIMT_BOTH(normcdfinv, -1.41421356237309504880 * erfcinv(2 * x))
#undef SIMT_BOTH
#undef SIMT_MATH
