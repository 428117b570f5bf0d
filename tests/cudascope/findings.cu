// Kernels with more than one mistake, and with what is a mistake by some rules only. Marked lines are named in a finding.

constexpr int THREADS = 128;

// Three mistakes: nobody looks at n when reading or writing, and a barrier is missing.
__global__ void three_mistakes(const float* in,  // [n]
                               float* out,       // [n]
                               int n) {
    __shared__ float row[THREADS];
    const int i = blockIdx.x * THREADS + threadIdx.x;
    row[threadIdx.x] = 2.0f;               // FINDING race
    const float other = row[threadIdx.x ^ 64];  // FINDING race
    const float own = in[i];               // FINDING read
    out[i] = own * other;                  // FINDING write
}

// found[0] = whether any element is negative: whoever finds one says so. With planted, each says who it was.
__global__ void any_negative(const float* in,  // [n]
                             int* found,       // [1]
                             int n, bool planted) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n && in[i] < 0.0f) found[0] = planted ? i : 1;  // FINDING store
}

// out = in, reversed within each thread block; threads without an element return early.
__global__ void early_return(const float* in,  // [n]
                             float* out,       // [n]
                             int n) {
    __shared__ float row[THREADS];
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    row[threadIdx.x] = in[i];
    __syncthreads();  // FINDING early_return
    const int last = min(THREADS, n - blockIdx.x * THREADS) - 1;
    out[i] = row[last - threadIdx.x];
}

// Writes past the end, then waits for what nobody does.
__global__ void hangs_at_the_end(float* out,  // [n]
                                 int* flag,   // [1]
                                 int n) {
    out[threadIdx.x] = 1.0f;           // FINDING hang_write
    while (atomicAdd(flag, 0) == 0) {  // FINDING hang
    }
}
