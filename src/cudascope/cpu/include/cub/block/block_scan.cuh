// cub::BlockScan: each warp scans its own and leaves its total in shared memory; after a barrier everybody adds what
// came before.
#pragma once

#include "../warp/warp_reduce.cuh"

namespace cub {

enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };

template <class T, class Prefix>
using if_callback = std::enable_if_t<std::is_class_v<Prefix> && !std::is_same_v<Prefix, T>>;

template <class T, int X, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1, int LEGACY_PTX_ARCH = 0>
class BlockScan {
    static constexpr int threads = X * Y * Z, warps = (threads + 31) / 32;

public:
    struct TempStorage {
        Room<T, warps> of_warp;
        Room<T, 1> prefix;
    };
    SIMT_METHOD BlockScan(TempStorage& storage) : temp(storage) {}
    SIMT_METHOD BlockScan() : temp(own()) {}

private:
    struct Before {  // what comes before this thread, and whether anything does; of all threads together
        T value, total;
        bool any;
    };
    TempStorage& temp;
    SIMT_METHOD static TempStorage& own() {
        __shared__ TempStorage storage;
        return storage;
    }

    template <class Op>
    SIMT_METHOD Before before(T input, Op op, Line line) {
        int rank = thread_rank(), warp = rank / 32;
        Gathered<T, 32> all(input, line);
        all.scan(op);
        if (all.lane == all.there - 1) temp.of_warp.put(warp, all.values_here[all.lane]);
        __syncthreads(line.number);
        T earlier = temp.of_warp[0], total = earlier;
        for (int other = 1; other < warps; ++other) {
            if (other == warp) earlier = total;
            total = op(total, temp.of_warp[other]);
        }
        if (rank % 32 == 0) return {earlier, total, warp > 0};
        T own = all.values_here[all.lane - 1];
        return {warp > 0 ? op(earlier, own) : own, total, true};
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
    template <int N, class Op>
    SIMT_METHOD static T folded(T (&inputs)[N], Op op) {
        T own = inputs[0];
        for (int i = 1; i < N; ++i) own = op(own, inputs[i]);
        return own;
    }
    template <int N, class Op>
    SIMT_METHOD static void inclusive(T (&in)[N], T (&out)[N], Op op, T start, bool any) {
        for (int i = 0; i < N; ++i) out[i] = start = any || i > 0 ? op(start, in[i]) : in[i];
    }
    template <int N, class Op>
    SIMT_METHOD static void exclusive(T (&in)[N], T (&out)[N], Op op, T start, bool any) {
        for (int i = 0; i < N; ++i) {
            T next = any || i > 0 ? op(start, in[i]) : in[i];
            if (any || i > 0) out[i] = start;
            start = next;
        }
    }
    template <class V>
    using One = V (&)[1];
    SIMT_METHOD static One<T> one(T& value) { return reinterpret_cast<One<T>>(value); }

public:
    template <int N, class Op>
    SIMT_METHOD void InclusiveScan(T (&in)[N], T (&out)[N], Op op, T& total, Line line = {__builtin_LINE()}) {
        Before b = before(folded(in, op), op, line);
        inclusive(in, out, op, b.value, b.any);
        total = b.total;
    }
    template <int N, class Op>
    SIMT_METHOD void InclusiveScan(T (&in)[N], T (&out)[N], Op op, Line line = {__builtin_LINE()}) {
        T total = in[0];
        InclusiveScan(in, out, op, total, line);
    }
    template <int N, class Op, class Prefix, class = if_callback<T, Prefix>>
    SIMT_METHOD void InclusiveScan(T (&in)[N], T (&out)[N], Op op, Prefix& prefix, Line line = {__builtin_LINE()}) {
        Before b = before(folded(in, op), op, line);
        T start = asked(prefix, b.total, line);
        inclusive(in, out, op, b.any ? op(start, b.value) : start, true);
    }
    template <int N, class Op>
    SIMT_METHOD void ExclusiveScan(
        T (&in)[N], T (&out)[N], T initial, Op op, T& total, Line line = {__builtin_LINE()}) {
        Before b = before(folded(in, op), op, line);
        exclusive(in, out, op, b.any ? op(initial, b.value) : initial, true);
        total = b.total;
    }
    template <int N, class Op>
    SIMT_METHOD void ExclusiveScan(T (&in)[N], T (&out)[N], T initial, Op op, Line line = {__builtin_LINE()}) {
        T total = in[0];
        ExclusiveScan(in, out, initial, op, total, line);
    }
    template <int N, class Op, class Prefix, class = if_callback<T, Prefix>>
    SIMT_METHOD void ExclusiveScan(T (&in)[N], T (&out)[N], Op op, Prefix& prefix, Line line = {__builtin_LINE()}) {
        Before b = before(folded(in, op), op, line);
        T start = asked(prefix, b.total, line);
        exclusive(in, out, op, b.any ? op(start, b.value) : start, true);
    }
    // One value per thread is an array of one.
    template <class Op, class... Rest>
    SIMT_METHOD void InclusiveScan(T in, T& out, Op op, Rest&&... rest) {
        InclusiveScan(one(in), one(out), op, rest...);
    }
    template <class Op, class... Rest>
    SIMT_METHOD void ExclusiveScan(T in, T& out, T initial, Op op, Rest&&... rest) {
        ExclusiveScan(one(in), one(out), initial, op, rest...);
    }
    template <class Op, class Prefix, class = if_callback<T, Prefix>>
    SIMT_METHOD void ExclusiveScan(T in, T& out, Op op, Prefix& prefix) {
        ExclusiveScan(one(in), one(out), op, prefix);
    }
    template <class In, class Out, class... Rest>
    SIMT_METHOD void InclusiveSum(In&& in, Out& out, Rest&&... rest) {
        InclusiveScan(in, out, Sum(), rest...);
    }
    template <int N>
    SIMT_METHOD void ExclusiveSum(T (&in)[N], T (&out)[N], T& total, Line line = {__builtin_LINE()}) {
        ExclusiveScan(in, out, T(), Sum(), total, line);
    }
    template <int N>
    SIMT_METHOD void ExclusiveSum(T (&in)[N], T (&out)[N], Line line = {__builtin_LINE()}) {
        ExclusiveScan(in, out, T(), Sum(), line);
    }
    SIMT_METHOD void ExclusiveSum(T in, T& out, T& total, Line line = {__builtin_LINE()}) {
        ExclusiveScan(one(in), one(out), T(), Sum(), total, line);
    }
    SIMT_METHOD void ExclusiveSum(T in, T& out, Line line = {__builtin_LINE()}) {
        ExclusiveScan(one(in), one(out), T(), Sum(), line);
    }
    template <class In, class Out, class Prefix, class = if_callback<T, Prefix>>
    SIMT_METHOD void ExclusiveSum(In&& in, Out& out, Prefix& prefix) {
        ExclusiveScan(in, out, Sum(), prefix);
    }
};
}  // namespace cub
