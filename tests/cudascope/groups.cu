// Cooperative groups, and the mistakes they invite.

#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;

constexpr int WARP = 32;
constexpr int THREADS = 64;
constexpr int TILE = 8;

// ------------------------------------------------------------------------------------------------ correct

struct Partial {  // of an online softmax: more bytes than one shuffle moves
    float m, l, acc;
};

__device__ Partial merge(Partial a, Partial b) {
    const float m = fmaxf(a.m, b.m), scale_a = exp2f(a.m - m), scale_b = exp2f(b.m - m);
    return {m, a.l * scale_a + b.l * scale_b, a.acc * scale_a + b.acc * scale_b};
}

// out[0] … out[9]: what tiles of 8 threads do with x
__global__ void tiles(const int* __restrict__ x,  // [THREADS]
                      int* __restrict__ out) {    // [10, THREADS]
    const auto block = cg::this_thread_block();
    const auto tile = cg::tiled_partition<TILE>(block);
    const int i = block.thread_rank(), v = x[i];
    out[0 * THREADS + i] = cg::reduce(tile, v, cg::plus<int>());
    out[1 * THREADS + i] = cg::reduce(tile, v, cg::greater<int>());
    out[2 * THREADS + i] = cg::inclusive_scan(tile, v);
    out[3 * THREADS + i] = cg::exclusive_scan(tile, v, cg::plus<int>());
    out[4 * THREADS + i] = tile.shfl(v, 3);
    out[5 * THREADS + i] = tile.shfl_down(v, 2);
    out[6 * THREADS + i] = tile.shfl_xor(v, 1);
    out[7 * THREADS + i] = tile.ballot(v > 0);
    out[8 * THREADS + i] = tile.any(v > 90) * 2 + tile.all(v > -90);
    out[9 * THREADS + i] = tile.meta_group_rank() * 100 + tile.thread_rank() * 10 + tile.size();
}

// out[0] … out[5]: what threads do that are together by chance, or by a label
__global__ void coalesced(const int* __restrict__ x,  // [THREADS]
                          int* __restrict__ out) {    // [6, THREADS]
    const auto block = cg::this_thread_block();
    const auto warp = cg::tiled_partition<WARP>(block);
    const int i = block.thread_rank(), v = x[i];
    if (i % 3 == 0) {
        const auto group = cg::coalesced_threads();
        out[0 * THREADS + i] = group.size() * 100 + group.thread_rank();
        out[1 * THREADS + i] = group.shfl(v, 1);
        out[2 * THREADS + i] = cg::reduce(group, v, cg::less<int>());
    }
    const auto label = cg::labeled_partition(warp, v & 3);
    out[3 * THREADS + i] = cg::reduce(label, v, cg::plus<int>());
    out[4 * THREADS + i] = label.size();
    const auto half = cg::binary_partition(warp, v > 0);
    out[5 * THREADS + i] = half.shfl_up(v, 1);
}

// out = the merged partial sums of a warp, which every lane has
__global__ void large_values(const float* __restrict__ x,  // [WARP]
                             float* __restrict__ out) {    // [WARP, 3]
    const auto warp = cg::tiled_partition<WARP>(cg::this_thread_block());
    const int lane = warp.thread_rank();
    const Partial all = cg::reduce(warp, Partial{x[lane], 1.0f, x[lane]}, merge);
    const Partial first = warp.shfl(all, 0);
    out[3 * lane] = first.m, out[3 * lane + 1] = first.l, out[3 * lane + 2] = first.acc;
}

// A function of any group: the sum over its threads, by way of memory.
__device__ int sum(const cg::thread_group& group, int* memory, int value) {
    const int rank = group.thread_rank();
    for (int distance = group.size() / 2; distance > 0; distance /= 2) {
        memory[rank] = value;
        group.sync();
        if (rank < distance) value += memory[rank + distance];
        group.sync();
    }
    return value;
}

// sums[0] = the sum of all, sums[1 + t] = that of the t-th four threads
__global__ void any_group(const int* __restrict__ x,  // [THREADS]
                          int* __restrict__ sums) {   // [1 + THREADS / 4]
    __shared__ int memory[THREADS];
    const auto block = cg::this_thread_block();
    const int i = block.thread_rank(), of_block = sum(block, memory, x[i]);
    const auto four = cg::tiled_partition(block, 4);
    const int of_four = sum(four, memory + i / 4 * 4, x[i]);
    if (i == 0) sums[0] = of_block;
    if (four.thread_rank() == 0) sums[1 + i / 4] = of_four;
}

// ranks[i] = the place of a thread in the grid
__global__ void places(int* ranks) {  // [threads]
    const auto grid = cg::this_grid();
    ranks[grid.thread_rank()] = grid.block_rank() * grid.dim_threads().x + grid.size();
}

// ------------------------------------------------------------------------------------------------ planted

// out = x, reversed within each tile.
__global__ void tile_sync_missing(const int* __restrict__ x,  // [THREADS]
                                  int* __restrict__ out,      // [THREADS]
                                  bool planted) {
    __shared__ int row[THREADS];
    const auto tile = cg::tiled_partition<TILE>(cg::this_thread_block());
    const int i = threadIdx.x, first = i / TILE * TILE;
    row[i] = x[i];  // BUG tile_sync_missing
    if (!planted) tile.sync();
    out[i] = row[first + TILE - 1 - tile.thread_rank()];  // BUG tile_sync_missing
}

// out = x, reversed within each warp, which a smaller tile's sync does not order.
__global__ void tile_too_small(const int* __restrict__ x,  // [THREADS]
                               int* __restrict__ out,      // [THREADS]
                               bool planted) {
    __shared__ int row[THREADS];
    const auto block = cg::this_thread_block();
    const auto tile = cg::tiled_partition<TILE>(block);
    const auto warp = cg::tiled_partition<WARP>(block);
    const int i = threadIdx.x;
    row[i] = x[i];  // BUG tile_too_small
    if (planted) tile.sync();
    else warp.sync();
    out[i] = row[i / WARP * WARP + WARP - 1 - i % WARP];  // BUG tile_too_small
}

// sums[tile] = the sum over a tile, in which half of its threads do not take part.
__global__ void reduce_in_a_branch(const int* __restrict__ x,  // [THREADS]
                                   int* __restrict__ sums,     // [THREADS / TILE]
                                   bool planted) {
    const auto tile = cg::tiled_partition<TILE>(cg::this_thread_block());
    const int i = threadIdx.x;
    int total = 0;
    if (!planted || tile.thread_rank() < TILE / 2) {
        total = cg::reduce(tile, x[i], cg::plus<int>());  // BUG reduce_in_a_branch
    }
    tile.sync();
    if (tile.thread_rank() == 0) sums[tile.meta_group_rank()] = total;
}

// out = x, reversed over the whole grid.
__global__ void grid_sync_missing(const int* __restrict__ x,  // [gridDim.x, THREADS]
                                  int* __restrict__ memory,   // [gridDim.x, THREADS]
                                  int* __restrict__ out,      // [gridDim.x, THREADS]
                                  bool planted) {
    const auto grid = cg::this_grid();
    const int i = grid.thread_rank(), n = grid.size();
    memory[i] = x[i];  // BUG grid_sync_missing
    if (!planted) grid.sync();
    out[i] = memory[n - 1 - i];  // BUG grid_sync_missing
}

// out = x, reversed.
__global__ void copy_without_a_wait(const int* __restrict__ x,  // [THREADS]
                                    int* __restrict__ out,      // [THREADS]
                                    bool planted) {
    __shared__ int row[THREADS];
    const auto block = cg::this_thread_block();
    cg::memcpy_async(block, row, x, sizeof(int) * THREADS);
    if (planted) block.sync();
    else cg::wait(block);
    out[block.thread_rank()] = row[THREADS - 1 - block.thread_rank()];  // BUG copy_without_a_wait
}

// out = x[0] + x[1], reversed: with the mistake one of two copies is waited for.
__global__ void waits_for_one_of_two(const int* __restrict__ x,  // [2, THREADS]
                                     int* __restrict__ out,      // [THREADS]
                                     bool planted) {
    __shared__ int rows[2][THREADS];
    const auto block = cg::this_thread_block();
    cg::memcpy_async(block, rows[0], x, sizeof(rows[0]));
    cg::memcpy_async(block, rows[1], x + THREADS, sizeof(rows[1]));
    if (planted) cg::wait_prior<1>(block);
    else cg::wait_prior<0>(block);
    const int i = THREADS - 1 - block.thread_rank(), first = rows[0][i];
    out[block.thread_rank()] = first + rows[1][i];  // BUG waits_for_one_of_two
}
