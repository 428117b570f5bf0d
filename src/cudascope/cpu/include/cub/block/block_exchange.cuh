// cub::BlockExchange: the items of a thread block from one arrangement to another, through shared memory.
//   blocked: thread t holds t N … t N + N - 1; striped: t, t + threads, …; warp-striped: so within each warp's items.
#pragma once

#include "../operators.cuh"

namespace cub {

template <class T, int X, int N, bool WARP_TIME_SLICING = false, int Y = 1, int Z = 1, int LEGACY_PTX_ARCH = 0>
class BlockExchange
    : public Collective<Room<T, X * Y * Z * N>, BlockExchange<T, X, N, WARP_TIME_SLICING, Y, Z, LEGACY_PTX_ARCH>> {
    using BlockExchange::Collective::temp;

public:
    using BlockExchange::Collective::Collective;

    SIMT_METHOD static int blocked(int i) { return thread_rank() * N + i; }
    SIMT_METHOD static int striped(int i) { return thread_rank() + X * Y * Z * i; }
    SIMT_METHOD static int warp_striped(int i) { return thread_rank() / 32 * 32 * N + thread_rank() % 32 + 32 * i; }

#define SIMT_EXCHANGE(name, from, to, meet)                                                            \
    template <class Out>                                                                               \
    SIMT_METHOD void name(const T (&in)[N], Out (&out)[N], Line line = {__builtin_LINE()}) {           \
        for (int i = 0; i < N; ++i) temp.put(from(i), in[i]);                                          \
        meet;                                                                                          \
        for (int i = 0; i < N; ++i) out[i] = temp[to(i)];                                              \
    }                                                                                                  \
    SIMT_METHOD void name(T (&items)[N], Line line = {__builtin_LINE()}) { name(items, items, line); }
    SIMT_EXCHANGE(StripedToBlocked, striped, blocked, __syncthreads(line.number))
    SIMT_EXCHANGE(BlockedToStriped, blocked, striped, __syncthreads(line.number))
    SIMT_EXCHANGE(WarpStripedToBlocked, warp_striped, blocked, __syncwarp())
    SIMT_EXCHANGE(BlockedToWarpStriped, blocked, warp_striped, __syncwarp())
#undef SIMT_EXCHANGE

#define SIMT_SCATTER(name, to)                                                                               \
    template <class Out, class Rank>                                                                         \
    SIMT_METHOD void name(const T (&in)[N], Out (&out)[N], Rank (&ranks)[N], Line line = {__builtin_LINE()}) { \
        for (int i = 0; i < N; ++i) temp.put(ranks[i], in[i]);                                               \
        __syncthreads(line.number);                                                                          \
        for (int i = 0; i < N; ++i) out[i] = temp[to(i)];                                                    \
    }
    SIMT_SCATTER(ScatterToBlocked, blocked)
    SIMT_SCATTER(ScatterToStriped, striped)
#undef SIMT_SCATTER
};
}  // namespace cub
