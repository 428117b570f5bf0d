// Eight mistakes that everybody makes once. With planted = false a kernel is correct; with true it has its mistake, and
// the lines where that shows are marked.

constexpr int WARP = 32;
constexpr int THREADS = 128;

// out = in, reversed within each thread block: the thread at the other end may not have written yet.
__global__ void missing_barrier(const float* __restrict__ in,  // [gridDim.x, THREADS]
                                float* __restrict__ out,       // [gridDim.x, THREADS]
                                bool planted) {
    __shared__ float row[THREADS];
    row[threadIdx.x] = in[blockIdx.x * THREADS + threadIdx.x];  // BUG missing_barrier
    if (!planted) __syncthreads();
    out[blockIdx.x * THREADS + threadIdx.x] = row[THREADS - 1 - threadIdx.x];  // BUG missing_barrier
}

// out[i] = in[i] + in[i - 1]: in the last thread block, those beyond n never come to the barrier.
__global__ void barrier_in_branch(const float* __restrict__ in,  // [n]
                                  float* __restrict__ out,       // [n]
                                  int n, bool planted) {
    __shared__ float row[THREADS];
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        row[threadIdx.x] = in[i];
        if (planted) __syncthreads();  // BUG barrier_in_branch
    }
    if (!planted) __syncthreads();
    if (i < n) out[i] = row[threadIdx.x] + (threadIdx.x > 0 ? row[threadIdx.x - 1] : i > 0 ? in[i - 1] : 0.0f);
}

// out[i] = in[i + 1] - in[i] for all i < n - 1: the last difference reads in[n].
__global__ void off_by_one(const float* __restrict__ in,  // [n]
                           float* __restrict__ out,       // [n]
                           int n, bool planted) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const int last = planted ? n : n - 1;
    out[i] = i < last ? in[i + 1] - in[i] : 0.0f;  // BUG off_by_one
}

// sums[row] = the sum of a row, all rows by one thread block: a fast warp overwrites what a slow one still reads.
__global__ void warp_race(const float* __restrict__ x,  // [rows, THREADS]
                          float* __restrict__ sums,     // [rows, THREADS]: every thread writes the sum
                          int rows, bool planted) {
    __shared__ float partial[THREADS / WARP];
    for (int row = 0; row < rows; ++row) {
        float sum = x[row * THREADS + threadIdx.x];
        for (int distance = WARP / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
        if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = sum;  // BUG warp_race
        __syncthreads();
        sum = 0.0f;
        for (int warp = 0; warp < THREADS / WARP; ++warp) sum += partial[warp];  // BUG warp_race
        sums[row * THREADS + threadIdx.x] = sum;
        if (!planted) __syncthreads();
    }
}

// out = in with neighbouring lanes exchanged: a warp's lanes need not run in step.
__global__ void warp_exchange(const float* __restrict__ in,  // [gridDim.x, THREADS]
                              float* __restrict__ out,       // [gridDim.x, THREADS]
                              bool planted) {
    __shared__ float row[THREADS];
    row[threadIdx.x] = in[blockIdx.x * THREADS + threadIdx.x];  // BUG warp_exchange
    if (!planted) __syncwarp();
    out[blockIdx.x * THREADS + threadIdx.x] = row[threadIdx.x ^ 1];  // BUG warp_exchange
}

// out = the sums of four neighbours of in, from its second element on: x + 1 is not aligned to 16 bytes.
__global__ void unaligned_float4(const float* __restrict__ in,  // [4 * n + 1]
                                 float* __restrict__ out,       // [n]
                                 int n, bool planted) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const float* four = in + 1 + 4 * i;
    if (planted) {
        const float4 x = *reinterpret_cast<const float4*>(four);  // BUG unaligned_float4
        out[i] = x.x + x.y + x.z + x.w;
    } else {
        out[i] = four[0] + four[1] + four[2] + four[3];
    }
}

// sums[block] = the sum of a thread block's elements: beyond n, nobody has written the row.
__global__ void uninitialised_shared(const float* __restrict__ in,  // [n]
                                     float* __restrict__ sums,      // [gridDim.x]
                                     int n, bool planted) {
    __shared__ float row[THREADS];
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        row[threadIdx.x] = in[i];
    } else if (!planted) {
        row[threadIdx.x] = 0.0f;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    float sum = 0.0f;
    for (int t = 0; t < THREADS; ++t) sum += row[t];  // BUG uninitialised_shared
    sums[blockIdx.x] = sum;
}

// last[bin] = the largest i with bins[i] == bin: threads of the same bin write to one place, in any order.
__global__ void write_write_race(const int* __restrict__ bins,  // [n]
                                 int* __restrict__ last,        // [num_bins], -1 at first
                                 int n, bool planted) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    if (planted) {
        last[bins[i]] = i;  // BUG write_write_race
    } else {
        atomicMax(&last[bins[i]], i);
    }
}
