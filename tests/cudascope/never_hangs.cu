// Ways to hang or to crash. All kernels take the same; `n` says how badly. A line where a launch ends is marked.

// ------------------------------------------------------------------------------------------------ waiting

// Everybody waits until thread `setter` of the grid raises the flag; setter -1: for ever.
__global__ void spin_volatile(float* x, float* out, int* flag, int setter) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    volatile int* raised = flag;
    if (i == setter) *raised = 1;
    while (*raised == 0) {}  // END spin_volatile
    out[i] = 1.0f;
}

__global__ void spin_atomic(float* x, float* out, int* flag, int setter) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == setter) atomicExch(flag, 1);
    while (atomicAdd(flag, 0) == 0) {}  // END spin_atomic
    out[i] = 1.0f;
}

__global__ void spin_plain(float* x, float* out, int* flag, int setter) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == setter) flag[0] = 1;
    while (flag[0] == 0) {}  // END spin_plain
    out[i] = 1.0f;
}

__global__ void spin_asleep(float* x, float* out, int* flag, int setter) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    volatile int* raised = flag;
    if (i == setter) *raised = 1;
    while (*raised == 0) __nanosleep(100);  // END spin_asleep
    out[i] = 1.0f;
}

__global__ void spin_shared(float* x, float* out, int* flag, int setter) {
    __shared__ volatile int raised;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) raised = 0;
    __syncthreads();
    if (threadIdx.x == setter) raised = 1;
    while (raised == 0) {}  // END spin_shared
    out[i] = 1.0f;
}

// Often stopped in the stub of the call, which belongs to no line.
__device__ __noinline__ int read_flag(volatile int* flag) { return *flag; }  // END spin_in_calls
__global__ void spin_in_calls(float* x, float* out, int* flag, int n) {
    while (read_flag(flag) == 0) {}  // END spin_in_calls
    out[threadIdx.x] = 1.0f;
}

__global__ void endless(float* x, float* out, int* flag, int n) {  // END endless
    unsigned k = threadIdx.x | 1;
    while (k != 0) k = 2 * k + 1;  // END endless
    out[threadIdx.x] = k;
}

// Warp 0 waits for the other warps. They stand at a barrier that warp 0 never reaches.
__global__ void barrier_behind_a_spin(float* x, float* out, int* flag, int n) {
    volatile int* raised = flag;
    if (threadIdx.x < 32) {
        while (*raised == 0) {}  // END barrier_behind_a_spin
    }
    __syncthreads();  // END barrier_behind_a_spin
    if (threadIdx.x == 32) *raised = 1;
    out[threadIdx.x] = 1.0f;
}

__global__ void endless_barriers(float* x, float* out, int* flag, int n) {
    for (int s = 32; s >= 0; s >>= 1) __syncthreads();
    out[threadIdx.x] = 1.0f;
}

__global__ void endless_steps(float* x, float* out, int* flag, int n) {
    for (int step = 0; n == 0; ++step) {
        out[threadIdx.x] = step;
        __syncthreads();
    }
}

__global__ void endless_in_some_blocks(float* x, float* out, int* flag, int n) {
    for (int s = 32; s >= 0 && blockIdx.x % 2; s >>= 1) __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
}

// n nanoseconds.
__global__ void long_loop(float* x, float* out, int* flag, int n) {
    for (const long long start = clock64(); clock64() - start < n;) __syncthreads();
    out[threadIdx.x] = 1.0f;
}

// A counter under a lock that all threads of the grid want; with n = 1 nobody gives it back.
__global__ void lock(float* x, float* out, int* flag, int n) {
    for (bool done = false; !done;) {
        if (atomicCAS(flag, 0, 1) == 0) {  // END lock
            __threadfence();
            out[0] += 1.0f;
            __threadfence();
            if (n == 0) atomicExch(flag, 0);
            done = true;
        }
    }
}

// ------------------------------------------------------------------------------------------------ stacks

__device__ float deeper(float* out, int n) {
    volatile float frame[64];
    frame[n % 64] = out[n % 2];
    return n == 0 ? frame[0] : deeper(out, n - 1) + frame[n % 64];
}
__global__ void recursion(float* x, float* out, int* flag, int n) { out[threadIdx.x] = deeper(x, n); }

// A thread may have 512 KB of local memory.
template <int KB>
__device__ float local_memory(int n) {
    volatile float own[KB * 256];
    for (int i = 0; i < KB * 256; ++i) own[i] = i;
    return own[n];
}
__global__ void local_400_kb(float* x, float* out, int* flag, int n) { out[threadIdx.x] = local_memory<400>(n); }
__global__ void local_2_mb(float* x, float* out, int* flag, int n) { out[threadIdx.x] = local_memory<2048>(n); }

// ------------------------------------------------------------------------------------------------ wild indices

__global__ void past_the_end(float* x, float* out, int* flag, int n) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1;  // END past_the_end
}
__global__ void read_past_the_end(float* x, float* out, int* flag, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float read = x[i];  // END read_past_the_end
    if (i < n || read == 12345.0f) out[i] = read;
}
__global__ void wild_global(float* x, float* out, int* flag, int n) {
    out[1000000007LL * n] = 1;  // END wild_global
}
__global__ void before_the_start(float* x, float* out, int* flag, int n) {
    out[-n] = 1;  // END before_the_start
}
__global__ void wild_shared(float* x, float* out, int* flag, int n) {
    __shared__ float row[64];
    row[threadIdx.x + 100000 * n] = 1;  // END wild_shared
    __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];
}
__global__ void null_pointer(float* x, float* out, int* flag, int n) {
    x[threadIdx.x] = 1;  // END null_pointer
}

// ------------------------------------------------------------------------------------------------ stops

__global__ void built_in_traps(float* x, float* out, int* flag, int n) {
    if (threadIdx.x == n) __builtin_trap();  // of g++ and clang: NVRTC does not have it
}
__global__ void asserts(float* x, float* out, int* flag, int n) {
    assert(threadIdx.x != n);  // END asserts
}
__global__ void traps(float* x, float* out, int* flag, int n) {
    if (threadIdx.x == n) __trap();  // END traps
}
__global__ void divides(float* x, float* out, int* flag, int n) {
    out[0] = 7 / flag[0];  // END divides
}
