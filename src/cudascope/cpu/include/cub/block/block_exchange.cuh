// cub::BlockExchange: the items of a thread block from one arrangement to another, through shared memory.
//   blocked: thread t holds t N … t N + N - 1; striped: t, t + threads, …; warp-striped: so within each warp's items.
#pragma once

#include "../operators.cuh"

namespace cub {

template <class T, int X, int N, bool WARP_TIME_SLICING = false, int Y = 1, int Z = 1, int LEGACY_PTX_ARCH = 0>
class BlockExchange {
    static constexpr int threads = X * Y * Z;

public:
    struct TempStorage { Room<T, threads * N> items; };
    SIMT_METHOD BlockExchange(TempStorage& storage) : temp(storage) {}
    SIMT_METHOD BlockExchange() : temp(own()) {}

    SIMT_METHOD static int blocked(int i) { return thread_rank() * N + i; }
    SIMT_METHOD static int striped(int i) { return thread_rank() + threads * i; }
    SIMT_METHOD static int warp_striped(int i) { return thread_rank() / 32 * 32 * N + thread_rank() % 32 + 32 * i; }

    template <class Out>
    SIMT_METHOD void StripedToBlocked(const T (&in)[N], Out (&out)[N], Line line = {__builtin_LINE()}) {
        move(in, out, striped, blocked, [&] { __syncthreads(line.number); });
    }
    template <class Out>
    SIMT_METHOD void BlockedToStriped(const T (&in)[N], Out (&out)[N], Line line = {__builtin_LINE()}) {
        move(in, out, blocked, striped, [&] { __syncthreads(line.number); });
    }
    template <class Out>
    SIMT_METHOD void WarpStripedToBlocked(const T (&in)[N], Out (&out)[N]) {
        move(in, out, warp_striped, blocked, [] { __syncwarp(); });
    }
    template <class Out>
    SIMT_METHOD void BlockedToWarpStriped(const T (&in)[N], Out (&out)[N]) {
        move(in, out, blocked, warp_striped, [] { __syncwarp(); });
    }
    template <class Out, class Rank>
    SIMT_METHOD void ScatterToBlocked(
        const T (&in)[N], Out (&out)[N], Rank (&ranks)[N], Line line = {__builtin_LINE()}) {
        move(in, out, [&](int i) { return ranks[i]; }, blocked, [&] { __syncthreads(line.number); });
    }
    template <class Out, class Rank>
    SIMT_METHOD void ScatterToStriped(
        const T (&in)[N], Out (&out)[N], Rank (&ranks)[N], Line line = {__builtin_LINE()}) {
        move(in, out, [&](int i) { return ranks[i]; }, striped, [&] { __syncthreads(line.number); });
    }
    SIMT_METHOD void StripedToBlocked(T (&items)[N], Line line = {__builtin_LINE()}) {
        StripedToBlocked(items, items, line);
    }
    SIMT_METHOD void BlockedToStriped(T (&items)[N], Line line = {__builtin_LINE()}) {
        BlockedToStriped(items, items, line);
    }
    SIMT_METHOD void WarpStripedToBlocked(T (&items)[N]) { WarpStripedToBlocked(items, items); }
    SIMT_METHOD void BlockedToWarpStriped(T (&items)[N]) { BlockedToWarpStriped(items, items); }

private:
    TempStorage& temp;
    SIMT_METHOD static TempStorage& own() {
        __shared__ TempStorage storage;
        return storage;
    }
    template <class Out, class From, class To, class Meet>
    SIMT_METHOD void move(const T (&in)[N], Out (&out)[N], From from, To to, Meet meet) {
        for (int i = 0; i < N; ++i) temp.items.put(from(i), in[i]);
        meet();
        for (int i = 0; i < N; ++i) out[i] = temp.items[to(i)];
    }
};
}  // namespace cub
