// Integers bit by bit, and the products that C++ has no operator for.
#pragma once

#include "language.h"

#define SIMT_FUNCTION(T, name, parameters, ...) \
    SIMT_INLINE T name parameters { return (T)(__VA_ARGS__); }

SIMT_FUNCTION(int, __popc, (unsigned x), __builtin_popcount(x))
SIMT_FUNCTION(int, __popcll, (unsigned long long x), __builtin_popcountll(x))
SIMT_FUNCTION(int, __clz, (unsigned x), x ? __builtin_clz(x) : 32)
SIMT_FUNCTION(int, __clzll, (unsigned long long x), x ? __builtin_clzll(x) : 64)
SIMT_FUNCTION(int, __ffs, (unsigned x), __builtin_ffs((int)x))
SIMT_FUNCTION(int, __ffsll, (unsigned long long x), __builtin_ffsll((long long)x))
SIMT_INLINE unsigned __brev(unsigned x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
}
SIMT_FUNCTION(unsigned long long, __brevll, (unsigned long long x),
    (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32)))
SIMT_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
// The place of the n-th bit that is set, from `start` on upwards (n > 0) or downwards (n < 0); ~0: there is none.
SIMT_INLINE unsigned __fns(unsigned mask, unsigned start, int n) {
    if (n == 0) return mask >> start & 1 ? start : ~0u;
    int step = n > 0 ? 1 : -1;
    for (int place = (int)start; place >= 0 && place < 32; place += step)
        if (mask >> place & 1 && (n -= step) == 0) return (unsigned)place;
    return ~0u;
}

SIMT_FUNCTION(unsigned, __funnelshift_l, (unsigned low, unsigned high, unsigned n),
    ((uint64_t)high << 32 | low) << (n & 31) >> 32)
SIMT_FUNCTION(unsigned, __funnelshift_r, (unsigned low, unsigned high, unsigned n),
    ((uint64_t)high << 32 | low) >> (n & 31))
SIMT_FUNCTION(unsigned, __funnelshift_lc, (unsigned low, unsigned high, unsigned n),
    n < 32 ? __funnelshift_l(low, high, n) : low)
SIMT_FUNCTION(unsigned, __funnelshift_rc, (unsigned low, unsigned high, unsigned n),
    n < 32 ? __funnelshift_r(low, high, n) : high)

namespace simt {
SIMT_FUNCTION(int64_t, product24, (int x, int y), (int64_t)(x << 8 >> 8) * (y << 8 >> 8))
SIMT_FUNCTION(uint64_t, product24, (unsigned x, unsigned y), (uint64_t)(x & 0xffffff) * (y & 0xffffff))

template <bool is_signed>
SIMT_INLINE int lane_of(unsigned x, int bytes, int i) {  // the i-th part of a word
    int shift = 32 - 8 * bytes, up = shift - 8 * bytes * i;
    return is_signed ? (int)(x << up) >> shift : (int)(x << up >> shift);
}
template <bool a_signed, bool b_signed>
SIMT_INLINE unsigned dot4(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 4; ++i) sum += (unsigned)(lane_of<a_signed>(a, 1, i) * lane_of<b_signed>(b, 1, i));
    return sum;
}
template <bool a_signed, bool b_signed>
SIMT_INLINE unsigned dot2(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 2; ++i) sum += (unsigned)(lane_of<a_signed>(a, 2, i) * lane_of<b_signed>(b, 1, i));
    return sum;
}
SIMT_INLINE unsigned word(short2 v) { return (unsigned short)v.x | (unsigned)(unsigned short)v.y << 16; }
SIMT_INLINE unsigned word(ushort2 v) { return v.x | (unsigned)v.y << 16; }
template <class Four>
SIMT_INLINE unsigned word(Four v) {
    return (uint8_t)v.x | (uint8_t)v.y << 8 | (uint8_t)v.z << 16 | (unsigned)(uint8_t)v.w << 24;
}
}  // namespace simt

#define SIMT_LESSER(T, prefix)                                   \
    SIMT_FUNCTION(T, prefix##min, (T x, T y), x < y ? x : y) \
    SIMT_FUNCTION(T, prefix##max, (T x, T y), x < y ? y : x)
SIMT_LESSER(unsigned, u) SIMT_LESSER(long long, ll) SIMT_LESSER(unsigned long long, ull)
#undef SIMT_LESSER

SIMT_FUNCTION(int, __mul24, (int x, int y), simt::product24(x, y))
SIMT_FUNCTION(unsigned, __umul24, (unsigned x, unsigned y), simt::product24(x, y))
SIMT_FUNCTION(int, __mulhi, (int x, int y), (long long)x * y >> 32)
SIMT_FUNCTION(unsigned, __umulhi, (unsigned x, unsigned y), (unsigned long long)x * y >> 32)
SIMT_FUNCTION(long long, __mul64hi, (long long x, long long y), (__int128)x * y >> 64)
SIMT_FUNCTION(unsigned long long, __umul64hi, (unsigned long long x, unsigned long long y),
    (unsigned __int128)x * y >> 64)
SIMT_FUNCTION(int, __dp4a, (int x, int y, int sum), simt::dot4<true, true>(x, y, sum))
SIMT_FUNCTION(unsigned, __dp4a, (unsigned x, unsigned y, unsigned sum), simt::dot4<false, false>(x, y, sum))
SIMT_FUNCTION(int, __dp4a, (char4 x, char4 y, int sum), __dp4a((int)simt::word(x), (int)simt::word(y), sum))
SIMT_FUNCTION(unsigned, __dp4a, (uchar4 x, uchar4 y, unsigned sum), __dp4a(simt::word(x), simt::word(y), sum))
SIMT_FUNCTION(int, __dp2a_lo, (int x, int y, int sum), simt::dot2<true, true>(x, y, sum))
SIMT_FUNCTION(int, __dp2a_hi, (int x, int y, int sum), simt::dot2<true, true>(x, y >> 16, sum))
SIMT_FUNCTION(unsigned, __dp2a_lo, (unsigned x, unsigned y, unsigned sum), simt::dot2<false, false>(x, y, sum))
SIMT_FUNCTION(unsigned, __dp2a_hi, (unsigned x, unsigned y, unsigned sum), simt::dot2<false, false>(x, y >> 16, sum))
SIMT_FUNCTION(int, __dp2a_lo, (short2 x, char4 y, int sum), __dp2a_lo((int)simt::word(x), (int)simt::word(y), sum))
SIMT_FUNCTION(int, __dp2a_hi, (short2 x, char4 y, int sum), __dp2a_hi((int)simt::word(x), (int)simt::word(y), sum))
SIMT_FUNCTION(unsigned, __dp2a_lo, (ushort2 x, uchar4 y, unsigned sum), __dp2a_lo(simt::word(x), simt::word(y), sum))
SIMT_FUNCTION(unsigned, __dp2a_hi, (ushort2 x, uchar4 y, unsigned sum), __dp2a_hi(simt::word(x), simt::word(y), sum))

SIMT_FUNCTION(unsigned, __sad, (int x, int y, unsigned sum), sum + (x < y ? (unsigned)y - x : (unsigned)x - y))
SIMT_FUNCTION(unsigned, __usad, (unsigned x, unsigned y, unsigned sum), sum + (x < y ? y - x : x - y))
SIMT_FUNCTION(int, __hadd, (int x, int y), ((long long)x + y) >> 1)
SIMT_FUNCTION(int, __rhadd, (int x, int y), ((long long)x + y + 1) >> 1)
SIMT_FUNCTION(unsigned, __uhadd, (unsigned x, unsigned y), ((unsigned long long)x + y) >> 1)
SIMT_FUNCTION(unsigned, __urhadd, (unsigned x, unsigned y), ((unsigned long long)x + y + 1) >> 1)
