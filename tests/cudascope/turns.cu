// Thread blocks that wait for others in loops through a barrier. `way` says how they look at a flag.

__device__ int seen_at(int* flag, int way) {
    int value;
    if (way == 0) return atomicAdd(flag, 0);  // atomic
    if (way == 1) return *(volatile int*)flag;  // volatile
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");  // acquire
    return value;
}

// Until *flag >= value. All threads pass two barriers in each step.
__device__ void wait_for(int* flag, int value, int way) {
    __shared__ int seen;
    do {
        __syncthreads();  // LOOP
        if (threadIdx.x == 0) seen = seen_at(flag, way);
        __syncthreads();  // LOOP
    } while (seen < value);
    __threadfence();
    __syncthreads();
}

// What the threads have written before comes before what is read after wait_for().
__device__ void raise_flag(int* flag) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(flag, 1);
    }
}

// Each thread block reads what the next one has written before a barrier of the grid.
__global__ void grid_barrier(int* flags, int* data, int* out, int way) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    for (int step = 0; step < 2; ++step) {
        data[step * n + i] = i + step;
        raise_flag(flags);
        wait_for(flags, (step + 1) * gridDim.x, way);
        out[step * n + i] = data[step * n + (i + blockDim.x) % n];
    }
}

// A sum over the later thread blocks, handed from each one to the one before.
__global__ void chained_scan(int* flags, int* data, int* out, int way) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, is_last = blockIdx.x == gridDim.x - 1;
    if (!is_last) wait_for(flags + blockIdx.x + 1, 1, way);
    data[i] = i + (is_last ? 0 : data[i + blockDim.x]);
    raise_flag(flags + blockIdx.x);
    out[i] = data[i];
}

// The first thread block adds what all others have left (stream-K).
__global__ void fix_up(int* flags, int* data, int* out, int way) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = i;
    if (blockIdx.x) return raise_flag(flags);
    wait_for(flags, gridDim.x - 1, way);
    int sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += data[block * blockDim.x + threadIdx.x];
    out[i] = sum;
}

// Three items through one slot: from the first thread block to the last, or from the last to the first.
__device__ void pass_on(int* flags, int* data, int* out, int way, int producer, int consumer) {
    for (int step = 0; step < 3; ++step) {
        if (blockIdx.x == producer) {
            wait_for(flags, step, way);
            data[threadIdx.x] = 10 * step + threadIdx.x;
            raise_flag(flags + 1);
        }
        if (blockIdx.x == consumer) {
            wait_for(flags + 1, step + 1, way);
            out[step * blockDim.x + threadIdx.x] = data[threadIdx.x];
            raise_flag(flags);
        }
    }
}
__global__ void to_the_last(int* flags, int* data, int* out, int way) {
    pass_on(flags, data, out, way, 0, gridDim.x - 1);
}
__global__ void to_the_first(int* flags, int* data, int* out, int way) {
    pass_on(flags, data, out, way, gridDim.x - 1, 0);
}

// A counter under a lock. The last thread block has it first and gives it to the others.
__global__ void lock(int* flags, int* data, int* out, int way) {
    const bool is_last = blockIdx.x == gridDim.x - 1;
    __shared__ int taken;
    if (!is_last) wait_for(flags + 1, 1, way);
    do {
        __syncthreads();
        if (threadIdx.x == 0) taken = atomicCAS(flags, 0, 1) == 0;
        __syncthreads();
    } while (!taken);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) out[0] = ++data[0];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (is_last) atomicExch(flags + 1, 1);
        atomicExch(flags, 0);
    }
}

// The loop counts its steps, sleeps longer and longer, and gives up after a second: its state differs each time.
__global__ void with_a_deadline(int* flags, int* data, int* out, int way) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    __shared__ int seen;
    const long long start = clock64();
    if (blockIdx.x == gridDim.x - 1) raise_flag(flags);
    for (int step = 0;; ++step) {
        __syncthreads();
        if (threadIdx.x == 0) seen = seen_at(flags, way) || clock64() - start > 1000000000;
        __syncthreads();
        if (seen) break;
        __nanosleep(step);
    }
    out[i] = seen_at(flags, way);
}

// Nobody raises the flag.
__global__ void for_ever(int* flags, int* data, int* out, int way) {
    if (blockIdx.x) return;
    wait_for(flags, 1, way);
}
