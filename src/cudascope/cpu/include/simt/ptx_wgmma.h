// Asynchronous products (PTX: wgmma). Four warps multiply A [64, K] by B [K, N], where K elements are 32 bytes.
//
// Warp w computes the rows from 16 (w % 4) on. Its lanes hold A, if A is in registers, and the results as those of an
// mma.m16n8 do, N / 8 times. A descriptor says where in shared memory a matrix lies: PTX ISA 9.0, section 9.7.15.5.1.
#pragma once

#include "ptx_matrix.h"

namespace simt::ptx {

// The address of the 16 bytes that hold element k of row (A) or column (B) `mn`.
struct Operand {
    u64 descriptor;
    bool transposed;  // elements of one k are neighbours, not those of one row or column

    SIMT_METHOD u32 field(int bit) const { return (u32)(descriptor >> bit & 0x3fff) << 4; }
    // k counts 16 bytes if not transposed: there are two. If transposed, mn counts 16 bytes.
    SIMT_METHOD const char* at(u32 mn, u32 k) const {
        u32 lead = field(16), stride = field(32), mode = (u32)(descriptor >> 62), place;
        u32 width = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16, pieces = width / 16;
        if (transposed) {
            place = mode ? mn / pieces * lead + k / 8 * stride + k % 8 * width + mn % pieces * 16
                         : mn * stride + k / 8 * lead + k % 8 * 16;
        } else {
            place = mode ? mn / 8 * stride + mn % 8 * width + k * 16 : mn / 8 * stride + k * lead + mn % 8 * 16;
        }
        place += field(0);
        return shared_address(place ^ (place >> 7 & (pieces - 1)) << 4, 0);
    }
    // Piece i of `count` rows or columns from `first` on, eight neighbours after another as the hardware reads them.
    SIMT_METHOD const char* piece(u32 first, u32 i) const {
        return transposed ? at(first / 8 + i / 16, i % 16) : at(first + i / 16 * 8 + i % 8, i / 8 % 2);
    }
};

template <class T, int rows>
SIMT_INLINE void read_matrix(sum_of<T> (*to)[32 * 8 / bits_of<T>], Operand from, u32 first) {
    constexpr int in_piece = 128 / bits_of<T>;
    u32 piece[4];
    if (from.transposed) {
        for (u32 i = 0; i < rows / 8; ++i)
            for (u32 k = 0; k < 16; ++k) {
                __builtin_memcpy(piece, from.at(first / 8 + i, k), 16);
                for (int e = 0; e < in_piece; ++e) to[8 * i + e][k] = element<T>(piece, e);
            }
    } else {
        for (u32 row = 0; row < rows; ++row)
            for (u32 half = 0; half < 2; ++half) {
                __builtin_memcpy(piece, from.at(first + row, half), 16);
                for (int e = 0; e < in_piece; ++e) to[row][half * in_piece + e] = element<T>(piece, e);
            }
    }
}

template <int n, class D, class T, class U>
SIMT_UNSEEN void compute_product(simt::Product* const* lanes) {
    constexpr int k = 32 * 8 / bits_of<T>, in_register = 32 / bits_of<T>;
    using Sum = sum_of<T>;
    Sum a[16][k], b[n][k], c[16][n];  // of the fiber: the clock may stop it here, and start the product of another warp
    const simt::Product& first = *lanes[0];
    if (first.a_in_registers) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4 * in_register; ++i) {
                int r = i / in_register, column = (lane % 4 + 4 * (r / 2)) * in_register + i % in_register;
                a[lane / 4 + 8 * (r % 2)][column] = (Sum)element<T>(lanes[lane]->fragment, i);
            }
    } else {
        read_matrix<T, 16>(a, {first.a, first.transposed_a}, 16 * first.warp);
    }
    read_matrix<U, n>(b, {first.b, first.transposed_b}, 0);
    Sum sign = (Sum)(first.negated_a != first.negated_b ? -1 : 1);
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < n; ++column) {
            Sum sum = 0;
            for (int l = 0; l < k; ++l) sum += a[row][l] * b[column][l];
            c[row][column] = sign * sum;
        }
    for (int lane = 0; lane < 32; ++lane) {
        const simt::Product& own = *lanes[lane];
        for (int i = 0; i < n / 2; ++i) {
            constexpr int in_out = 4 / sizeof(D);
            D* place = (D*)own.out[i / in_out] + i % in_out;
            const D* start = own.is_chained ? place : (const D*)&own.start[i / in_out] + i % in_out;
            Sum sum = c[lane / 4 + 8 * (i % 4 / 2)][i / 4 * 8 + lane % 4 * 2 + i % 2];
            if (own.keeps) sum += (Sum)*start;
            if constexpr (std::is_integral_v<D>) *place = own.saturates ? saturated<D>(sum) : (D)sum;
            else *place = (D)sum;
        }
    }
}

template <int n, class D, class T, class U>
SIMT_INLINE void wgmma(simt::Product& p) {
    p.compute = compute_product<n, D, T, U>;
    p.warp = warp() % 4;
#ifdef SIMT_INSTRUMENTED
    u32 lane = simt_lane();
    if (!p.a_in_registers) simt_product_reads(Operand{p.a, p.transposed_a}.piece(16 * p.warp, lane), true);
    for (u32 i = lane; i < 2 * n; i += 32) simt_product_reads(Operand{p.b, p.transposed_b}.piece(0, i), i / 32 % 4 == p.warp);
#endif
    simt_product(&p);
}
}  // namespace simt::ptx
