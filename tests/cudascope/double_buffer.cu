// y = a @ x, one row per thread, with x staged through two shared buffers: while the thread block works on one tile, the
// next is on its way into the other. One barrier per tile does, where a single buffer needs two.

template <int TILE>
__device__ void load_tile(float* tile,     // [TILE], shared
                          const float* x,  // [K], global
                          int start, int K) {
    for (int i = threadIdx.x; i < TILE; i += blockDim.x) tile[i] = start + i < K ? x[start + i] : 0.0f;
}

template <int TILE>
__global__ void gemv(const float* __restrict__ a,  // [M, K]
                     const float* __restrict__ x,  // [K]
                     float* __restrict__ y,        // [M]
                     int M, int K) {
    __shared__ float tiles[2][TILE];
    const int row = blockIdx.x * blockDim.x + threadIdx.x;

    float sum = 0.0f;
    load_tile<TILE>(tiles[0], x, 0, K);
    for (int start = 0, current = 0; start < K; start += TILE, current ^= 1) {
        __syncthreads();  // this tile has arrived, and all are done with the tile before it
        if (start + TILE < K) load_tile<TILE>(tiles[current ^ 1], x, start + TILE, K);
        for (int i = 0; i < TILE && start + i < K; ++i) {
            if (row < M) sum += a[row * K + start + i] * tiles[current][i];
        }
    }
    if (row < M) y[row] = sum;
}
