__global__ void histogram(const int* x, int* counts, int n) {
    __shared__ int bins[10];
    for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&bins[x[i]], 1);
    __syncthreads();
    if (threadIdx.x < 10) counts[threadIdx.x] = bins[threadIdx.x];
}
