// Programs with and without a fault, for test_shares.py: values that are not there or wrong, and programs without an end.
#include <assert.h>

// a sum that begins with no value <<<1, 32>>>
__global__ void unset_sum(const float* in, float* out, int* flags, bool right) {
    float sum;
    for (int i = 0; i < 8; ++i) sum += in[i];  // FAULT unset variable
    out[threadIdx.x] = sum;
}
__global__ void unset_sum_right(const float* in, float* out, int* flags, bool right) {
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += in[i];
    out[threadIdx.x] = sum;
}
// the greatest of some numbers and of no value <<<1, 32>>>
__global__ void unset_greatest(const float* in, float* out, int* flags, bool right) {
    float most;
    for (int i = 0; i < 8; ++i) most = fmaxf(most, in[i]);  // FAULT unset variable
    out[threadIdx.x] = most;
}
__global__ void unset_greatest_right(const float* in, float* out, int* flags, bool right) {
    float most = in[0];
    for (int i = 0; i < 8; ++i) most = fmaxf(most, in[i]);
    out[threadIdx.x] = most;
}
// an element of a shared array that nobody has written <<<1, 32>>>
__global__ void half_a_row(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[64];
    for (int i = threadIdx.x; i < (right ? 64 : 32); i += 32) row[i] = in[i];
    __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];  // FAULT uninitialised
}
// more bins than threads that clear them <<<1, 64>>>
__global__ void bins_not_cleared(const float* in, float* out, int* flags, bool right) {
    __shared__ int counts[128];
    for (int i = threadIdx.x; i < (right ? 128 : 64); i += 64) counts[i] = 0;
    __syncthreads();
    atomicAdd(&counts[2 * threadIdx.x], 1);  // FAULT uninitialised
}
// the halo of a tile is not loaded <<<1, 32>>>
__global__ void no_halo(const float* in, float* out, int* flags, bool right) {
    __shared__ float tile[34];
    tile[threadIdx.x + 1] = in[threadIdx.x];
    if (right && threadIdx.x < 2) tile[33 * threadIdx.x] = 0;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x] + tile[threadIdx.x + 2];  // FAULT uninitialised
}
// the grid is rounded down: the last elements are never written (output) <<<3, 64>>>
__global__ void grid_too_small(const float* in, float* out, int* flags, bool right) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, step = right ? gridDim.x * blockDim.x : 256;
    for (; i < 256; i += step) out[i] = in[i];  // FAULT never written
}
// every second element is written (output) <<<1, 64>>>
__global__ void every_second(const float* in, float* out, int* flags, bool right) {
    for (int i = threadIdx.x; i < 128; i += 64) {
        out[2 * i] = in[2 * i];  // FAULT never written
        if (right) out[2 * i + 1] = in[2 * i + 1];
    }
}
// a sum is added to an output that has no value (output) <<<4, 64>>>
__global__ void adds_to_output(const float* in, float* out, int* flags, bool right) {
    int i = blockIdx.x * 64 + threadIdx.x;
    if (right) out[i] = in[i];
    else out[i] += in[i];  // FAULT unwritten output
}
// an assertion that does not hold <<<1, 32>>>
__global__ void asserts(const float* in, float* out, int* flags, bool right) {
    assert(right || threadIdx.x < 31);  // FAULT assertion
    out[threadIdx.x] = 1;
}
// a division by zero <<<1, 32>>>
__global__ void divides(const float* in, float* out, int* flags, bool right) {
    out[threadIdx.x] = 100 / (int)(threadIdx.x + right);  // FAULT division by zero
}
// a trap <<<1, 32>>>
__global__ void traps(const float* in, float* out, int* flags, bool right) {
    if (!right && threadIdx.x == 3) __trap();  // FAULT assertion
    out[threadIdx.x] = 1;
}
// a recursion without an end <<<1, 1>>>
__device__ __noinline__ int descend(int depth, bool right) {  // FAULT stack overflow
    volatile int own[256];
    own[depth & 255] = depth;
    return right && depth > 3 ? 0 : descend(depth + 1, right) + own[depth & 255];
}
__global__ void recursion(const float* in, float* out, int* flags, bool right) { out[0] = descend(0, right); }
// a flag that nobody sets <<<2, 1>>>
__global__ void flag_not_set(const float* in, float* out, int* flags, bool right) {
    if (blockIdx.x == 0 && right) atomicExch(flags, 1);
    if (blockIdx.x == 1)
        while (atomicAdd(flags, 0) == 0) {}  // FAULT spin
    out[blockIdx.x] = 1;
}
// a lock that is taken twice <<<1, 1>>>
__global__ void lock_taken_twice(const float* in, float* out, int* flags, bool right) {
    for (int i = 0; i < 2; ++i) {
        while (atomicCAS(flags, 0, 1)) {}  // FAULT spin
        if (right) atomicExch(flags, 0);
    }
    out[0] = 1;
}
// a barrier of the grid by a counter that expects one thread block too many <<<3, 1>>>
__global__ void one_too_many(const float* in, float* out, int* flags, bool right) {
    atomicAdd(flags, 1);
    while (atomicAdd(flags, 0) < gridDim.x + (right ? 0 : 1)) {}  // FAULT spin
    out[blockIdx.x] = 1;
}
// a loop whose step was forgotten <<<1, 1>>>
__global__ void no_step(const float* in, float* out, int* flags, bool right) {
    volatile float* sum = out;
    for (int i = 0; i < 4;) {
        *sum = in[i];  // FAULT spin
        if (right) ++i;
    }
}
// an array of which only a part gets a value <<<1, 32>>>
__global__ void partly_set(const float* in, float* out, int* flags, bool right) {
    float own[4];
    for (int i = 0; i < (right ? 4 : 3); ++i) own[i] = in[i];
    out[threadIdx.x] = own[threadIdx.x % 4];  // MISSED unset variable
}
// the last tile keeps values of the tile before <<<1, 32>>>
__global__ void stale_tail(const float* in, float* out, int* flags, bool right) {
    __shared__ float tile[32];
    float sum = 0;
    for (int start = 0; start < 40; start += 32) {
        bool is_there = start + threadIdx.x < 40;
        if (right || is_there) tile[threadIdx.x] = is_there ? in[start + threadIdx.x] : 0;
        __syncthreads();
        for (int k = 0; k < 32; ++k) sum += tile[k];  // MISSED
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}
// a tree of sums over a number of threads that is no power of two <<<1, 96>>>
__global__ void lost_elements(const float* in, float* out, int* flags, bool right) {
    __shared__ float part[128];
    part[threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x < 32) part[96 + threadIdx.x] = 0;
    __syncthreads();
    for (int step = right ? 64 : 48; step; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];  // MISSED
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = part[0];
}
// a shift by the width of the number <<<1, 32>>>
__global__ void shift_too_far(const float* in, float* out, int* flags, bool right) {
    out[threadIdx.x] = 1u << (right ? threadIdx.x : threadIdx.x + 32);  // MISSED
}
