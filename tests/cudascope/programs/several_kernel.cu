#include "several.cuh"

static __device__ int calls;
__global__ void scale(float* x, int n) {
    extern __shared__ float buffer[];
    int i = threadIdx.x;
    if (i < n) buffer[i] = x[i];  // reads x
    __syncthreads();
    if (i < n) x[i] = buffer[n - 1 - i] * factor[0] + factor[1];
    if (i == 0) calls = 7;
}
