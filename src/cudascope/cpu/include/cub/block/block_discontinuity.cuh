// cub::BlockDiscontinuity: which items differ from their neighbours. cub::BlockHistogram: how often each item occurs.
#pragma once

#include "../operators.cuh"

namespace cub {

template <class T, int X, int Y = 1, int Z = 1, int LEGACY_PTX_ARCH = 0>
class BlockDiscontinuity {
    static constexpr int threads = X * Y * Z;

public:
    struct TempStorage { Room<T, threads> first, last; };
    SIMT_METHOD BlockDiscontinuity(TempStorage& storage) : temp(storage) {}
    SIMT_METHOD BlockDiscontinuity() : temp(own()) {}

    // heads[i] becomes op(the item before, the item); of the block's first item it is 1, or compared with `before`.
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagHeads(Flag (&heads)[N], T (&items)[N], Op op, Line line = {__builtin_LINE()}) {
        flag(heads, (Flag*)nullptr, items, op, nullptr, nullptr, line);
    }
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagHeads(Flag (&heads)[N], T (&items)[N], Op op, T before, Line line = {__builtin_LINE()}) {
        flag(heads, (Flag*)nullptr, items, op, &before, nullptr, line);
    }
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagTails(Flag (&tails)[N], T (&items)[N], Op op, Line line = {__builtin_LINE()}) {
        flag((Flag*)nullptr, tails, items, op, nullptr, nullptr, line);
    }
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagTails(Flag (&tails)[N], T (&items)[N], Op op, T after, Line line = {__builtin_LINE()}) {
        flag((Flag*)nullptr, tails, items, op, nullptr, &after, line);
    }
    template <int N, class Flag, class Op>
    SIMT_METHOD void FlagHeadsAndTails(
        Flag (&heads)[N], Flag (&tails)[N], T (&items)[N], Op op, Line line = {__builtin_LINE()}) {
        flag(heads, tails, items, op, nullptr, nullptr, line);
    }

private:
    TempStorage& temp;
    SIMT_METHOD static TempStorage& own() {
        __shared__ TempStorage storage;
        return storage;
    }
    template <int N, class Flag, class Op>
    SIMT_METHOD void flag(
        Flag* heads, Flag* tails, T (&items)[N], Op op, const T* before, const T* after, Line line) {
        int rank = thread_rank();
        temp.first.put(rank, items[0]), temp.last.put(rank, items[N - 1]);
        __syncthreads(line.number);
        for (int i = 0; i < N && heads; ++i)
            heads[i] = i > 0 ? op(items[i - 1], items[i])
                : rank > 0   ? op(temp.last[rank - 1], items[0])
                : before     ? op(*before, items[0])
                             : true;
        for (int i = 0; i < N && tails; ++i)
            tails[i] = i + 1 < N       ? op(items[i], items[i + 1])
                : rank + 1 < threads ? op(items[i], temp.first[rank + 1])
                : after              ? op(items[i], *after)
                                     : true;
    }
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
