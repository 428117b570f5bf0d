// maxima[row] = the largest of the n numbers of row `row` of x. One thread block of 64 threads per row, n at least 1.
__global__ void block_max(const float* x,  // [rows, n]
                          float* maxima,   // [rows]
                          int n) {
    __shared__ float largest[64];
    float mine = -INFINITY;
    for (int i = threadIdx.x; i < n; i += 64) mine = fmaxf(mine, x[blockIdx.x * n + i]);
    largest[threadIdx.x] = mine;
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (threadIdx.x < half) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);
        __syncthreads();
    }
    if (threadIdx.x == 0) maxima[blockIdx.x] = largest[0];
}
