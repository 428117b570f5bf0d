// Asynchronous copies (cp.async) and the mistakes they invite. The sources hold small whole numbers: sums are exact.

#include <cuda_pipeline.h>

constexpr int WARP = 32;
constexpr int THREADS = 64;

// ------------------------------------------------------------------------------------------------ correct

__device__ float warp_sum(float x) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

// sums[row] = the sum of a row, a warp per row. Three stages of 4 floats a lane are on their way while one is added up;
// every lane reads what it copied itself, so no barrier is needed. Beyond n, the copies are filled with zeros.
__global__ void row_sums(const float* __restrict__ x,  // [gridDim.x, n]
                         float* __restrict__ sums,     // [gridDim.x]
                         int n) {
    constexpr int STAGES = 4, VEC = 4;
    __shared__ float4 stages[STAGES][WARP];
    const int lane = threadIdx.x, tiles = (n + VEC * WARP - 1) / (VEC * WARP);
    const float* row = x + blockIdx.x * n;

    float sum = 0.0f;
    for (int tile = 0; tile < tiles + STAGES - 1; ++tile) {
        if (tile < tiles) {
            const int column = VEC * (tile * WARP + lane), left = n - column;
            const int zeros = left >= VEC ? 0 : left > 0 ? 4 * (VEC - left) : 4 * VEC;
            __pipeline_memcpy_async(&stages[tile % STAGES][lane], left > 0 ? row + column : x, 16, zeros);
        }
        __pipeline_commit();  // also an empty batch: wait_prior counts
        if (tile < STAGES - 1) continue;
        __pipeline_wait_prior(STAGES - 1);
        const float4 four = stages[(tile - STAGES + 1) % STAGES][lane];
        sum += four.x + four.y + four.z + four.w;
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[blockIdx.x] = sum;
}

// out[i] = the i-th group of 16 bytes, of which the last `zeros` are 0; the rest comes from x.
__global__ void filled(const float* __restrict__ x,  // [4 * blockDim.x]
                       float* __restrict__ out,      // [4 * blockDim.x]
                       int zeros) {
    __shared__ float4 row[THREADS];
    const int i = threadIdx.x;
    __pipeline_memcpy_async(&row[i], x + 4 * i, 16, zeros);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    reinterpret_cast<float4*>(out)[i] = row[i];
}

// What lies in the target before any wait.
__global__ void too_early(const float* __restrict__ x,  // [blockDim.x]
                          float* __restrict__ out) {    // [blockDim.x]
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    __pipeline_memcpy_async(&row[i], x + i, 4);
    __pipeline_commit();
    out[i] = row[i];
    __pipeline_wait_prior(0);
}

// ------------------------------------------------------------------------------------------------ planted
// out = x, reversed, unless said otherwise.

__global__ void missing_commit(const float* __restrict__ x,  // [THREADS]
                               float* __restrict__ out,      // [THREADS]
                               bool planted) {
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    __pipeline_memcpy_async(&row[i], x + i, 4);
    if (!planted) __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    out[i] = row[THREADS - 1 - i];  // BUG missing_commit
}

// out = x[0] + x[1], reversed.
__global__ void wait_too_small(const float* __restrict__ x,  // [2, THREADS]
                               float* __restrict__ out,      // [THREADS]
                               bool planted) {
    __shared__ float rows[2][THREADS];
    const int i = threadIdx.x;
    for (int row = 0; row < 2; ++row) {
        __pipeline_memcpy_async(&rows[row][i], x + row * THREADS + i, 4);
        __pipeline_commit();
    }
    __pipeline_wait_prior(planted ? 1 : 0);
    __syncthreads();
    const float first = rows[0][THREADS - 1 - i];
    out[i] = first + rows[1][THREADS - 1 - i];  // BUG wait_too_small
}

__global__ void never_waited(const float* __restrict__ x,  // [THREADS]
                             float* __restrict__ out,      // [THREADS]
                             bool planted) {
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    __pipeline_memcpy_async(&row[i], x + i, 4);  // BUG never_waited
    __pipeline_commit();
    if (!planted) __pipeline_wait_prior(0);
    out[i] = x[THREADS - 1 - i];
}

__global__ void others_copy(const float* __restrict__ x,  // [THREADS]
                            float* __restrict__ out,      // [THREADS]
                            bool planted) {
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    __pipeline_memcpy_async(&row[i], x + i, 4);  // BUG others_copy
    __pipeline_commit();
    __pipeline_wait_prior(0);
    if (!planted) __syncthreads();
    out[i] = row[THREADS - 1 - i];  // BUG others_copy
}

// One thread copies for all: a barrier before its wait is too early.
__global__ void barrier_too_early(const float* __restrict__ x,  // [THREADS]
                                  float* __restrict__ out,      // [THREADS]
                                  bool planted) {
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    for (int j = 0; j < THREADS && i == THREADS - 1; ++j) {
        __pipeline_memcpy_async(&row[j], x + j, 4);  // BUG barrier_too_early
    }
    __pipeline_commit();
    if (planted) __syncthreads();
    __pipeline_wait_prior(0);
    if (!planted) __syncthreads();
    out[i] = row[THREADS - 1 - i];  // BUG barrier_too_early
}

// Moves x to out, and leaves zeros in x.
__global__ void source_overwritten(float* __restrict__ x,    // [THREADS]
                                   float* __restrict__ out,  // [THREADS]
                                   bool planted) {
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    __pipeline_memcpy_async(&row[i], x + i, 4);
    __pipeline_commit();
    if (!planted) __pipeline_wait_prior(0);
    x[i] = 0.0f;  // BUG source_overwritten
    __pipeline_wait_prior(0);
    __syncthreads();
    out[i] = row[THREADS - 1 - i];
}

// Even threads copy; odd ones write 1 into their own place, which is that of the copy beside it with the mistake.
__global__ void target_overwritten(const float* __restrict__ x,  // [THREADS]
                                   float* __restrict__ out,      // [THREADS]
                                   bool planted) {
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    row[i] = 1.0f;
    __syncthreads();
    if (i % 2 == 0) {
        __pipeline_memcpy_async(&row[i], x + i, 4);
        __pipeline_commit();
    }
    if (planted) __syncthreads();
    if (i % 2 == 1) row[planted ? i - 1 : i] = 1.0f;  // BUG target_overwritten
    __pipeline_wait_prior(0);
    __syncthreads();
    out[i] = row[THREADS - 1 - i];
}

// out = x[0] + … + x[3], reversed: the next row is on its way while somebody still reads this one.
__global__ void reused_too_early(const float* __restrict__ x,  // [4, THREADS]
                                 float* __restrict__ out,      // [THREADS]
                                 bool planted) {
    __shared__ float row[THREADS];
    const int i = threadIdx.x;
    float sum = 0.0f;
    for (int r = 0; r < 4; ++r) {
        if (!planted) __syncthreads();
        __pipeline_memcpy_async(&row[i], x + r * THREADS + i, 4);  // BUG reused_too_early
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        sum += row[THREADS - 1 - i];  // BUG reused_too_early
    }
    out[i] = sum;
}

// out[i] = x[2 * i + 1] + x[2 * i + 2]
__global__ void unaligned_pair(const float* __restrict__ x,  // [2 * THREADS + 1]
                               float* __restrict__ out,      // [THREADS]
                               bool planted) {
    __shared__ float2 row[THREADS];
    const int i = threadIdx.x;
    const float* pair = x + 2 * i + 1;
    if (planted) {
        __pipeline_memcpy_async(&row[i], pair, 8);  // BUG unaligned_pair
    } else {
        __pipeline_memcpy_async(&row[i].x, pair, 4);
        __pipeline_memcpy_async(&row[i].y, pair + 1, 4);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    out[i] = row[i].x + row[i].y;
}

// out[i] = x[3 * i] + x[3 * i + 1] + x[3 * i + 2]
__global__ void twelve_bytes(const float* __restrict__ x,  // [3 * THREADS]
                             float* __restrict__ out,      // [THREADS]
                             bool planted) {
    __shared__ float3 row[THREADS];
    const int i = threadIdx.x;
    const float* three = x + 3 * i;
    if (planted) {
        __pipeline_memcpy_async(&row[i], three, sizeof(float3));  // BUG twelve_bytes
    } else {
        __pipeline_memcpy_async(&row[i].x, three, 4);
        __pipeline_memcpy_async(&row[i].y, three + 1, 4);
        __pipeline_memcpy_async(&row[i].z, three + 2, 4);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    out[i] = row[i].x + row[i].y + row[i].z;
}

__global__ void within_shared(const float* __restrict__ x,  // [THREADS]
                              float* __restrict__ out,      // [THREADS]
                              bool planted) {
    __shared__ float row[THREADS], other[THREADS];
    const int i = threadIdx.x;
    row[i] = x[i];
    if (planted) __pipeline_memcpy_async(&other[i], &row[i], 4);  // BUG within_shared
    else other[i] = row[i];
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    out[i] = other[THREADS - 1 - i];
}

// out[i] = the i-th group of 4, with zeros where x has ended.
__global__ void past_the_end(const float* __restrict__ x,  // [n]
                             float* __restrict__ out,      // [4 * THREADS]
                             int n, bool planted) {
    __shared__ float4 row[THREADS];
    const int i = threadIdx.x, left = n - 4 * i;
    const int zeros = left >= 4 || planted ? 0 : left > 0 ? 4 * (4 - left) : 16;
    __pipeline_memcpy_async(&row[i], left > 0 ? x + 4 * i : x, 16, zeros);  // BUG past_the_end
    __pipeline_commit();
    __pipeline_wait_prior(0);
    reinterpret_cast<float4*>(out)[i] = row[i];
}
