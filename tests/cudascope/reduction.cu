// Sums and maxima of rows: by one warp, with shuffles alone, and by a thread block, through shared memory.

constexpr int WARP = 32;

__device__ float warp_sum(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, distance);  // every lane ends up with the sum
    }
    return value;
}

// One warp per row: the sum, and how many elements are positive.
__global__ void warp_reduction(const float* __restrict__ x,  // [rows, n]
                               float* __restrict__ sums,     // [rows]
                               int* __restrict__ positive,   // [rows]
                               int rows, int n) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;  // in the thread block
    const int row = blockIdx.x * (blockDim.x / WARP) + warp;
    if (row >= rows) return;  // the whole warp leaves

    float sum = 0.0f;
    int count = 0;
    for (int start = 0; start < n; start += WARP) {
        const float value = start + lane < n ? x[row * n + start + lane] : 0.0f;
        sum += value;
        count += __popc(__ballot_sync(0xffffffff, value > 0.0f));
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        sums[row] = sum;
        positive[row] = count;
    }
}

// One thread block per row: each warp reduces its share, the first warp reduces what the warps found.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) block_reduction(const float* __restrict__ x,  // [rows, n]
                                                           float* __restrict__ sums,     // [rows]
                                                           int n) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ float partial[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* row = x + (long long)blockIdx.x * n;

    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += THREADS) sum += row[i];
    sum = warp_sum(sum);
    if (lane == 0) partial[warp] = sum;
    __syncthreads();

    if (warp > 0) return;
    sum = warp_sum(lane < WARPS ? partial[lane] : 0.0f);
    if (lane == 0) sums[blockIdx.x] = sum;
}
