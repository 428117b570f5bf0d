// Programs with and without a fault, for test_shares.py: threads and lanes that do not come together.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

// a barrier that some threads go round, in a kernel whose guard nobody takes <<<2, 64>>>
__global__ void guarded(const float* in, float* out, int* flags, bool right) {
    if (blockIdx.x >= 2) return;
    __shared__ float row[64];
    if (right || threadIdx.x < 40) {
        row[threadIdx.x] = in[threadIdx.x];
        __syncthreads();  // FAULT barrier in a branch
    }
    out[64 * blockIdx.x + threadIdx.x] = 1;
}
// the same with a return of a lambda and as the last statement <<<1, 64>>>
__global__ void returns_at_the_end(const float* in, float* out, int* flags, bool right) {
    auto twice = [](float x) { return 2 * x; };
    if (right || threadIdx.x % 2) __syncthreads();  // FAULT barrier in a branch
    out[threadIdx.x] = twice(in[threadIdx.x]);
    return;
}
// a barrier in a loop of which threads make different numbers of turns <<<1, 64>>>
__global__ void unequal_turns(const float* in, float* out, int* flags, bool right) {
    for (int i = 0; i < (right ? 3 : threadIdx.x < 32 ? 2 : 3); ++i) __syncthreads();  // FAULT barrier in a branch
    out[threadIdx.x] = 1;
}
// a barrier in each arm of an if <<<1, 64>>>
__global__ void two_arms(const float* in, float* out, int* flags, bool right) {
    if (right || threadIdx.x < 32) {
        out[threadIdx.x] = 1;
        __syncthreads();  // FAULT different barriers
    } else {
        out[threadIdx.x] = 2;
        __syncthreads();  // FAULT different barriers
    }
}
// a thread returns before a barrier <<<1, 64>>>
__global__ void returned_before(const float* in, float* out, int* flags, bool right) {
    if (!right && threadIdx.x >= 48) return;
    out[threadIdx.x] = 1;
    __syncthreads();  // FAULT left before barrier
    out[threadIdx.x] += 1;
}
// a shuffle from a lane that has left <<<1, 32>>>
__global__ void lane_has_left(const float* in, float* out, int* flags, bool right) {
    if (!right && threadIdx.x >= 20) return;
    out[threadIdx.x] = __shfl_down_sync(~0u, in[threadIdx.x], 4);  // FAULT lane gone
}
// a full mask where four lanes come <<<1, 32>>>
__global__ void full_mask(const float* in, float* out, int* flags, bool right) {
    if (threadIdx.x < 4) out[threadIdx.x] = __shfl_sync(right ? 0xfu : ~0u, in[threadIdx.x], right ? 1 : 9);  // FAULT lane gone
}
// a mask that does not name the own lane <<<1, 32>>>
__global__ void own_lane_not_named(const float* in, float* out, int* flags, bool right) {
    out[threadIdx.x] = __shfl_xor_sync(right ? ~0u : 0xffffu, in[threadIdx.x], 1);  // FAULT lane not in mask
}
// halves of a warp pass different masks <<<1, 32>>>
__global__ void different_masks(const float* in, float* out, int* flags, bool right) {
    unsigned mask = threadIdx.x < 16 ? (right ? 0xffffu : ~0u) : 0xffff0000u;
    out[threadIdx.x] = __shfl_xor_sync(mask, in[threadIdx.x], 1);  // FAULT different masks
}
// a shuffle of all lanes in a branch <<<1, 32>>>
__global__ void shuffle_in_a_branch(const float* in, float* out, int* flags, bool right) {
    float own = in[threadIdx.x];
    if (right || threadIdx.x % 16 == 0) own += __shfl_xor_sync(~0u, own, 16);  // FAULT warp function in a branch
    own += __shfl_xor_sync(~0u, own, 1);
    out[threadIdx.x] = own;
}
// one half shuffles by xor and the other up <<<1, 32>>>
__global__ void xor_and_up(const float* in, float* out, int* flags, bool right) {
    float own = in[threadIdx.x];
    if (right || threadIdx.x < 16) own = __shfl_xor_sync(~0u, own, 1);  // FAULT deadlock
    else own = __shfl_up_sync(~0u, own, 1);  // FAULT deadlock
    out[threadIdx.x] = own;
}
// one half votes any and the other all <<<1, 32>>>
__global__ void any_and_all(const float* in, float* out, int* flags, bool right) {
    int yes = threadIdx.x > 3;
    out[threadIdx.x] = right || threadIdx.x < 16 ? __any_sync(~0u, yes) : __all_sync(~0u, yes);  // FAULT deadlock
}
// one half shuffles while the other waits for the warp <<<1, 32>>>
__global__ void shuffle_and_syncwarp(const float* in, float* out, int* flags, bool right) {
    float own = in[threadIdx.x];
    if (right || threadIdx.x < 16) own = __shfl_sync(~0u, own, 0);  // FAULT deadlock
    else __syncwarp();
    out[threadIdx.x] = own;
}
// a lane reads from a lane that its mask does not name <<<1, 32>>>
__global__ void beyond_the_mask(const float* in, float* out, int* flags, bool right) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, in[threadIdx.x], 8, right ? 16 : 32);  // FAULT lane not in mask
}
// segments of twelve lanes <<<1, 32>>>
__global__ void width_of_twelve(const float* in, float* out, int* flags, bool right) {
    out[threadIdx.x] = __shfl_sync(~0u, in[threadIdx.x], 3, right ? 16 : 12);  // FAULT argument
}
// the lanes that a vote was for, and one more, add their numbers <<<1, 32>>>
__global__ void reduce_more(const float* in, float* out, int* flags, bool right) {
    int lane = threadIdx.x;
    unsigned mask = __ballot_sync(~0u, lane < 8);
    if (lane < (right ? 8 : 9)) out[lane] = __reduce_add_sync(mask, lane);  // FAULT lane not in mask
}
// a thread block goes round a barrier of the grid <<<3, 32>>>
__global__ void grid_skipped(const float* in, float* out, int* flags, bool right) {
    auto grid = cg::this_grid();
    out[32 * blockIdx.x + threadIdx.x] = 1;
    if (right || blockIdx.x > 0) grid.sync();  // FAULT deadlock
}
// a thread block comes to a barrier of the grid once more than the others <<<3, 32>>>
__global__ void grid_once_more(const float* in, float* out, int* flags, bool right) {
    auto grid = cg::this_grid();
    for (int i = 0; i < (right ? 2 : 2 + (blockIdx.x == 1)); ++i) grid.sync();  // FAULT deadlock
    out[32 * blockIdx.x + threadIdx.x] = 1;
}
// the thread that counts its thread block leaves before a barrier of the grid <<<3, 32>>>
__global__ void grid_without_thread_0(const float* in, float* out, int* flags, bool right) {
    auto grid = cg::this_grid();
    if (!right && threadIdx.x == 0) return;
    grid.sync();  // FAULT deadlock
    out[32 * blockIdx.x + threadIdx.x] = 1;
}
// a tile of a warp orders a tile only <<<1, 64>>>
__global__ void tile_for_block(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[64];
    auto tile = cg::tiled_partition<32>(cg::this_thread_block());
    row[threadIdx.x] = in[threadIdx.x];  // FAULT race
    if (right) cg::this_thread_block().sync();
    else tile.sync();
    out[threadIdx.x] = row[63 - threadIdx.x];  // FAULT race
}
// lanes that are there by chance are taken for all that shall come <<<1, 32>>>
__global__ void active_lanes(const float* in, float* out, int* flags, bool right) {
    float own = in[threadIdx.x];
    if (threadIdx.x < 20) {
        unsigned mask = right ? 0xfffffu : __activemask();
        own += __shfl_sync(mask, own, 0);  // FAULT lane not in mask
    }
    out[threadIdx.x] = own;
}
