// cub::BlockLoad and cub::BlockStore: a tile of N items per thread, each thread's own in a row, or by way of an
// exchange, so that neighbouring threads touch neighbouring items.
#pragma once

#include "block_exchange.cuh"

namespace cub {

enum BlockLoadAlgorithm {
    BLOCK_LOAD_DIRECT, BLOCK_LOAD_STRIPED, BLOCK_LOAD_VECTORIZE, BLOCK_LOAD_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE,
    BLOCK_LOAD_WARP_TRANSPOSE_TIMESLICED,
};
enum BlockStoreAlgorithm {
    BLOCK_STORE_DIRECT, BLOCK_STORE_STRIPED, BLOCK_STORE_VECTORIZE, BLOCK_STORE_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE,
    BLOCK_STORE_WARP_TRANSPOSE_TIMESLICED,
};

// How an algorithm of either enum moves items: `at(i)` is the place in memory of item i, before or after the exchange.
template <class T, int X, int N, int algorithm, int Y, int Z>
struct Moves {
    static constexpr bool exchanges = algorithm >= BLOCK_LOAD_TRANSPOSE;
    static constexpr bool in_warps = algorithm >= BLOCK_LOAD_WARP_TRANSPOSE;
    static constexpr bool strided = exchanges || algorithm == BLOCK_LOAD_STRIPED;
    struct Nothing {};
    using Exchange = BlockExchange<T, X, N, false, Y, Z>;
    using Storage = std::conditional_t<exchanges, typename Exchange::TempStorage, Nothing>;

    SIMT_METHOD static int at(int i) {
        return in_warps ? Exchange::warp_striped(i) : strided ? Exchange::striped(i) : Exchange::blocked(i);
    }
};

template <class T, int X, int N, BlockLoadAlgorithm algorithm = BLOCK_LOAD_DIRECT, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockLoad : public Collective<typename Moves<T, X, N, algorithm, Y, Z>::Storage,
                                    BlockLoad<T, X, N, algorithm, Y, Z, LEGACY_PTX_ARCH>> {
    using How = Moves<T, X, N, algorithm, Y, Z>;

public:
    using BlockLoad::Collective::Collective;

    template <class In>
    SIMT_METHOD void Load(In in, T (&items)[N], int valid, T otherwise, Line line = {__builtin_LINE()}) {
        for (T& item : items) item = otherwise;
        Load(in, items, valid, line);
    }
    template <class In>
    SIMT_METHOD void Load(In in, T (&items)[N], int valid = X * Y * Z * N, Line line = {__builtin_LINE()}) {
        for (int i = 0; i < N; ++i)
            if (How::at(i) < valid) items[i] = in[How::at(i)];
        if constexpr (How::in_warps) typename How::Exchange(this->temp).WarpStripedToBlocked(items);
        else if constexpr (How::exchanges) typename How::Exchange(this->temp).StripedToBlocked(items, line);
    }
};

template <class T, int X, int N, BlockStoreAlgorithm algorithm = BLOCK_STORE_DIRECT, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockStore : public Collective<typename Moves<T, X, N, algorithm, Y, Z>::Storage,
                                     BlockStore<T, X, N, algorithm, Y, Z, LEGACY_PTX_ARCH>> {
    using How = Moves<T, X, N, algorithm, Y, Z>;

public:
    using BlockStore::Collective::Collective;

    template <class Out>
    SIMT_METHOD void Store(Out out, T (&items)[N], int valid = X * Y * Z * N, Line line = {__builtin_LINE()}) {
        if constexpr (How::in_warps) typename How::Exchange(this->temp).BlockedToWarpStriped(items);
        else if constexpr (How::exchanges) typename How::Exchange(this->temp).BlockedToStriped(items, line);
        for (int i = 0; i < N; ++i)
            if (How::at(i) < valid) out[How::at(i)] = items[i];
    }
};
}  // namespace cub
