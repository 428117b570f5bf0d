// The main of a program of several files. Each has an `extern __shared__` array, and a variable of the same name.
#include <cstdio>
#include <cstdlib>

#include "several.cuh"

__constant__ float factor[2];
static __device__ int calls;
static __global__ void count(int* out) {
    extern __shared__ float others[];
    others[atomicAdd(&calls, 1)] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) *out = calls;
}

int main(int argc, char** argv) {
    int n = argc > 1 ? atoi(argv[1]) : 8, counted;
    float h[64], f[2] = {3, 1}, *d;
    int* out;
    for (int i = 0; i < n; ++i) h[i] = i;
    cudaMalloc(&d, n * sizeof(float));
    cudaMalloc(&out, sizeof(int));
    cudaMemcpyToSymbol(factor, f, sizeof(f));
    cudaMemcpy(d, h, n * sizeof(float), cudaMemcpyHostToDevice);
    scale<<<1, 64, 64 * sizeof(float)>>>(d, argc > 2 ? atoi(argv[2]) : n);
    count<<<1, 32, 128>>>(out);
    cudaMemcpy(h, d, n * sizeof(float), cudaMemcpyDeviceToHost);
    cudaMemcpy(&counted, out, sizeof(int), cudaMemcpyDeviceToHost);
    printf("sum %g, counted %d\n", sum_of(h, n), counted);
    return twice(n);
}
