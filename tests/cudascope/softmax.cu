// out = softmax(x) over the last dimension, in float32 whatever T is. One thread block per row.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int WARP = 32;

struct Max {
    static __device__ float zero() { return -INFINITY; }
    static __device__ float apply(float a, float b) { return fmaxf(a, b); }
};

struct Sum {
    static __device__ float zero() { return 0.0f; }
    static __device__ float apply(float a, float b) { return a + b; }
};

// Combines the `value` of every thread of the thread block; all get the result. `partial` has one float per warp.
template <typename Combine, int THREADS>
__device__ float block_reduce(float value, float* partial /* [THREADS / WARP] */) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value = Combine::apply(value, __shfl_xor_sync(0xffffffff, value, distance));
    }
    __syncthreads();  // all have read what an earlier reduction left in `partial`
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = Combine::zero();
    for (int w = 0; w < THREADS / WARP; ++w) value = Combine::apply(value, partial[w]);
    return value;
}

template <typename T, int THREADS = 128>
__global__ void __launch_bounds__(THREADS) softmax(const T* __restrict__ x,  // [rows, n]
                                                   T* __restrict__ out,      // [rows, n]
                                                   int n, float scale) {
    __shared__ float partial[THREADS / WARP];
    const T* row = x + (long long)blockIdx.x * n;
    T* out_row = out + (long long)blockIdx.x * n;

    float m = -INFINITY;
    for (int i = threadIdx.x; i < n; i += THREADS) m = fmaxf(m, scale * float(row[i]));
    m = block_reduce<Max, THREADS>(m, partial);

    float l = 0.0f;
    for (int i = threadIdx.x; i < n; i += THREADS) l += expf(scale * float(row[i]) - m);
    l = block_reduce<Sum, THREADS>(l, partial);

    for (int i = threadIdx.x; i < n; i += THREADS) out_row[i] = T(expf(scale * float(row[i]) - m) / l);
}
