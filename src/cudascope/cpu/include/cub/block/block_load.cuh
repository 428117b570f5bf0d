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

template <class T, int X, int N, BlockLoadAlgorithm algorithm = BLOCK_LOAD_DIRECT, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockLoad {
    using Exchange = BlockExchange<T, X, N, false, Y, Z>;
    static constexpr bool exchanges = algorithm >= BLOCK_LOAD_TRANSPOSE;
    static constexpr bool in_warps = algorithm >= BLOCK_LOAD_WARP_TRANSPOSE;

public:
    struct Nothing {};
    using TempStorage = std::conditional_t<exchanges, typename Exchange::TempStorage, Nothing>;
    SIMT_METHOD BlockLoad(TempStorage& storage) : temp(storage) {}
    SIMT_METHOD BlockLoad() : temp(own()) {}

    template <class In>
    SIMT_METHOD void Load(In in, T (&items)[N], int valid, T otherwise, Line line = {__builtin_LINE()}) {
        for (T& item : items) item = otherwise;
        Load(in, items, valid, line);
    }
    template <class In>
    SIMT_METHOD void Load(In in, T (&items)[N], int valid = X * Y * Z * N, Line line = {__builtin_LINE()}) {
        for (int i = 0; i < N; ++i) {
            int at = in_warps ? Exchange::warp_striped(i)
                : exchanges || algorithm == BLOCK_LOAD_STRIPED ? Exchange::striped(i) : Exchange::blocked(i);
            if (at < valid) items[i] = in[at];
        }
        if constexpr (in_warps) Exchange(temp).WarpStripedToBlocked(items);
        else if constexpr (exchanges) Exchange(temp).StripedToBlocked(items, line);
    }

private:
    TempStorage& temp;
    SIMT_METHOD static TempStorage& own() {
        __shared__ TempStorage storage;
        return storage;
    }
};

template <class T, int X, int N, BlockStoreAlgorithm algorithm = BLOCK_STORE_DIRECT, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockStore {
    using Exchange = BlockExchange<T, X, N, false, Y, Z>;
    static constexpr bool exchanges = algorithm >= BLOCK_STORE_TRANSPOSE;
    static constexpr bool in_warps = algorithm >= BLOCK_STORE_WARP_TRANSPOSE;

public:
    struct Nothing {};
    using TempStorage = std::conditional_t<exchanges, typename Exchange::TempStorage, Nothing>;
    SIMT_METHOD BlockStore(TempStorage& storage) : temp(storage) {}
    SIMT_METHOD BlockStore() : temp(own()) {}

    template <class Out>
    SIMT_METHOD void Store(Out out, T (&items)[N], int valid = X * Y * Z * N, Line line = {__builtin_LINE()}) {
        if constexpr (in_warps) Exchange(temp).BlockedToWarpStriped(items);
        else if constexpr (exchanges) Exchange(temp).BlockedToStriped(items, line);
        for (int i = 0; i < N; ++i) {
            int at = in_warps ? Exchange::warp_striped(i)
                : exchanges || algorithm == BLOCK_STORE_STRIPED ? Exchange::striped(i) : Exchange::blocked(i);
            if (at < valid) out[at] = items[i];
        }
    }

private:
    TempStorage& temp;
    SIMT_METHOD static TempStorage& own() {
        __shared__ TempStorage storage;
        return storage;
    }
};
}  // namespace cub
