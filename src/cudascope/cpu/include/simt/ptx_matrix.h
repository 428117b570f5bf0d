// PTX instructions on matrices that the lanes of a warp hold together: mma, ldmatrix, stmatrix, movmatrix.
//
// Products are exact; they are added in order of k, starting from c, in float32 (doubles and integers: in their own type).
#pragma once

#include "ptx_floats.h"

namespace simt::ptx {

template <int bits, bool is_signed>
struct narrow_integer {};
using s4 = narrow_integer<4, true>; using u4 = narrow_integer<4, false>;
struct e4m3 {};
struct e5m2 {};

template <class T> constexpr int bits_of = 8 * sizeof(T);
template <> constexpr int bits_of<e4m3> = 8;
template <> constexpr int bits_of<e5m2> = 8;
template <> constexpr int bits_of<s4> = 4;
template <> constexpr int bits_of<u4> = 4;

template <class T>
using sum_of = std::conditional_t<std::is_same_v<T, f64>, f64, std::conditional_t<std::is_integral_v<T>, s64, float>>;

// Element i of a fragment, as a number.
template <class T, class R>
SIMT_INLINE auto element(const R* fragment, int i) {
    if constexpr (bits_of<T> == 4) {
        u32 nibble = fragment[i / 8] >> 4 * (i % 8) & 15;
        return (s64)(std::is_same_v<T, s4> && nibble > 7 ? (int)nibble - 16 : (int)nibble);
    } else if constexpr (std::is_same_v<T, e4m3> || std::is_same_v<T, e5m2>) {
        auto kind = std::is_same_v<T, e4m3> ? __NV_E4M3 : __NV_E5M2;
        return (float)f16(__nv_cvt_fp8_to_halfraw(((const u8*)fragment)[i], kind));
    } else if constexpr (std::is_same_v<T, tf32>) {
        return cast_bits<float>(fragment[i] & ~0x1fffu);
    } else {
        return (sum_of<T>)((const T*)fragment)[i];
    }
}

template <class R>
struct Product { const R *a, *b, *c; R* d; };

struct Place { int row, column; };
// Where in A, in B, in C and D element i of a lane of mma is, if `in_register` elements of A and B go to a register.
template <int m, int in_register>
struct InRegisters {
    SIMT_UNSEEN static Place in_a(int lane, int i) {
        int r = i / in_register, down = m == 16 ? r % 2 : 0, right = m == 16 ? r / 2 : r;
        return {lane / 4 + 8 * down, in_register * (lane % 4 + 4 * right) + i % in_register};
    }
    SIMT_UNSEEN static Place in_b(int lane, int i) {
        return {in_register * (lane % 4 + 4 * (i / in_register)) + i % in_register, lane / 4};
    }
    SIMT_UNSEEN static Place in_c(int lane, int i) { return {lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2}; }
};

template <class At, int m, int n, int k, class D, class A, class B, class C, unsigned F, class R>
SIMT_UNSEEN void multiply(void** lanes) {
    using Sum = sum_of<D>;
    Sum a[m][k], b[k][n];  // of the fiber: the clock may stop it here, and start the product of another warp
    for (int lane = 0; lane < 32; ++lane) {
        const Product<R>& own = *(const Product<R>*)lanes[lane];
        for (int i = 0; i < m * k / 32; ++i) {
            auto [row, column] = At::in_a(lane, i);
            a[row][column] = (Sum)element<A>(own.a, i);
        }
        for (int i = 0; i < k * n / 32; ++i) {
            auto [row, column] = At::in_b(lane, i);
            b[row][column] = (Sum)element<B>(own.b, i);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const Product<R>& own = *(const Product<R>*)lanes[lane];
        for (int i = 0; i < m * n / 32; ++i) {
            auto [row, column] = At::in_c(lane, i);
            Sum sum = (Sum)element<C>(own.c, i);
            for (int l = 0; l < k; ++l) sum += a[row][l] * b[l][column];
            if constexpr (F & SATFINITE) ((D*)own.d)[i] = saturated<D>(sum);
            else ((D*)own.d)[i] = (D)sum;
        }
    }
}

template <int m, int n, int k, class D, class A, class B, class C, unsigned F, class R, int a, int b, int c,
          class At = InRegisters<m, 8 * sizeof(R) / bits_of<A>>>
SIMT_INLINE auto mma(Vector<R, a> x, Vector<R, b> y, Vector<R, c> z, int line = __builtin_LINE()) {
    Vector<R, m * n * sizeof(D) / sizeof(R) / 32> out;
    Product<R> product{x.x, y.x, z.x, out.x};
    simt_meet(simt::PRODUCT, ~0u, &product, multiply<At, m, n, k, D, A, B, C, F, R>, line);
    return out;
}

// Lane 8 i + r brings the address of row r of matrix i; lane 4 r + w holds the two elements from 2 w of row r.
// Transposed, rows are columns.
template <int count>
struct Matrices {
    Vector<u16, 8> row;  // that this lane loads or stores
    Vector<u32, count> held;
};
struct Corner { int lane, half; };  // who holds an element, and in which half of its register
SIMT_INLINE Corner holder(int row, int column, bool transposed) {
    return transposed ? Corner{4 * column + row / 2, row % 2} : Corner{4 * row + column / 2, column % 2};
}

template <int count, bool transposed, bool is_load>
SIMT_UNSEEN void distribute(void** lanes) {
    using M = Matrices<count>;
    for (int source = 0; source < 8 * count; ++source)
        for (int column = 0; column < 8; ++column) {
            auto [lane, half] = holder(source % 8, column, transposed);
            u16& in_row = ((M*)lanes[source])->row.x[column];
            u16& in_register = ((u16*)&((M*)lanes[lane])->held.x[source / 8])[half];
            if (is_load) in_register = in_row;
            else in_row = in_register;
        }
}
template <int count, bool transposed>
SIMT_INLINE Vector<u32, count> ldmatrix(const char* address, int line = __builtin_LINE()) {
    Matrices<count> own;
    if (simt_lane() < 8 * count) own.row = read<Vector<u16, 8>>(address);
    simt_meet(simt::MATRIX, ~0u, &own, distribute<count, transposed, true>, line);
    return own.held;
}
template <int count, bool transposed>
SIMT_INLINE void stmatrix(char* address, Vector<u32, count> held, int line = __builtin_LINE()) {
    Matrices<count> own{{}, held};
    simt_meet(simt::MATRIX, ~0u, &own, distribute<count, transposed, false>, line);
    if (simt_lane() < 8 * count) write<Vector<u16, 8>>(address, own.row);
}

struct Transposition { u32 in, out; };
SIMT_UNSEEN inline void transpose(void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 2; ++i) {
            auto [source, half] = holder(lane / 4, lane % 4 * 2 + i, true);
            ((u16*)&((Transposition*)lanes[lane])->out)[i] = ((u16*)&((Transposition*)lanes[source])->in)[half];
        }
}
SIMT_INLINE u32 movmatrix(u32 value, int line = __builtin_LINE()) {
    Transposition own{value, 0};
    simt_meet(simt::MATRIX, ~0u, &own, transpose, line);
    return own.out;
}
}  // namespace simt::ptx
