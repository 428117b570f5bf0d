// Shifts by any number of bits, as PTX's shl and shr do them: beyond the width 0, or the sign. translate/shifts.py puts these
// operators where the compiler cannot tell that an amount is small enough: x << n becomes x << ::simt::shift << n, and
// x <<= n becomes x <<= ::simt::By() = n. Precedence and association stay as they are.
#pragma once

#include "language.h"

namespace simt {
struct Shift {};
constexpr Shift shift;
template <class T>
struct ToShift { T value; };
struct Amount { uint32_t bits; };  // 32 bits, whatever its type: a negative one is large
struct By {
    template <class N>
    SIMT_METHOD constexpr Amount operator=(N bits) const { return {(uint32_t)bits}; }
};
template <class T>
SIMT_METHOD constexpr T shifted_left(T value, uint32_t bits) {
    constexpr uint32_t width = 8 * sizeof(T);
    return bits < width ? value << (bits & (width - 1)) : 0;
}
template <class T>
SIMT_METHOD constexpr T shifted_right(T value, uint32_t bits) {
    constexpr uint32_t width = 8 * sizeof(T);
    return value >> (bits < width ? bits & (width - 1) : width - 1) >> (bits >= width);
}
template <class T>
SIMT_METHOD constexpr auto operator<<(T value, Shift) { return ToShift<decltype(+value)>{+value}; }
template <class T>
SIMT_METHOD constexpr auto operator>>(T value, Shift) { return ToShift<decltype(+value)>{+value}; }
template <class T, class N>
SIMT_METHOD constexpr T operator<<(ToShift<T> left, N bits) { return shifted_left(left.value, (uint32_t)bits); }
template <class T, class N>
SIMT_METHOD constexpr T operator>>(ToShift<T> left, N bits) { return shifted_right(left.value, (uint32_t)bits); }
template <class T>
SIMT_METHOD constexpr T& operator<<=(T& value, Amount amount) { return value = shifted_left(+value, amount.bits); }
template <class T>
SIMT_METHOD constexpr T& operator>>=(T& value, Amount amount) { return value = shifted_right(+value, amount.bits); }
}  // namespace simt
