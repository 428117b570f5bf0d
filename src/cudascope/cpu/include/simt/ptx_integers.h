// PTX instructions on integers and bits.
#pragma once

#include "integers.h"
#include "ptx_operands.h"

namespace simt::ptx {

template <class T> struct wider_of;
template <> struct wider_of<u16> { using type = u32; };
template <> struct wider_of<s16> { using type = s32; };
template <> struct wider_of<u32> { using type = u64; };
template <> struct wider_of<s32> { using type = s64; };
template <> struct wider_of<u64> { using type = unsigned __int128; };
template <> struct wider_of<s64> { using type = __int128; };
template <class T>
using wider = typename wider_of<T>::type;

template <class To, class From>
SIMT_INLINE To saturated(From value) {
    constexpr From lowest = std::numeric_limits<To>::lowest(), highest = std::numeric_limits<To>::max();
    return value < lowest ? (To)lowest : value > highest ? (To)highest : (To)value;
}

// Sums and products wrap, which C++ allows unsigned numbers only.
template <class T, unsigned F>
SIMT_INLINE T sum(T a, T b) {
    if constexpr (F & SAT) return saturated<T>((wider<T>)a + (wider<T>)b);
    else return (T)((u64)a + (u64)b);
}
template <class T, unsigned F>
SIMT_INLINE T difference(T a, T b) {
    if constexpr (F & SAT) return saturated<T>((wider<T>)a - (wider<T>)b);
    else return (T)((u64)a - (u64)b);
}
template <class T, unsigned F>
SIMT_INLINE auto product(T a, T b) {
    if constexpr (F & WIDE) return (wider<T>)a * (wider<T>)b;
    else if constexpr (F & HI) return (T)((wider<T>)a * (wider<T>)b >> 8 * sizeof(T));
    else return (T)((u64)a * (u64)b);
}

// a + b + in, and what goes beyond the type's bits; a - b - in, and whether it borrowed.
template <class T, unsigned F, bool in>
SIMT_INLINE T add_with_carry(T a, T b) {
    using U = std::make_unsigned_t<T>;
    unsigned __int128 total = (unsigned __int128)(U)a + (U)b + (in && simt_carry());
    if (F & CC) simt_keep_carry(total >> 8 * sizeof(T));
    return (T)total;
}
template <class T, unsigned F, bool in>
SIMT_INLINE T sub_with_carry(T a, T b) {
    using U = std::make_unsigned_t<T>;
    unsigned __int128 total = (unsigned __int128)(U)a - (U)b - (in && simt_carry());
    if (F & CC) simt_keep_carry(total >> 8 * sizeof(T) & 1);
    return (T)total;
}
template <class T, unsigned F, bool in>
SIMT_INLINE T mad_with_carry(T a, T b, T c) { return add_with_carry<T, F, in>(product<T, F>(a, b), c); }

#define SIMT_PTX_OF(name, parameters, expression) \
    template <class T, unsigned F = 0>            \
    SIMT_INLINE auto name parameters { return expression; }
SIMT_PTX_OF(rem, (T a, T b), (T)(a % b))
SIMT_PTX_OF(and_, (T a, T b), (T)(a & b))
SIMT_PTX_OF(or_, (T a, T b), (T)(a | b))
SIMT_PTX_OF(xor_, (T a, T b), (T)(a ^ b))
SIMT_PTX_OF(cnot, (T a), (T)(a == 0))
SIMT_PTX_OF(not_, (T a), (std::is_same_v<T, pred> ? (T)!a : (T)~a))
SIMT_PTX_OF(shl, (T a, u32 n), (T)(n < 8 * sizeof(T) ? (u64)a << n : 0))
SIMT_PTX_OF(shr, (T a, u32 n), (T)(n < 8 * sizeof(T) ? a >> n : a < 0 ? -1 : 0))
SIMT_PTX_OF(sad, (T a, T b, T c), (T)((u64)c + (u64)(a < b ? b - a : a - b)))
SIMT_PTX_OF(popc, (T a), (u32)__builtin_popcountll(a))
SIMT_PTX_OF(clz, (T a), (u32)(a ? __builtin_clzll(a) - (64 - 8 * sizeof(T)) : 8 * sizeof(T)))
SIMT_PTX_OF(brev, (T a), (T)(__brevll(a) >> (64 - 8 * sizeof(T))))
SIMT_PTX_OF(fns, (T mask, u32 base, u32 offset), __fns(mask, base, (int)offset))
SIMT_PTX_OF(mul24, (T a, T b), (T)(F & HI ? simt::product24(a, b) >> 16 : simt::product24(a, b)))
SIMT_PTX_OF(mad24, (T a, T b, T c), (T)((u64)(mul24<T, F>(a, b)) + (u64)c))
#undef SIMT_PTX_OF

// The place of the highest bit that differs from the sign; how far to shift it to the top.
template <class T, unsigned F>
SIMT_INLINE u32 bfind(T a) {
    u64 value = (u64)(a < 0 ? ~a : a);
    if (!value) return ~0u;
    u32 place = 63 - __builtin_clzll(value);
    return F & SHIFTAMT ? 8 * sizeof(T) - 1 - place : place;
}
template <class T, unsigned F = 0>
SIMT_INLINE T bfe(T a, u32 start, u32 length) {
    constexpr u32 bits = 8 * sizeof(T);
    start &= 0xff, length &= 0xff;
    bool negative = std::is_signed_v<T> && length && a >> std::min(start + length - 1, bits - 1) & 1;
    u32 there = start < bits ? std::min(length, bits - start) : 0;
    u64 mask = there == 64 ? ~0ull : (1ull << there) - 1;
    u64 field = there ? (u64)a >> start & mask : 0;
    return (T)(negative ? field | ~mask : field);
}
template <class T, unsigned F = 0>
SIMT_INLINE T bfi(T a, T b, u32 start, u32 length) {
    constexpr u32 bits = 8 * sizeof(T);
    start &= 0xff, length &= 0xff;
    if (start >= bits || !length) return b;
    u64 mask = (length >= 64 ? ~0ull : (1ull << length) - 1) << start;
    return (T)(((u64)a << start & mask) | ((u64)b & ~mask));
}
template <class T, unsigned F>
SIMT_INLINE u32 shf_l(u32 low, u32 high, u32 n) {
    n = F & CLAMP ? std::min(n, 32u) : n & 31;
    return (u32)(((u64)high << 32 | low) << n >> 32);
}
template <class T, unsigned F>
SIMT_INLINE u32 shf_r(u32 low, u32 high, u32 n) {
    n = F & CLAMP ? std::min(n, 32u) : n & 31;
    return (u32)(((u64)high << 32 | low) >> n);
}
template <class T, unsigned F = 0>
SIMT_INLINE T lop3(T a, T b, T c, u32 table) {
    T out = 0;
    for (u32 row = 0; row < 8; ++row)
        if (table >> row & 1) out |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    return out;
}

enum Permutation { ANY, F4E, B4E, RC8, ECL, ECR, RC16 };
template <Permutation mode>
SIMT_INLINE u32 prmt(u32 a, u32 b, u32 selector) {  // a nibble names a byte of b:a; its highest bit: that byte's sign
    u32 out = 0, n = selector & 3;
    for (u32 i = 0; i < 4; ++i) {
        u32 pick = mode == ANY ? selector >> 4 * i & 15
            : mode == F4E ? n + i : mode == B4E ? (n + 8 - i) % 8 : mode == RC8 ? n
            : mode == ECL ? std::max(i, n) : mode == ECR ? std::min(i, n) : 2 * (n & 1) + (i & 1);
        u32 byte = (u32)(((u64)b << 32 | a) >> 8 * (pick & 7) & 0xff);
        if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= byte << 8 * i;
    }
    return out;
}
template <class A, class B, unsigned F = 0>
SIMT_INLINE u32 dp4a(u32 a, u32 b, u32 sum) { return simt::dot4<std::is_signed_v<A>, std::is_signed_v<B>>(a, b, sum); }
template <class A, class B, unsigned F>
SIMT_INLINE u32 dp2a(u32 a, u32 b, u32 sum) {
    return simt::dot2<std::is_signed_v<A>, std::is_signed_v<B>>(a, F & HI ? b >> 16 : b, sum);
}
}  // namespace simt::ptx
