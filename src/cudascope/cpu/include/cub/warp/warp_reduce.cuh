// cub::WarpReduce and cub::WarpScan: among the lanes of a warp, or of a part of it that is a power of two.
#pragma once

#include "../operators.cuh"

namespace cub {

// The values of all lanes of the (logical) warp, and how many there are.
template <class T, int width>
struct Gathered {
    T own;
    Room<T, 32> values;

    SIMT_UNSEEN static void exchange(void** lanes) {
        for (int from = 0; from < 32; ++from)
            for (int to = 0; to < 32 && lanes[from]; ++to)
                if (lanes[to])
                    __builtin_memcpy(&((Gathered*)lanes[to])->values[from], &((Gathered*)lanes[from])->own, sizeof(T));
    }
    SIMT_METHOD Gathered(const T& value, Line line) : own(value) {
        int first = simt_lane() / width * width;
        unsigned mask = (unsigned)(((1ull << width) - 1) << first);
        there = __builtin_popcount(simt_meet(simt::EXCHANGE, mask, this, exchange, line.number));
        lane = (int)simt_lane() - first;
        values_here = &values[first];
    }

    int there, lane;
    T* values_here;

    // Combined as shuffles by 1, 2, 4, … combine them: all that come after this lane.
    template <class Op>
    SIMT_METHOD T reduced(int valid, Op op) {
        valid = valid < there ? valid : there;
        for (int step = 1; step < valid; step *= 2)
            for (int i = lane; i + step < valid; i += 2 * step)
                values_here[i] = op(values_here[i], values_here[i + step]);
        return values_here[lane];
    }
    // values_here[i] becomes the combination of the first i + 1.
    template <class Op>
    SIMT_METHOD void scan(Op op) {
        for (int step = 1; step < there; step *= 2)
            for (int i = there - 1; i >= step; --i) values_here[i] = op(values_here[i - step], values_here[i]);
    }
};

template <class T, int LOGICAL_WARP_THREADS = 32, int LEGACY_PTX_ARCH = 0>
class WarpReduce {
public:
    struct TempStorage {};
    SIMT_METHOD WarpReduce(TempStorage&) {}

    template <class Op>
    SIMT_METHOD T Reduce(T input, Op op, int valid_items = 32, Line line = {__builtin_LINE()}) {
        return Gathered<T, LOGICAL_WARP_THREADS>(input, line).reduced(valid_items, op);
    }
    SIMT_METHOD T Sum(T input, int valid_items = 32, Line line = {__builtin_LINE()}) {
        return Reduce(input, cub::Sum(), valid_items, line);
    }
};

template <class T, int LOGICAL_WARP_THREADS = 32, int LEGACY_PTX_ARCH = 0>
class WarpScan {
    using All = Gathered<T, LOGICAL_WARP_THREADS>;

public:
    struct TempStorage {};
    SIMT_METHOD WarpScan(TempStorage&) {}

    template <class Op>
    SIMT_METHOD void InclusiveScan(
        T input, T& output, Op op, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        All all(input, line);
        all.scan(op);
        output = all.values_here[all.lane], total = all.values_here[all.there - 1];
    }
    template <class Op>  // the first lane's output is left as it is
    SIMT_METHOD void ExclusiveScan(
        T input, T& output, Op op, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        All all(input, line);
        all.scan(op);
        if (all.lane > 0) output = all.values_here[all.lane - 1];
        total = all.values_here[all.there - 1];
    }
    template <class Op>
    SIMT_METHOD void ExclusiveScan(
        T input, T& output, T initial, Op op, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        All all(input, line);
        all.scan(op);
        output = all.lane > 0 ? op(initial, all.values_here[all.lane - 1]) : initial;
        total = all.values_here[all.there - 1];
    }
    template <class Op>
    SIMT_METHOD void Scan(T input, T& inclusive, T& exclusive, Op op, Line line = {__builtin_LINE()}) {
        All all(input, line);
        all.scan(op);
        inclusive = all.values_here[all.lane];
        if (all.lane > 0) exclusive = all.values_here[all.lane - 1];
    }
    SIMT_METHOD void InclusiveSum(T input, T& output, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        InclusiveScan(input, output, Sum(), total, line);
    }
    SIMT_METHOD void ExclusiveSum(T input, T& output, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        ExclusiveScan(input, output, T(), Sum(), total, line);
    }
    SIMT_METHOD T Broadcast(T input, unsigned source, Line line = {__builtin_LINE()}) {
        return All(input, line).values_here[source];
    }
};
}  // namespace cub
