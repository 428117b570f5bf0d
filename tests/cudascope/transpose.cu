// out = inᵀ, for a block of 32 × 8 threads and a grid of [cols / 32, rows / 32] tiles.

constexpr int TILE = 32;  // rows and columns of a tile: a warp wide
constexpr int ROWS = 8;   // rows that a thread block moves at a time

// Straight from global to global memory: the reads of a warp are neighbours, its writes lie a column apart.
__global__ void transpose_naive(const float* __restrict__ in,  // [rows, cols]
                                float* __restrict__ out,       // [cols, rows]
                                int rows, int cols) {
    const int col = blockIdx.x * TILE + threadIdx.x;
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        const int row = blockIdx.y * TILE + i;
        if (row < rows && col < cols) out[col * rows + row] = in[row * cols + col];
    }
}

// Through shared memory: both the reads and the writes of a warp are neighbours. With PADDING = 0 the 32 elements of a
// column share one bank and are read one after the other; with PADDING = 1 they lie in 32 different banks.
template <int PADDING>
__global__ void transpose(const float* __restrict__ in,  // [rows, cols]
                          float* __restrict__ out,       // [cols, rows]
                          int rows, int cols) {
    __shared__ float tile[TILE][TILE + PADDING];

    // global → shared: row i of the tile is row i of the input
    const int col = blockIdx.x * TILE + threadIdx.x;
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        const int row = blockIdx.y * TILE + i;
        if (row < rows && col < cols) tile[i][threadIdx.x] = in[row * cols + col];
    }
    __syncthreads();

    // shared → global: column i of the tile is row i of the output
    const int out_col = blockIdx.y * TILE + threadIdx.x;
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        const int out_row = blockIdx.x * TILE + i;
        if (out_row < cols && out_col < rows) out[out_row * rows + out_col] = tile[threadIdx.x][i];
    }
}
