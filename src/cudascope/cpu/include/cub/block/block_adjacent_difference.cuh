// cub::BlockAdjacentDifference: each item of a thread block combined with the one beside it.
#pragma once

#include "../operators.cuh"

namespace cub {

template <class T, int X, int Y = 1, int Z = 1, int LEGACY_PTX_ARCH = 0>
class BlockAdjacentDifference {
    static constexpr int threads = X * Y * Z;

public:
    struct TempStorage { Room<T, threads> first, last; };
    SIMT_METHOD BlockAdjacentDifference(TempStorage& storage) : temp(storage) {}
    SIMT_METHOD BlockAdjacentDifference() : temp(own()) {}

    // out[i] becomes op(in[i], the item before it); the block's first item stays, or `before` precedes it.
    template <int N, class Out, class Op>
    SIMT_METHOD void SubtractLeft(T (&in)[N], Out (&out)[N], Op op, Line line = {__builtin_LINE()}) {
        left(in, out, op, threads * N, nullptr, line);
    }
    template <int N, class Out, class Op>
    SIMT_METHOD void SubtractLeft(T (&in)[N], Out (&out)[N], Op op, T before, Line line = {__builtin_LINE()}) {
        left(in, out, op, threads * N, &before, line);
    }
    // Only the first `valid` items take part.
    template <int N, class Out, class Op>
    SIMT_METHOD void SubtractLeftPartialTile(
        T (&in)[N], Out (&out)[N], Op op, int valid, Line line = {__builtin_LINE()}) {
        left(in, out, op, valid, nullptr, line);
    }
    template <int N, class Out, class Op>
    SIMT_METHOD void SubtractRight(T (&in)[N], Out (&out)[N], Op op, Line line = {__builtin_LINE()}) {
        right(in, out, op, threads * N, nullptr, line);
    }
    template <int N, class Out, class Op>
    SIMT_METHOD void SubtractRight(T (&in)[N], Out (&out)[N], Op op, T after, Line line = {__builtin_LINE()}) {
        right(in, out, op, threads * N, &after, line);
    }
    template <int N, class Out, class Op>
    SIMT_METHOD void SubtractRightPartialTile(
        T (&in)[N], Out (&out)[N], Op op, int valid, Line line = {__builtin_LINE()}) {
        right(in, out, op, valid, nullptr, line);
    }

private:
    TempStorage& temp;
    SIMT_METHOD static TempStorage& own() {
        __shared__ TempStorage storage;
        return storage;
    }
    template <int N>
    SIMT_METHOD void meet(T (&in)[N], Line line) {
        temp.first.put(thread_rank(), in[0]), temp.last.put(thread_rank(), in[N - 1]);
        __syncthreads(line.number);
    }
    template <int N, class Out, class Op>
    SIMT_METHOD void left(T (&in)[N], Out (&out)[N], Op op, int valid, const T* before, Line line) {
        int rank = thread_rank();
        meet(in, line);
        for (int i = N - 1; i >= 0; --i) {  // `out` may be `in`
            if (rank * N + i >= valid || (rank + i == 0 && !before)) out[i] = in[i];
            else out[i] = op(in[i], i > 0 ? in[i - 1] : rank > 0 ? temp.last[rank - 1] : *before);
        }
    }
    template <int N, class Out, class Op>
    SIMT_METHOD void right(T (&in)[N], Out (&out)[N], Op op, int valid, const T* after, Line line) {
        int rank = thread_rank();
        meet(in, line);
        for (int i = 0; i < N; ++i) {
            int next = rank * N + i + 1;
            if (next > valid || (next == valid && !after)) out[i] = in[i];
            else out[i] = op(in[i], i + 1 < N ? in[i + 1] : next < valid ? temp.first[rank + 1] : *after);
        }
    }
};
}  // namespace cub
