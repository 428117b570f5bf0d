// Programs with and without a fault, for test_shares.py: accesses that nothing orders.
#include <cuda_pipeline.h>

// no barrier between load and use <<<1, 64>>>
__global__ void reversed(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[64];
    row[threadIdx.x] = in[threadIdx.x];  // FAULT race
    if (right) __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];  // FAULT race
}
// no barrier at the end of the loop over tiles <<<1, 64>>>
__global__ void tile_loop(const float* in, float* out, int* flags, bool right) {
    __shared__ float tile[64];
    float sum = 0;
    for (int start = 0; start < 256; start += 64) {
        tile[threadIdx.x] = in[start + threadIdx.x];  // FAULT race
        __syncthreads();
        for (int k = 0; k < 64; ++k) sum += tile[k];  // FAULT race
        if (right) __syncthreads();
    }
    out[threadIdx.x] = sum;
}
// a tree of sums without a barrier <<<1, 128>>>
__global__ void tree(const float* in, float* out, int* flags, bool right) {
    __shared__ float part[128];
    part[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    for (int step = 64; step; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];  // FAULT race
        if (right) __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = part[0];
}
// the last steps of a tree, in a warp, without __syncwarp <<<1, 32>>>
__global__ void warp_tail(const float* in, float* out, int* flags, bool right) {
    __shared__ float part[32];
    part[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    for (int step = 16; step; step /= 2) {
        float other = threadIdx.x < step ? part[threadIdx.x + step] : 0;  // FAULT race
        if (right) __syncwarp();
        part[threadIdx.x] += other;  // FAULT race
        if (right) __syncwarp();
    }
    out[threadIdx.x] = part[0];
}
// a prefix sum in place <<<1, 64>>>
__global__ void prefix(const float* in, float* out, int* flags, bool right) {
    __shared__ float sums[64];
    int t = threadIdx.x;
    sums[t] = in[t];
    __syncthreads();
    for (int step = 1; step < 64; step *= 2) {
        float before = t >= step ? sums[t - step] : 0;  // FAULT race
        if (right) __syncthreads();
        sums[t] += before;  // FAULT race
        __syncthreads();
    }
    out[t] = sums[t];
}
// a histogram without atomics <<<1, 64>>>
__global__ void histogram(const float* in, float* out, int* flags, bool right) {
    __shared__ int counts[4];
    if (threadIdx.x < 4) counts[threadIdx.x] = 0;
    __syncthreads();
    if (right) atomicAdd(&counts[threadIdx.x % 4], 1);
    else counts[threadIdx.x % 4]++;  // FAULT race
    __syncthreads();
    if (threadIdx.x < 4) out[threadIdx.x] = counts[threadIdx.x];
}
// a total of all thread blocks without atomics <<<4, 32>>>
__global__ void total(const float* in, float* out, int* flags, bool right) {
    if (right) atomicAdd(out, in[threadIdx.x]);
    else out[0] += in[threadIdx.x];  // FAULT race
}
// the greatest element by check and store <<<4, 32>>>
__global__ void greatest(const float* in, float* out, int* flags, bool right) {
    int mine = (int)in[threadIdx.x] + threadIdx.x;
    if (right) atomicMax(flags, mine);
    else if (mine > flags[0]) flags[0] = mine;  // FAULT race
}
// all threads store one value <<<1, 64>>>
__global__ void any_positive(const float* in, float* out, int* flags, bool right) {
    if (in[threadIdx.x] > 0) {
        if (right) atomicExch(flags, 1);
        else flags[0] = 1;  // FAULT same value
    }
}
// a counter of shared memory is set back too early <<<1, 64>>>
__global__ void counter_set_back(const float* in, float* out, int* flags, bool right) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (int turn = 0; turn < 2; ++turn) {
        atomicAdd(&count, 1);
        __syncthreads();
        out[threadIdx.x] = count;  // FAULT race
        if (right) __syncthreads();
        if (threadIdx.x == 0) count = 0;  // FAULT race
        __syncthreads();
    }
}
// a cell and its neighbours are updated in place <<<4, 64>>>
__global__ void life(const float* in, float* out, int* flags, bool right) {
    int i = blockIdx.x * 64 + threadIdx.x;
    float sum = right ? in[i] + in[(i + 1) % 256] : out[i] + out[(i + 1) % 256];  // FAULT race
    out[i] = sum;  // FAULT race
}
// elements are appended by a plain counter <<<1, 64>>>
__global__ void append(const float* in, float* out, int* flags, bool right) {
    int place = right ? atomicAdd(flags, 1) : flags[0]++;  // FAULT race
    out[place] = in[threadIdx.x];
}
// two thread blocks share their last and first element <<<4, 64>>>
__global__ void overlapping(const float* in, float* out, int* flags, bool right) {
    int i = blockIdx.x * (right ? 64 : 63) + threadIdx.x;
    out[i] = in[i] + blockIdx.x;  // FAULT race
}
// a value is handed over without a fence <<<2, 32>>>
__global__ void hand_over(const float* in, float* out, int* flags, bool right) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        out[0] = in[0];  // FAULT race
        if (right) __threadfence();
        atomicExch(flags, 1);
    } else {
        while (atomicAdd(flags, 0) == 0) {}
        __threadfence();
        out[1] = out[0];  // FAULT race
    }
}
// a value is handed over by a fence for one thread block <<<2, 32>>>
__global__ void block_fence(const float* in, float* out, int* flags, bool right) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        out[0] = in[0];  // FAULT race
        if (right) __threadfence();
        else __threadfence_block();
        atomicExch(flags, 1);
    } else {
        while (atomicAdd(flags, 0) == 0) {}
        __threadfence();
        out[1] = out[0];  // FAULT race
    }
}
// thread blocks count together by an atomic of block scope <<<4, 32>>>
__global__ void block_counter(const float* in, float* out, int* flags, bool right) {
    if (right) atomicAdd(flags, 1);
    else atomicAdd_block(flags, 1);  // FAULT small scope
}
// the reader of a flag has no fence <<<2, 32>>>
__global__ void no_acquire(const float* in, float* out, int* flags, bool right) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        out[0] = in[0];
        __threadfence();
        atomicExch(flags, 1);
    } else {
        while (atomicAdd(flags, 0) == 0) {}
        if (right) __threadfence();
        out[1] = out[0];  // FAULT no acquire
    }
}
// the last thread block sums up parts that were stored without a fence <<<4, 32>>>
__global__ void last_block(const float* in, float* out, int* flags, bool right) {
    __shared__ bool is_last;
    out[1 + blockIdx.x * 32 + threadIdx.x] = in[threadIdx.x];  // FAULT race
    if (right) __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(flags, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x) return;
    __threadfence();
    for (int i = 0; i < 128; ++i) out[0] += out[1 + i];  // FAULT race
}
// a lock that is released without a fence <<<4, 1>>>
__global__ void lock(const float* in, float* out, int* flags, bool right) {
    while (atomicCAS(flags, 0, 1)) {}
    __threadfence();
    out[0] += in[blockIdx.x];  // FAULT race
    if (right) __threadfence();
    atomicExch(flags, 0);
}
// a flag that is set before the value <<<2, 1>>>
__global__ void flag_first(const float* in, float* out, int* flags, bool right) {
    volatile int* flag = flags;
    if (blockIdx.x == 0) {
        if (right) out[0] = in[0];
        __threadfence();
        *flag = 1;
        if (!right) out[0] = in[0];  // FAULT race
    } else {
        while (*flag == 0) {}
        __threadfence();
        out[1] = out[0];  // FAULT race
    }
}
// an asynchronous copy is used without a wait <<<1, 32>>>
__global__ void no_wait(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[32];
    __pipeline_memcpy_async(&row[threadIdx.x], &in[threadIdx.x], 4);
    __pipeline_commit();
    if (right) __pipeline_wait_prior(0);
    out[threadIdx.x] = row[threadIdx.x];  // FAULT copy in flight
    __pipeline_wait_prior(0);
}
// the copies of the others are used after a wait for the own ones <<<1, 64>>>
__global__ void own_wait(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[64];
    __pipeline_memcpy_async(&row[threadIdx.x], &in[threadIdx.x], 4);
    __pipeline_commit();
    __pipeline_wait_prior(0);  // FAULT race
    if (right) __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];  // FAULT race copy in flight
}
// two buffers and one barrier less than they need <<<1, 64>>>
__global__ void two_buffers(const float* in, float* out, int* flags, bool right) {
    __shared__ float buffer[2][64];
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
        buffer[right ? i % 2 : 0][threadIdx.x] = in[64 * i + threadIdx.x];  // FAULT race
        __syncthreads();
        sum += buffer[right ? i % 2 : 0][63 - threadIdx.x];  // FAULT race
    }
    out[threadIdx.x] = sum;
}
// a warp's leader stores, and the others read at once <<<1, 32>>>
__global__ void leader(const float* in, float* out, int* flags, bool right) {
    __shared__ float first;
    if (threadIdx.x == 0) first = in[0];  // FAULT race
    if (right) __syncwarp();
    out[threadIdx.x] = first;  // FAULT race
}
// a vote is taken for a barrier <<<1, 32>>>
__global__ void vote_as_barrier(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[32];
    row[threadIdx.x] = in[threadIdx.x];  // FAULT race
    if (right) __syncwarp();
    else __any_sync(~0u, 1);
    out[threadIdx.x] = row[31 - threadIdx.x];  // FAULT race
}
