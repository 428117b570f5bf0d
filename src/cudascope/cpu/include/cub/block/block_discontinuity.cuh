// Items beside each other in a thread block. cub::BlockAdjacentDifference combines them, and cub::BlockDiscontinuity
// tells which of them differ. cub::BlockHistogram counts how often each item occurs.
#pragma once

#include "../operators.cuh"

namespace cub {

// The first and the last item of each thread, by which a thread finds the items beside its own.
template <class T, int threads>
struct Ends {
    Room<T, threads> first, last;

    template <int N>
    SIMT_METHOD void meet(T (&items)[N], Line line) {
        first.put(thread_rank(), items[0]), last.put(thread_rank(), items[N - 1]);
        __syncthreads(line.number);
    }
    // The item before items[i]; of the block's first item that is `edge`, if there is one.
    template <int N>
    SIMT_METHOD const T* before(T (&items)[N], int i, const std::optional<T>& edge) {
        if (i > 0) return &items[i - 1];
        return thread_rank() > 0 ? &last[thread_rank() - 1] : edge ? &*edge : nullptr;
    }
    // The item after items[i]; of the last of the block's `valid` items that is `edge`, if there is one.
    template <int N>
    SIMT_METHOD const T* after(T (&items)[N], int i, const std::optional<T>& edge, int valid = threads * N) {
        int next = thread_rank() * N + i + 1;
        if (next >= valid) return next == valid && edge ? &*edge : nullptr;
        return i + 1 < N ? &items[i + 1] : &first[thread_rank() + 1];
    }
};

template <class T, int X, int Y = 1, int Z = 1, int LEGACY_PTX_ARCH = 0>
class BlockAdjacentDifference
    : public Collective<Ends<T, X * Y * Z>, BlockAdjacentDifference<T, X, Y, Z, LEGACY_PTX_ARCH>> {
    using BlockAdjacentDifference::Collective::temp;

public:
    using BlockAdjacentDifference::Collective::Collective;

// out[i] becomes op(in[i], the item beside it); the block's outermost item stays, or `edge` lies beside it. Of a partial
// tile only the first `valid` items take part.
#define SIMT_SUBTRACT(name, side)                                                                         \
    template <int N, class Out, class Op>                                                                 \
    SIMT_METHOD void name(                                                                                \
        T (&in)[N], Out (&out)[N], Op op, std::optional<T> edge = {}, Line line = {__builtin_LINE()}) {     \
        side(in, out, op, X * Y * Z * N, edge, line);                                                     \
    }                                                                                                     \
    template <int N, class Out, class Op>                                                                 \
    SIMT_METHOD void name##PartialTile(                                                                   \
        T (&in)[N], Out (&out)[N], Op op, int valid, Line line = {__builtin_LINE()}) {                      \
        side(in, out, op, valid, {}, line);                                                               \
    }
    SIMT_SUBTRACT(SubtractLeft, left)
    SIMT_SUBTRACT(SubtractRight, right)
#undef SIMT_SUBTRACT

private:
    template <int N, class Out, class Op>
    SIMT_METHOD void left(T (&in)[N], Out (&out)[N], Op op, int valid, std::optional<T> edge, Line line) {
        temp.meet(in, line);
        for (int i = N - 1; i >= 0; --i) {  // `out` may be `in`
            const T* before = thread_rank() * N + i < valid ? temp.before(in, i, edge) : nullptr;
            out[i] = before ? op(in[i], *before) : in[i];
        }
    }
    template <int N, class Out, class Op>
    SIMT_METHOD void right(T (&in)[N], Out (&out)[N], Op op, int valid, std::optional<T> edge, Line line) {
        temp.meet(in, line);
        for (int i = 0; i < N; ++i) {
            const T* after = temp.after(in, i, edge, valid);
            out[i] = after ? op(in[i], *after) : in[i];
        }
    }
};

template <class T, int X, int Y = 1, int Z = 1, int LEGACY_PTX_ARCH = 0>
class BlockDiscontinuity : public Collective<Ends<T, X * Y * Z>, BlockDiscontinuity<T, X, Y, Z, LEGACY_PTX_ARCH>> {
    using BlockDiscontinuity::Collective::temp;

public:
    using BlockDiscontinuity::Collective::Collective;

    // heads[i] becomes op(the item before, the item); of the block's first item it is 1, or compared with `edge`.
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagHeads(
        Flag (&heads)[N], T (&items)[N], Op op, std::optional<T> edge = {}, Line line = {__builtin_LINE()}) {
        temp.meet(items, line);
        for (int i = 0; i < N; ++i) heads[i] = flag(op, temp.before(items, i, edge), &items[i]);
    }
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagTails(
        Flag (&tails)[N], T (&items)[N], Op op, std::optional<T> edge = {}, Line line = {__builtin_LINE()}) {
        temp.meet(items, line);
        for (int i = 0; i < N; ++i) tails[i] = flag(op, &items[i], temp.after(items, i, edge));
    }
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagHeadsAndTails(
        Flag (&heads)[N], Flag (&tails)[N], T (&items)[N], Op op, Line line = {__builtin_LINE()}) {
        temp.meet(items, line);
        for (int i = 0; i < N; ++i) {
            heads[i] = flag(op, temp.before(items, i, {}), &items[i]);
            tails[i] = flag(op, &items[i], temp.after(items, i, {}));
        }
    }

private:
    template <class Op>
    SIMT_METHOD static auto flag(Op op, const T* item, const T* next) { return item && next ? op(*item, *next) : true; }
};

enum BlockHistogramAlgorithm { BLOCK_HISTO_SORT, BLOCK_HISTO_ATOMIC };

template <class T, int X, int N, int BINS, BlockHistogramAlgorithm = BLOCK_HISTO_SORT, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockHistogram {
public:
    struct TempStorage {};
    SIMT_METHOD BlockHistogram(TempStorage&) {}
    SIMT_METHOD BlockHistogram() {}
    template <class Count>
    SIMT_METHOD void InitHistogram(Count (&histogram)[BINS]) {
        for (int bin = thread_rank(); bin < BINS; bin += X * Y * Z) histogram[bin] = 0;
    }
    template <class Count>
    SIMT_METHOD void Composite(T (&items)[N], Count (&histogram)[BINS]) {
        for (T& item : items) atomicAdd(&histogram[item], Count(1));
    }
    template <class Count>
    SIMT_METHOD void Histogram(T (&items)[N], Count (&histogram)[BINS], Line line = {__builtin_LINE()}) {
        InitHistogram(histogram);
        __syncthreads(line.number);
        Composite(items, histogram);
    }
};
}  // namespace cub
