// Two mistakes that everybody makes once. With planted = false a kernel is correct. With planted = true it has its
// mistake, and the lines where the mistake shows are marked.

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
