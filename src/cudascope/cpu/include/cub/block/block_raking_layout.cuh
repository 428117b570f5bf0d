// cub::BlockRakingLayout: a value of each thread in shared memory, for one warp to rake up in segments.
#pragma once

#include "../operators.cuh"

namespace cub {
template <class T, int THREADS, int LEGACY_PTX_ARCH = 0>
struct BlockRakingLayout {
    enum {
        SHARED_ELEMENTS = THREADS,
        MAX_RAKING_THREADS = THREADS < 32 ? THREADS : 32,
        SEGMENT_LENGTH = (SHARED_ELEMENTS + MAX_RAKING_THREADS - 1) / MAX_RAKING_THREADS,
        RAKING_THREADS = (SHARED_ELEMENTS + SEGMENT_LENGTH - 1) / SEGMENT_LENGTH,
        USE_SEGMENT_PADDING = SEGMENT_LENGTH % 2 == 0 && SEGMENT_LENGTH > 2,  // against bank conflicts
        GRID_ELEMENTS = RAKING_THREADS * (SEGMENT_LENGTH + USE_SEGMENT_PADDING),
        UNGUARDED = SHARED_ELEMENTS % RAKING_THREADS == 0,
    };
    struct TempStorage : Uninitialized<T[GRID_ELEMENTS]> {};
    SIMT_METHOD static T* PlacementPtr(TempStorage& temp, unsigned thread) {
        return temp.Alias() + thread + (USE_SEGMENT_PADDING ? thread / SEGMENT_LENGTH : 0);
    }
    SIMT_METHOD static T* RakingPtr(TempStorage& temp, unsigned thread) {
        return temp.Alias() + thread * (SEGMENT_LENGTH + USE_SEGMENT_PADDING);
    }
};
}  // namespace cub
