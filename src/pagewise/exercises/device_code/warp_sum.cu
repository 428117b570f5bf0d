// sums[row] = the sum of the 32 numbers of row `row` of x. One thread block per row, of one warp.
__global__ void warp_sum(const float* x,  // [rows, 32]
                         float* sums) {   // [rows]
    const unsigned ALL_LANES = 0xffffffff;
    float sum = x[blockIdx.x * 32 + threadIdx.x];
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(ALL_LANES, sum, distance);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
