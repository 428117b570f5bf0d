// PTX instructions that compute with floating-point numbers of any size, and those that take integers as well.
#pragma once

#include "ptx_integers.h"

namespace simt::ptx {

constexpr int mode_of(unsigned flags) {
    return flags & RZ ? FE_TOWARDZERO : flags & RM ? FE_DOWNWARD : flags & RP ? FE_UPWARD : FE_TONEAREST;
}
template <unsigned F, class T>
SIMT_INLINE T flushed(T x, T least = std::numeric_limits<T>::min()) {
    if constexpr (F & FTZ) return std::fabs(x) < least ? std::copysign((T)0, x) : x;
    else return x;
}
template <unsigned F, class T>
SIMT_INLINE T limited(T x) {  // .sat: to [0, 1], NaN to 0; .relu: to what is not negative, NaN stays
    if constexpr (F & SAT) return x > 0 ? (x < 1 ? x : (T)1) : (T)0;
    else if constexpr (F & RELU) return x < 0 ? (T)0 : x;
    else return x;
}

// op on numbers of type T: a pair each number for itself; a half in double, where sums and products are exact.
template <class T, unsigned F, class Op, class... A>
SIMT_INLINE T compute(Op op, A... a) {
    if constexpr (is_pair<T>) {
        using H = decltype(T{}.x);
        return T(compute<H, F>(op, H(a.x)...), compute<H, F>(op, H(a.y)...));
    } else if constexpr (is_half<T>) {
        constexpr double least = std::is_same_v<T, f16> ? 0x1p-14 : 0x1p-126;
        return T(flushed<F>(limited<F>(op(flushed<F>((double)(float)a, least)...)), least));
    } else {
        return limited<F>(flushed<F>(rounded<mode_of(F)>(op, flushed<F>(a)...)));
    }
}

template <class T, unsigned F, bool = (F & WIDE) != 0>
struct product_of { using type = T; };
template <class T, unsigned F>
struct product_of<T, F, true> { using type = wider<T>; };

template <class T, unsigned F = 0>
SIMT_INLINE T fma(T a, T b, T c) {
    constexpr bool in_double = is_half<T> || (is_pair<T> && !std::is_same_v<T, f32x2>);
    return compute<T, F>([](auto x, auto y, auto z) {
        if constexpr (in_double) return simt::odd_fma(x, y, z);
        else return std::fma(x, y, z);
    }, a, b, c);
}
#define SIMT_PTX_OF_NUMBERS(name, parameters, of_integers, numbers, of_numbers, ...)     \
    template <class T, unsigned F = 0>                                                   \
    SIMT_INLINE auto name parameters {                                                   \
        if constexpr (is_integer<T>) return of_integers;                                 \
        else return compute<T, F>([] numbers { return of_numbers; }, __VA_ARGS__);       \
    }
SIMT_PTX_OF_NUMBERS(add, (T a, T b), (sum<T, F>(a, b)), (auto x, auto y), x + y, a, b)
SIMT_PTX_OF_NUMBERS(sub, (T a, T b), (difference<T, F>(a, b)), (auto x, auto y), x - y, a, b)
SIMT_PTX_OF_NUMBERS(mul, (T a, T b), (product<T, F>(a, b)), (auto x, auto y), x * y, a, b)
SIMT_PTX_OF_NUMBERS(div, (T a, T b), (T)(a / b), (auto x, auto y), x / y, a, b)
SIMT_PTX_OF_NUMBERS(neg, (T a), (T)-(u64)a, (auto x), -x, a)
SIMT_PTX_OF_NUMBERS(abs, (T a), (a < 0 ? (T)-(u64)a : a), (auto x), std::fabs(x), a)
template <class T, unsigned F = 0>
SIMT_INLINE auto mad(T a, T b, typename product_of<T, F>::type c) {
    if constexpr (is_integer<T>) return sum<decltype(c), F & SAT>(product<T, F>(a, b), c);
    else return fma<T, F>(a, b, c);
}

// -0 < +0; the smaller of a number and NaN is the number, but with .NaN it is NaN; .xorsign.abs: of the magnitudes.
template <unsigned F, class T>
SIMT_INLINE T smaller(T x, T y) {
    if constexpr ((F & XORSIGN) != 0) {
        T least = smaller<F & ~XORSIGN>(std::fabs(x), std::fabs(y));
        return std::signbit(x) != std::signbit(y) ? -least : least;
    }
    if (std::isnan(x)) return F & NAN_WINS ? x : y;
    if (std::isnan(y)) return F & NAN_WINS ? y : x;
    return x < y || (x == y && std::signbit(x)) ? x : y;
}
SIMT_PTX_OF_NUMBERS(min, (T a, T b), limited<F>(a < b ? a : b), (auto x, auto y), smaller<F>(x, y), a, b)
#undef SIMT_PTX_OF_NUMBERS
template <class T, unsigned F = 0>
SIMT_INLINE T max(T a, T b) {
    if constexpr (is_integer<T>) return limited<F>(a > b ? a : b);
    else if constexpr (F & XORSIGN)
        return compute<T, F>([](auto x, auto y) {
            auto most = -smaller<F & ~XORSIGN>(-std::fabs(x), -std::fabs(y));
            return std::signbit(x) != std::signbit(y) ? -most : most;
        }, a, b);
    else return compute<T, F>([](auto x, auto y) { return -smaller<F>(-x, -y); }, a, b);
}

// Pairs of 16-bit integers, each number for itself.
template <class T, unsigned F = 0>
SIMT_INLINE T addx2(T a, T b) { return {add(a.x, b.x), add(a.y, b.y)}; }
template <class T, unsigned F = 0>
SIMT_INLINE T minx2(T a, T b) { return {min<decltype(a.x), F>(a.x, b.x), min<decltype(a.x), F>(a.y, b.y)}; }
template <class T, unsigned F = 0>
SIMT_INLINE T maxx2(T a, T b) { return {max<decltype(a.x), F>(a.x, b.x), max<decltype(a.x), F>(a.y, b.y)}; }

template <class T, unsigned F = 0>
SIMT_INLINE T min3(T a, T b, T c) { return min<T, F>(min<T, F>(a, b), c); }
template <class T, unsigned F = 0>
SIMT_INLINE T max3(T a, T b, T c) { return max<T, F>(max<T, F>(a, b), c); }

#define SIMT_PTX_OF_ONE(name, expression) \
    template <class T, unsigned F = 0>    \
    SIMT_INLINE T name(T a) { return compute<T, F>([](auto x) { return expression; }, a); }
SIMT_PTX_OF_ONE(sqrt, std::sqrt(x))
SIMT_PTX_OF_ONE(rcp, 1 / x)
SIMT_PTX_OF_ONE(rsqrt, 1 / std::sqrt(x))
SIMT_PTX_OF_ONE(sin, std::sin(x))
SIMT_PTX_OF_ONE(cos, std::cos(x))
SIMT_PTX_OF_ONE(lg2, std::log2(x))
SIMT_PTX_OF_ONE(ex2, std::exp2(x))
SIMT_PTX_OF_ONE(tanh, std::tanh(x))
#undef SIMT_PTX_OF_ONE
template <class T, unsigned F = 0>
SIMT_INLINE T copysign(T sign, T a) { return std::copysign(a, sign); }

enum class Compare { eq, ne, lt, le, gt, ge, lo, ls, hi, hs, equ, neu, ltu, leu, gtu, geu, num, nan };

template <Compare C, class T>
SIMT_INLINE bool holds(T a, T b) {
    switch (C) {
        case Compare::eq: case Compare::equ: return a == b;
        case Compare::ne: case Compare::neu: return a != b;
        case Compare::lt: case Compare::ltu: case Compare::lo: return a < b;
        case Compare::le: case Compare::leu: case Compare::ls: return a <= b;
        case Compare::gt: case Compare::gtu: case Compare::hi: return a > b;
        case Compare::ge: case Compare::geu: case Compare::hs: return a >= b;
        default: return C == Compare::num;
    }
}
struct Truths { bool x, y; };  // of a pair
template <Compare C, class T, unsigned F = 0>
SIMT_INLINE auto compare(T a, T b) {
    if constexpr (is_pair<T>) {
        using H = decltype(T{}.x);
        return Truths{compare<C, H, F>(a.x, b.x), compare<C, H, F>(a.y, b.y)};
    } else if constexpr (std::is_same_v<T, bool>) {
        return holds<C>(a, b);
    } else if constexpr (is_integer<T>) {
        if constexpr (C >= Compare::lo && C <= Compare::hs) return holds<C, std::make_unsigned_t<T>>(a, b);
        else return holds<C>(a, b);
    } else if constexpr (is_half<T>) {
        constexpr float least = std::is_same_v<T, f16> ? 0x1p-14f : 0x1p-126f;
        return compare<C, float>(flushed<F>((float)a, least), flushed<F>((float)b, least));
    } else {
        if (std::isnan(a) || std::isnan(b)) return C >= Compare::equ && C != Compare::num;
        return C != Compare::nan && holds<C>(flushed<F>(a), flushed<F>(b));
    }
}
template <class D>
SIMT_INLINE D truth(bool holds) {
    if constexpr (is_integer<D>) return holds ? (D)-1 : (D)0;
    else return D(holds ? 1.0f : 0.0f);
}
struct Itself {
    SIMT_METHOD bool operator()(bool holds) const { return holds; }
};
// `combine` makes of an answer the one that counts. Two answers of 16 bits fill an integer of 32 bits.
template <Compare C, class D, class T, unsigned F = 0, class Combine>
SIMT_INLINE D set(T a, T b, Combine combine) {
    if constexpr (is_pair<T>) {
        Truths holds = compare<C, T, F>(a, b);
        bool x = combine(holds.x), y = combine(holds.y);
        if constexpr (is_pair<D>) {
            using H = decltype(D{}.x);
            return D(truth<H>(x), truth<H>(y));
        } else return (D)(truth<u16>(x) | (u32)truth<u16>(y) << 16);
    } else return truth<D>(combine(compare<C, T, F>(a, b)));
}
#define SIMT_PTX_TEST(property, expression) \
    template <class T>                      \
    SIMT_INLINE bool is_##property(T x) { return expression; }
SIMT_PTX_TEST(finite, std::isfinite(x))
SIMT_PTX_TEST(infinite, std::isinf(x))
SIMT_PTX_TEST(number, !std::isnan(x))
SIMT_PTX_TEST(notanumber, std::isnan(x))
SIMT_PTX_TEST(normal, std::isnormal(x) || x == 0)
SIMT_PTX_TEST(subnormal, std::fpclassify(x) == FP_SUBNORMAL)
#undef SIMT_PTX_TEST
template <class T, unsigned F = 0>
SIMT_INLINE T selp(T a, T b, bool first) { return first ? a : b; }
template <class T, class S, unsigned F = 0>
SIMT_INLINE T slct(T a, T b, S c) { return flushed<F>(c) >= 0 ? a : b; }

template <class H, unsigned F>
SIMT_INLINE H narrow(float x) {
    x = limited<F>(flushed<F>(x));
    if constexpr (F & SATFINITE) {
        constexpr float most = std::is_same_v<H, f16> ? 65504.0f : 0x1.fep127f;
        x = x > most ? most : x < -most ? -most : x;
    }
    if constexpr (std::is_same_v<H, f16>)
        return F & RZ ? __float2half_rz(x) : F & RM ? __float2half_rd(x)
            : F & RP ? __float2half_ru(x) : __float2half_rn(x);
    else
        return F & RZ ? __float2bfloat16_rz(x) : F & RM ? __float2bfloat16_rd(x)
            : F & RP ? __float2bfloat16_ru(x) : __float2bfloat16_rn(x);
}
template <unsigned F, class T>
SIMT_INLINE T to_integral(T x) {
    if constexpr (is_integer<T>) return x;
    else if constexpr (F & RZI) return std::trunc(x);
    else if constexpr (F & RMI) return std::floor(x);
    else if constexpr (F & RPI) return std::ceil(x);
    else return F & RNI ? std::nearbyint(x) : x;
}
template <unsigned F>
SIMT_INLINE tf32 to_tf32(float x) {  // 10 bits of mantissa
    u32 bits = cast_bits<u32>(limited<F>(x));
    if (std::isnan(x)) return {cast_bits<float>(0x7fffffffu)};
    if (std::isfinite(x)) bits += F & RNA ? 0x1000 : F & RN ? 0xfff + (bits >> 13 & 1) : 0;
    if ((F & SATFINITE) && (bits & 0x7fffffff) >= 0x7f800000) bits = (bits & 0x80000000) | 0x7f7fe000;
    return {cast_bits<float>(bits & ~0x1fffu)};
}
// A number of any type as a float that a half is rounded from.
template <class T>
SIMT_INLINE float odd_float(T x) {
    double nearest = (double)x;
    if constexpr (is_integer<T> && sizeof(T) == 8) nearest = simt::to_odd(nearest, (double)((__int128)x - (__int128)nearest));
    return simt::to_odd_float(nearest);
}

// A kernel has many of these conversions, and each is long: inlined, they would take minutes to compile.
template <class From>
inline SIMT_NOINLINE __half2 of_fp8(From a) { return __half2(__nv_cvt_fp8x2_to_halfraw2(a.bits, From::kind)); }
template <class To>
inline SIMT_NOINLINE To to_fp8(float low, float high) {
    return {__nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, To::kind)};
}

// Two numbers into one register: the first becomes the upper half.
template <class To, class From, unsigned F = 0>
SIMT_INLINE To cvt(From high, From low) {
    if constexpr (is_pair<To>) {
        using H = decltype(To{}.x);
        return To(narrow<H, F>(low), narrow<H, F>(high));
    } else {
        return to_fp8<To>(limited<F>(low), limited<F>(high));
    }
}
template <class To, class From, unsigned F = 0>
SIMT_INLINE To cvt(From a) {
    if constexpr (is_pair<From>) return cvt<To, float, F>((float)a.y, (float)a.x);
    else if constexpr (is_pair<To> && F & RELU) return compute<To, RELU>([](auto x) { return x; }, of_fp8(a));
    else if constexpr (is_pair<To>) return of_fp8(a);
    else if constexpr (is_half<From> && !is_half<To>) return cvt<To, float, F>((float)a);
    else if constexpr (is_integer<From> && is_integer<To>) {
        if constexpr (F & SAT) return saturated<To>((__int128)a);
        else return (To)a;
    } else if constexpr (is_integer<To>) return to_integer<To>(to_integral<F>(flushed<F>(a)));
    else if constexpr (std::is_same_v<To, tf32>) return to_tf32<F>(a);
    else if constexpr (is_half<To>) {
        if constexpr (std::is_same_v<From, To>) return To(limited<F>(to_integral<F>((float)a)));
        else if constexpr (is_half<From>) return narrow<To, F>((float)a);
        else if constexpr (std::is_same_v<From, float>) return narrow<To, F>(a);
        else return narrow<To, F>(odd_float(a));
    } else {
        auto narrowed = [](auto x) { return (To)x; };
        return limited<F>(flushed<F>(rounded<mode_of(F)>(narrowed, to_integral<F>(flushed<F>(a)))));
    }
}
template <class To, class From, unsigned F = 0>
SIMT_INLINE u32 cvt_pack(From high, From low, u32 above) {
    constexpr int bits = 8 * sizeof(To);
    u32 both = ((u32)saturated<To>(high) & ((1u << bits) - 1)) << bits | ((u32)saturated<To>(low) & ((1u << bits) - 1));
    return bits == 16 ? both : both | above << 2 * bits;
}
}  // namespace simt::ptx
