// Kinds of faults, for test_kinds_of_faults.py: each kernel has several of one kind, and right relatives.
#include <cooperative_groups.h>
#include <cooperative_groups/scan.h>

__constant__ float taps[8];
__device__ int table[8];
__device__ const int primes[4] = {2, 3, 5, 7};
static __device__ float zeros[6];

__global__ void read_variables(float* out, int which, int i) {
    static const int squares[5] = {0, 1, 4, 9, 16};
    const int* through = table;
    const char* text = "words";
    if (which == 0) out[0] = taps[i];
    if (which == 1) out[0] = table[i];
    if (which == 2) out[0] = through[i];
    if (which == 3) out[0] = zeros[i];
    if (which == 4) out[0] = primes[i];
    if (which == 5) out[0] = squares[i];
    if (which == 6) out[0] = text[i];
    if (which == 7) table[i] = 1;
}

__device__ void all_threads() { __syncthreads(); }
__global__ void early_returns(float* out, int which, int n) {
    if (which < 0) return;
    if (which == 0 && threadIdx.x >= n) return;
    if (which == 1) {
        if (threadIdx.x < n) __syncthreads();  // round 1
    } else if (which == 2) {
        for (int i = 0; i < n; ++i) {
            __syncthreads();
            if (threadIdx.x >= 32) return;
        }
    } else if (which == 3) {
        if (threadIdx.x < n) __syncthreads();  // round 3
        if (threadIdx.x >= 50) return;
    }
    if (which == 4 && threadIdx.x >= n) return;
    if (which == 4) all_threads();
    if (which == 5) {
        if (blockIdx.x == 0 && threadIdx.x >= n) return;
        if (blockIdx.x == 0 || threadIdx.x < n) __syncthreads();  // round 5
    }
    if (which == 0) __syncthreads();
    out[64 * blockIdx.x + threadIdx.x] = 1;
}
__global__ void grid_barrier(float* out, int missing) {
    auto grid = cooperative_groups::this_grid();
    if (blockIdx.x != missing) grid.sync();
    out[blockIdx.x * 32 + threadIdx.x] = 1;
}

__global__ void lanes_apart(int* out, int which) {
    int lane = threadIdx.x, v = lane;
    if (which == 0) v = lane < 16 ? __shfl_xor_sync(~0u, v, 1) : __shfl_up_sync(~0u, v, 1);
    if (which == 1) v = lane < 16 ? __all_sync(~0u, v) : __any_sync(~0u, v);
    if (which == 2) v = lane < 16 ? __ballot_sync(~0u, v > 3) : __any_sync(~0u, v > 3);
    if (which == 3) {
        if (lane < 16) v = __match_any_sync(~0u, v);
        else { int all; v = __match_all_sync(~0u, v, &all); }
    }
    if (which == 4) v = __shfl_xor_sync(lane < 16 ? ~0u : 0xffff0000u, v, 1);
    if (which == 5) v = __shfl_xor_sync(lane < 16 ? 0x1ffffu : 0xffff0000u, v, 1);
    if (which == 6) v = __any_sync(lane < 30 ? ~0u : 3u << 30, v > 40);
    if (which == 7) {
        if ((lane & 15) == 0) v += __shfl_xor_sync(~0u, v, 16);
        v += __shfl_xor_sync(~0u, v, 1);
    }
    if (which == 8) {
        if (lane > 3) v += __shfl_down_sync(~0u, v, 1);
        v += __shfl_down_sync(~0u, v, 2);
    }
    if (which == 9) {  // the first of three functions is in a branch
        if (lane == 5) v += __shfl_xor_sync(~0u, v, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        v += __shfl_xor_sync(~0u, v, 4);
    }
    out[lane] = v;
}

__global__ void lanes_together(int* out, int which) {
    int lane = threadIdx.x, v = lane;
    if (which == 0) {  // one function and one mask, in two places
        if (lane & 1) v = __all_sync(~0u, v >= 0);
        else v = __all_sync(~0u, v >= 1);
    }
    if (which == 1) {
        if (lane < 16) v = __shfl_xor_sync(0xffffu, v, 1);
        v = __shfl_xor_sync(~0u, v, 1);
    }
    if (which == 2) {  // halves that part, one of which leaves
        v += __shfl_xor_sync(lane < 16 ? 0xffffu : 0xffff0000u, v, 1);
        if (lane >= 16) { out[lane] = v; return; }
        __syncwarp();
        v += __shfl_xor_sync(~0u, v, 1);
    }
    if (which == 3) {  // a mask that follows the lanes that are left
        unsigned left = ~0u;
        for (int i = 0; i < 32; ++i) {
            left = __ballot_sync(left, lane >= i);
            if (lane < i) break;
            v += __shfl_sync(left, v, 31);
        }
    }
    if (which == 4) {  // a half meets alone and leaves, and the other half waits for the warp
        if (lane >= 16) { out[lane] = __shfl_xor_sync(0xffff0000u, v, 1); return; }
        __syncwarp();
    }
    if (which == 5) {  // two places, and then the lanes of one leave
        if (lane & 1) v = __all_sync(~0u, v >= 0);
        else v = __all_sync(~0u, v >= 1);
        if (lane & 1) { out[lane] = v; return; }
        v += __shfl_xor_sync(~0u, v, 2);
    }
    if (which == 6 || which == 7) {  // one lane in another place, once
        if (which == 6 && lane == 31) return;
        for (int i = 0; i < 2; ++i) {
            if (i == 0 && lane == 0) v = __all_sync(~0u, v >= 0);
            else v = __all_sync(~0u, v >= 1);
            if (which == 7 && lane < 2) { out[lane] = v; return; }
        }
    }
    if (which == 8) {  // two places, together again, and then some leave
        if (lane & 1) v = __all_sync(~0u, v >= 0);
        else v = __all_sync(~0u, v >= 1);
        for (int i = 0; i < 2; ++i) {
            v += __shfl_xor_sync(~0u, v, 2);
            if (lane & 1) { out[lane] = v; return; }
        }
    }
    if (which == 9 || which == 10) {  // a half meets alone, then all meet, and then the half leaves
        if (lane >= 16) v += __shfl_xor_sync(0xffff0000u, v, 1);
        if (which == 9) v += __shfl_xor_sync(~0u, v, 1);
        else __syncthreads();
        if (lane >= 16) { out[lane] = v; return; }
        v += __shfl_xor_sync(0x1ffffu, v, 1);
    }
    out[lane] = v;
}

__global__ void in_memory(float* out, int which, int i) {
    __shared__ float row[64];
    __shared__ __align__(4) short words[16];
    row[threadIdx.x] = 1;
    if (threadIdx.x < 16) words[threadIdx.x] = 1;
    __syncthreads();
    if (which == 0) out[0] = row[i];
    if (which == 1) out[0] = *(int*)&words[i];
    if (which == 2) atomicAdd(&row[i], 1.0f);
    if (which == 3) { float own[8]; for (int k = 0; k < 8; ++k) own[k] = k; float4 four = *(float4*)&own[i]; out[0] = four.x + four.w; }
    if (which == 4) { float2 own[4]; for (int k = 0; k < 4; ++k) own[k] = {1.0f * i, 2}; float4 four = *(float4*)&own[i]; out[0] = four.x + four.w; }
    if (which == 5) { int a = i, *at = &a; float own[2] = {1.0f * i, 2}; float2 two = *(float2*)own; out[0] = two.x + two.y + *at; }
    if (which >= 6) {
        int* mine = (int*)malloc(16);
        mine[0] = 1;
        if (which == 6) free(mine);
        out[threadIdx.x] = mine[which == 7 ? 4 : which == 8 ? -1 : 0];
        if (which > 6) free(mine);
    }
}

__global__ void variable_of(float* out, int owner, bool scan) {
    __shared__ float* address;
    float own = 1 + threadIdx.x;
    if (scan) {  // the last lane works with the variables of all lanes
        auto tile = cooperative_groups::tiled_partition<32>(cooperative_groups::this_thread_block());
        out[threadIdx.x] = cooperative_groups::inclusive_scan(tile, own, [&](float a, float b) { return a + b + 0 * own; });
        return;
    }
    if (threadIdx.x == owner) address = &own;
    __syncthreads();
    if (threadIdx.x == 16) out[0] = *address;
    __syncthreads();
}

__global__ void moved(const float* x, float* out) {
    *(float4*)(out + 1) = *(const float4*)(x + 1);
    out[0] = 7;
}

__global__ void one_barrier(const float* in, float* out, int which) {
    __shared__ float a[64], b[64];
    int t = threadIdx.x;
    if (which == 0) {
        a[t] = in[t];
        b[t] = in[t] + 1;
        out[t] = a[63 - t];
        out[64 + t] = b[63 - t];
    }
    if (which == 1) {
        for (int i = 0; i < 2; ++i) {
            a[t] = in[t];
            __syncthreads();
            out[t] = a[63 - t];
        }
    }
    if (which == 2) {
        a[t] = in[t];
        out[t] = a[63 - t];
        __syncthreads();
        b[t] = in[t];
        out[64 + t] = b[63 - t];
    }
}

// 0 to 2 take the lanes that are there for all that will come, 3 to 5 for what they are.
__global__ void lanes_there(int which, int* out) {
    int lane = threadIdx.x, sum = lane;
    if (lane >= 24) return;
    unsigned there = which % 3 == 2 ? 0 : __activemask();
    if (which == 0) sum = __shfl_sync(there, lane, 5);  // there 0
    if (which == 1)
        for (int step = 16; step; step /= 2) sum += __shfl_down_sync(there, sum, step);  // there 1
    if (which == 2) sum = cooperative_groups::coalesced_threads().shfl(lane, 0);  // there 2
    if (which == 3 && lane == __ffs(there) - 1) atomicAdd(out + 32, __popc(there));
    if (which == 4) atomicAdd(out + 32, __popc(__ballot_sync(there, lane % 2)) * (lane == __ffs(there) - 1));
    if (which == 5) {
        auto group = cooperative_groups::coalesced_threads();
        if (group.thread_rank() == 0) atomicAdd(out + 32, group.size());
    }
    out[lane] = sum;
}
