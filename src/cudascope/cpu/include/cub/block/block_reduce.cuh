// cub::BlockReduce: each warp reduces its own and leaves the result in shared memory; after a barrier thread 0 combines
// them. A second use of the same TempStorage needs a barrier before it, as with cub's own.
#pragma once

#include "../warp/warp_reduce.cuh"

namespace cub {

enum BlockReduceAlgorithm {
    BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_RAKING, BLOCK_REDUCE_WARP_REDUCTIONS,
    BLOCK_REDUCE_WARP_REDUCTIONS_NONDETERMINISTIC,
};

template <class T, int X, BlockReduceAlgorithm algorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockReduce : public Collective<Room<T, (X * Y * Z + 31) / 32>,
                                      BlockReduce<T, X, algorithm, Y, Z, LEGACY_PTX_ARCH>> {
    static constexpr int threads = X * Y * Z;
    using BlockReduce::Collective::temp;  // the result of each warp

public:
    using BlockReduce::Collective::Collective;

    // The result is thread 0's; of the threads, the first num_valid bring a value.
    template <class Op>
    SIMT_METHOD T Reduce(T input, Op op, int num_valid = threads, Line line = {__builtin_LINE()}) {
        int rank = thread_rank(), warp = rank / 32;
        T result = Gathered<T, 32>(input, line).reduced(num_valid - 32 * warp, op);
        if (rank % 32 == 0) temp.put(warp, result);
        __syncthreads(line.number);
        if (rank == 0)
            for (int other = 1; 32 * other < threads && 32 * other < num_valid; ++other)
                result = op(result, temp[other]);
        return result;
    }
    template <int N, class Op>
    SIMT_METHOD T Reduce(T (&inputs)[N], Op op, Line line = {__builtin_LINE()}) {
        T own = inputs[0];
        for (int i = 1; i < N; ++i) own = op(own, inputs[i]);
        return Reduce(own, op, threads, line);
    }
    SIMT_METHOD T Sum(T input, int num_valid = threads, Line line = {__builtin_LINE()}) {
        return Reduce(input, cub::Sum(), num_valid, line);
    }
    template <int N>
    SIMT_METHOD T Sum(T (&inputs)[N], Line line = {__builtin_LINE()}) { return Reduce(inputs, cub::Sum(), line); }
};
}  // namespace cub
