// How often each value occurs. Every thread block counts in shared memory first, then adds its counts to the result,
// so that most of the contention stays on chip. Takes num_bins * 4 bytes of dynamic shared memory.

__global__ void histogram(const unsigned char* __restrict__ values,  // [n], each below num_bins
                          int* __restrict__ counts,                  // [num_bins], zero at first
                          int n, int num_bins) {
    extern __shared__ int local_counts[];  // [num_bins]
    for (int bin = threadIdx.x; bin < num_bins; bin += blockDim.x) local_counts[bin] = 0;
    __syncthreads();

    const int stride = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) atomicAdd(&local_counts[values[i]], 1);
    __syncthreads();

    for (int bin = threadIdx.x; bin < num_bins; bin += blockDim.x) {
        if (local_counts[bin] > 0) atomicAdd(&counts[bin], local_counts[bin]);
    }
}
