#include <cuda_pipeline.h>

// sums[c] = Σ w[row][c] over all rows, one thread per column c. Tiles of 4 rows come through two buffers in shared
// memory: while one tile is added up, the next is on its way. A thread copies 4 neighbours of a row and adds up one
// column, so it reads what others have copied. One thread block of 16 threads; rows is a multiple of 4.
__global__ void double_buffer(const float4* w,  // [rows, 16] floats
                              float* sums,      // [16]
                              int rows) {
    __shared__ float4 tiles[2][16];
    float sum = 0;
    __pipeline_memcpy_async(&tiles[0][threadIdx.x], &w[threadIdx.x], 16);
    __pipeline_commit();
    for (int tile = 0; tile < rows / 4; ++tile) {
        const int next = tile + 1;
        if (next < rows / 4) __pipeline_memcpy_async(&tiles[next % 2][threadIdx.x], &w[16 * next + threadIdx.x], 16);
        __pipeline_commit();  // also an empty batch: the wait counts batches
        __pipeline_wait_prior(1);
        __syncthreads();
        const float* column = reinterpret_cast<const float*>(tiles[tile % 2]) + threadIdx.x;
        for (int row = 0; row < 4; ++row) sum += column[16 * row];
        __syncthreads();
    }
    sums[threadIdx.x] = sum;
}
