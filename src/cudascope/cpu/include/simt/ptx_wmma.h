// Matrices of a whole warp (PTX: wmma). PTX leaves open which lane holds which element: here lane l holds, in order, the
// share l of the 32 of the elements, row by row, as often as its registers have room for them.
#pragma once

#include "ptx_matrix.h"

namespace simt::ptx {

// Call f(row, column, bytes, first element) for each run of elements of a lane's share that are neighbours in memory.
template <int rows, int columns, bool by_rows, class T, class F>
SIMT_INLINE void each_run(F f) {
    constexpr int share = rows * columns / 32, longest = 16 / sizeof(T);
    constexpr int run = !by_rows ? 1 : share < columns ? (share < longest ? share : longest) : (columns < longest ? columns : longest);
    for (int i = 0; i < share; i += run) {
        int flat = simt_lane() * share + i;
        f(flat / columns, flat % columns, run, i);
    }
}
template <int rows, int columns, bool by_rows, class T, int registers>
SIMT_INLINE Vector<u32, registers> wmma_load(const char* address, u32 stride) {
    Vector<u32, registers> fragment{};
    constexpr int share = rows * columns / 32;
    T* elements = (T*)fragment.x;
    each_run<rows, columns, by_rows, T>([&](int row, int column, int run, int first) {
        const char* p = address + (by_rows ? row * stride + column : column * stride + row) * sizeof(T);
        touch(p, run * sizeof(T), simt::READ);
        __builtin_memcpy(elements + first, p, run * sizeof(T));
    });
    for (int i = share; i < registers * 4 / (int)sizeof(T); ++i) elements[i] = elements[i % share];
    __syncwarp();
    return fragment;
}
template <int rows, int columns, bool by_rows, class T, int registers>
SIMT_INLINE void wmma_store(char* address, Vector<u32, registers> fragment, u32 stride) {
    __syncwarp();
    each_run<rows, columns, by_rows, T>([&](int row, int column, int run, int first) {
        char* p = address + (by_rows ? row * stride + column : column * stride + row) * sizeof(T);
        touch(p, run * sizeof(T), simt::WRITE);
        __builtin_memcpy(p, (const T*)fragment.x + first, run * sizeof(T));
    });
}

template <int m, int n, int k>
struct InShares {
    template <int rows, int columns>
    SIMT_UNSEEN static Place in(int lane, int i) {
        int flat = lane * (rows * columns / 32) + i;
        return {flat / columns, flat % columns};
    }
    SIMT_UNSEEN static Place in_a(int lane, int i) { return in<m, k>(lane, i); }
    SIMT_UNSEEN static Place in_b(int lane, int i) { return in<k, n>(lane, i); }
    SIMT_UNSEEN static Place in_c(int lane, int i) { return in<m, n>(lane, i); }
};
template <int m, int n, int k, class D, class A, class C, int a, int b, int c>
SIMT_INLINE auto wmma_mma(Vector<u32, a> x, Vector<u32, b> y, Vector<u32, c> z, int line = __builtin_LINE()) {
    return mma<m, n, k, D, A, A, C, 0, u32, a, b, c, InShares<m, n, k>>(x, y, z, line);
}
}  // namespace simt::ptx
