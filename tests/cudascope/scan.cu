// Running sums: out[row, i] = in[row, 0] + … + in[row, i]. One thread block per row.

constexpr int WARP = 32;

// The sum over the lanes up to and including this one.
__device__ int warp_scan(int value) {
    const int lane = threadIdx.x % WARP;
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) inclusive_scan(const int* __restrict__ in,  // [rows, n]
                                                          int* __restrict__ out,       // [rows, n]
                                                          int n) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ int warp_sums[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const long long row = (long long)blockIdx.x * n;

    int carry = 0;  // the sum of all chunks before this one
    for (int start = 0; start < n; start += THREADS) {
        const int i = start + threadIdx.x;
        const int sum = warp_scan(i < n ? in[row + i] : 0);
        if (lane == WARP - 1) warp_sums[warp] = sum;
        __syncthreads();

        int before = carry, total = 0;  // of the warps before this one, of the chunk
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += warp_sums[w];
            total += warp_sums[w];
        }
        if (i < n) out[row + i] = before + sum;
        carry += total;
        __syncthreads();  // all have read warp_sums before the next chunk overwrites it
    }
}
