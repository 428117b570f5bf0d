// c = a @ b in tiles of TILE × TILE. A block of TILE × TILE threads, one per element of its tile of c.

template <int TILE>
__global__ void __launch_bounds__(TILE* TILE) matmul(const float* __restrict__ a,  // [M, K]
                                                     const float* __restrict__ b,  // [K, N]
                                                     float* __restrict__ c,        // [M, N]
                                                     int M, int N, int K) {
    __shared__ float a_tile[TILE][TILE];
    __shared__ float b_tile[TILE][TILE];
    const int row = blockIdx.y * TILE + threadIdx.y;  // of a and c
    const int col = blockIdx.x * TILE + threadIdx.x;  // of b and c

    float sum = 0.0f;
    for (int k = 0; k < K; k += TILE) {
        // global → shared, zeros where the tile hangs over the edge
        const int a_col = k + threadIdx.x, b_row = k + threadIdx.y;
        a_tile[threadIdx.y][threadIdx.x] = row < M && a_col < K ? a[row * K + a_col] : 0.0f;
        b_tile[threadIdx.y][threadIdx.x] = b_row < K && col < N ? b[b_row * N + col] : 0.0f;
        __syncthreads();

        for (int i = 0; i < TILE; ++i) sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
        __syncthreads();  // all are done with the tiles before the next ones overwrite them
    }
    if (row < M && col < N) c[row * N + col] = sum;
}
