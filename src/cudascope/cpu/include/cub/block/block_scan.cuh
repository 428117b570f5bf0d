// cub::BlockScan: each warp scans its own and leaves its total in shared memory; after a barrier every
// thread adds what came before.
#pragma once

#include "../warp/warp_reduce.cuh"

namespace cub {

enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };

template <class T, class Prefix>
using if_callback = std::enable_if_t<std::is_class_v<Prefix> && !std::is_same_v<Prefix, T>>;

template <class T, int warps>
struct ScanStorage {
    Room<T, warps> of_warp;
    Room<T, 1> prefix;
};

template <class T, int X, BlockScanAlgorithm algorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockScan : public Collective<ScanStorage<T, (X * Y * Z + 31) / 32>,
                                    BlockScan<T, X, algorithm, Y, Z, LEGACY_PTX_ARCH>> {
    using BlockScan::Collective::temp;
    struct Before {  // what comes before this thread, and whether anything does; of all threads together
        T value, total;
        bool any;
    };

    template <int N, class Op>
    SIMT_METHOD Before before(T (&inputs)[N], Op op, Line line) {
        T own = inputs[0];
        for (int i = 1; i < N; ++i) own = op(own, inputs[i]);
        int rank = thread_rank(), warp = rank / 32;
        Gathered<T, 32> all(own, line);
        all.scan(op);
        if (all.lane == all.there - 1) temp.of_warp.put(warp, all.values_here[all.lane]);
        __syncthreads(line.number);
        T earlier = temp.of_warp[0], total = earlier;
        for (int other = 1; 32 * other < X * Y * Z; ++other) {
            if (other == warp) earlier = total;
            total = op(total, temp.of_warp[other]);
        }
        if (rank % 32 == 0) return {earlier, total, warp > 0};
        T in_warp = all.values_here[all.lane - 1];
        return {warp > 0 ? op(earlier, in_warp) : in_warp, total, true};
    }
    // `prefix(total)` is asked by the first warp; what its first lane gets comes before everything.
    template <class Prefix>
    SIMT_METHOD T asked(Prefix& prefix, const T& total, Line line) {
        if (thread_rank() < 32) {
            T start = prefix(total);
            if (thread_rank() == 0) temp.prefix.put(0, start);
        }
        __syncthreads(line.number);
        return temp.prefix[0];
    }
    // With nothing before its first item (`any` is false), an exclusive scan leaves out[0] as it is.
    template <bool inclusive, int N, class Op>
    SIMT_METHOD static void fill(T (&in)[N], T (&out)[N], Op op, T start, bool any) {
        for (int i = 0; i < N; ++i) {
            T next = any ? op(start, in[i]) : in[i];
            if (inclusive) out[i] = next;
            else if (any) out[i] = start;
            start = next, any = true;
        }
    }
    template <bool inclusive, int N, class Op>
    SIMT_METHOD static void fill_from(T start, T (&in)[N], T (&out)[N], Op op, const Before& earlier) {
        fill<inclusive>(in, out, op, earlier.any ? op(start, earlier.value) : start, true);
    }
    template <class V>
    using One = V (&)[1];
    SIMT_METHOD static One<T> one(T& value) { return reinterpret_cast<One<T>>(value); }

public:
    using BlockScan::Collective::Collective;

    template <int N, class Op>
    SIMT_METHOD void InclusiveScan(
        T (&in)[N], T (&out)[N], Op op, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        Before earlier = before(in, op, line);
        fill<true>(in, out, op, earlier.value, earlier.any);
        total = earlier.total;
    }
    template <int N, class Op>
    SIMT_METHOD void ExclusiveScan(
        T (&in)[N], T (&out)[N], T initial, Op op, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        Before earlier = before(in, op, line);
        fill_from<false>(initial, in, out, op, earlier);
        total = earlier.total;
    }
    // One value per thread is an array of one.
    template <class Op>
    SIMT_METHOD void InclusiveScan(T in, T& out, Op op, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        InclusiveScan(one(in), one(out), op, total, line);
    }
    template <class Op>
    SIMT_METHOD void ExclusiveScan(
        T in, T& out, T initial, Op op, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        ExclusiveScan(one(in), one(out), initial, op, total, line);
    }
    template <class In, class Out>
    SIMT_METHOD void InclusiveSum(In&& in, Out& out, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        InclusiveScan(in, out, Sum(), total, line);
    }
    template <class In, class Out>
    SIMT_METHOD void ExclusiveSum(In&& in, Out& out, Total<T> total = {}, Line line = {__builtin_LINE()}) {
        ExclusiveScan(in, out, T(), Sum(), total, line);
    }
    // The caller's `prefix` tells what comes before the block's first item.
#define SIMT_SCAN_AFTER(name, inclusive)                                                                            \
    template <int N, class Op, class Prefix, class = if_callback<T, Prefix>>                                        \
    SIMT_METHOD void name##Scan(T (&in)[N], T (&out)[N], Op op, Prefix& prefix, Line line = {__builtin_LINE()}) {     \
        Before earlier = before(in, op, line);                                                                      \
        fill_from<inclusive>(asked(prefix, earlier.total, line), in, out, op, earlier);                             \
    }                                                                                                               \
    template <class Op, class Prefix, class = if_callback<T, Prefix>>                                               \
    SIMT_METHOD void name##Scan(T in, T& out, Op op, Prefix& prefix, Line line = {__builtin_LINE()}) {                \
        name##Scan(one(in), one(out), op, prefix, line);                                                            \
    }                                                                                                               \
    template <class In, class Out, class Prefix, class = if_callback<T, Prefix>>                                    \
    SIMT_METHOD void name##Sum(In&& in, Out& out, Prefix& prefix, Line line = {__builtin_LINE()}) {                   \
        name##Scan(in, out, Sum(), prefix, line);                                                                   \
    }
    SIMT_SCAN_AFTER(Inclusive, true)
    SIMT_SCAN_AFTER(Exclusive, false)
#undef SIMT_SCAN_AFTER
};
}  // namespace cub
