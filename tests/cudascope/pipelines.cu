// cuda::pipeline and cuda::barrier, and the mistakes they invite. The sources hold small whole numbers: sums are exact.

#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>

namespace cg = cooperative_groups;

constexpr int WARP = 32;
constexpr int THREADS = 64;
constexpr int STAGES = 2;

using Barrier = cuda::barrier<cuda::thread_scope_block>;
using State = cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES>;

#pragma nv_diag_suppress static_var_with_dynamic_init

// out = the sum over the rows of x: each thread has a pipeline of its own, and reads what it copied itself.
__global__ void thread_pipeline(const float* __restrict__ x,  // [rows, THREADS]
                                float* __restrict__ out,      // [THREADS]
                                int rows, bool planted) {
    __shared__ float stages[STAGES][THREADS];
    const int i = threadIdx.x;
    auto pipe = cuda::make_pipeline();
    float sum = 0.0f;
    for (int row = 0, fetched = 0; row < rows; ++row) {
        for (; fetched < rows && fetched < row + STAGES; ++fetched) {
            pipe.producer_acquire();
            const float* from = x + fetched * THREADS + i;
            cuda::memcpy_async(&stages[fetched % STAGES][i], from, cuda::aligned_size_t<4>(4), pipe);
            pipe.producer_commit();
        }
        if (!planted) pipe.consumer_wait();
        sum += stages[row % STAGES][i];  // BUG thread_pipeline
        pipe.consumer_release();
    }
    out[i] = sum;
}

// The same, reversed: every thread reads what another one copied. With the mistake, nobody says that a stage is empty.
__global__ void block_pipeline(const float* __restrict__ x,  // [rows, THREADS]
                               float* __restrict__ out,      // [THREADS]
                               int rows, bool planted) {
    __shared__ float stages[STAGES][THREADS];
    __shared__ State state;
    const auto block = cg::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    float sum = 0.0f;
    for (int row = 0, fetched = 0; row < rows; ++row) {
        for (; fetched < rows && fetched < row + STAGES; ++fetched) {
            pipe.producer_acquire();  // BUG block_pipeline
            cuda::memcpy_async(block, stages[fetched % STAGES], x + fetched * THREADS, sizeof(float) * THREADS, pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();
        sum += stages[row % STAGES][THREADS - 1 - block.thread_rank()];
        if (!planted) pipe.consumer_release();
    }
    out[block.thread_rank()] = sum;
}

// The first warp copies, the second one adds up. With the mistake, the first does not wait until a stage is empty.
__global__ void producer_and_consumer(const float* __restrict__ x,  // [rows, WARP]
                                      float* __restrict__ out,      // [WARP]
                                      int rows, bool planted) {
    __shared__ float stages[STAGES][WARP];
    __shared__ State state;
    const auto block = cg::this_thread_block();
    const bool produces = threadIdx.x < WARP;
    const int lane = threadIdx.x % WARP;
    auto pipe = cuda::make_pipeline(
        block, &state, produces ? cuda::pipeline_role::producer : cuda::pipeline_role::consumer);
    if (produces) {
        for (int row = 0; row < rows; ++row) {
            if (!planted) pipe.producer_acquire();
            cuda::memcpy_async(&stages[row % STAGES][lane], x + row * WARP + lane,  // BUG producer_and_consumer
                               cuda::aligned_size_t<4>(4), pipe);
            pipe.producer_commit();
        }
    } else {
        float sum = 0.0f;
        for (int row = 0; row < rows; ++row) {
            pipe.consumer_wait();
            sum += stages[row % STAGES][WARP - 1 - lane];  // BUG producer_and_consumer
            pipe.consumer_release();
        }
        out[lane] = sum;
    }
}

// out = 2 * x, reversed: between arriving and waiting a thread does something else. With the mistake it never waits.
__global__ void arrive_then_wait(const float* __restrict__ x,  // [THREADS]
                                 float* __restrict__ out,      // [THREADS]
                                 bool planted) {
    __shared__ float row[THREADS];
    __shared__ Barrier barrier;
    const int i = threadIdx.x;
    if (i == 0) init(&barrier, THREADS);
    __syncthreads();
    row[i] = x[i];  // BUG arrive_then_wait
    auto token = barrier.arrive();
    const float own = x[THREADS - 1 - i];
    if (!planted) barrier.wait(std::move(token));
    out[i] = own + row[THREADS - 1 - i];  // BUG arrive_then_wait
}

// out = x, reversed: the copies are part of the barrier's phase. With the mistake the barrier knows nothing of them.
__global__ void barrier_awaits_copies(const float* __restrict__ x,  // [THREADS]
                                      float* __restrict__ out,      // [THREADS]
                                      bool planted) {
    __shared__ float row[THREADS];
    __shared__ Barrier barrier;
    const int i = threadIdx.x;
    if (i == 0) init(&barrier, THREADS);
    __syncthreads();
    if (planted) {
        auto pipe = cuda::make_pipeline();
        cuda::memcpy_async(&row[i], x + i, cuda::aligned_size_t<4>(4), pipe);
        pipe.producer_commit();
    } else {
        cuda::memcpy_async(&row[i], x + i, cuda::aligned_size_t<4>(4), barrier);
    }
    barrier.arrive_and_wait();
    out[i] = row[THREADS - 1 - i];  // BUG barrier_awaits_copies
}

// out = x, reversed. With the mistake fewer arrive than the barrier expects.
__global__ void one_too_few(const float* __restrict__ x,  // [THREADS]
                            float* __restrict__ out,      // [THREADS]
                            bool planted) {
    __shared__ float row[THREADS];
    __shared__ Barrier barrier;
    const int i = threadIdx.x;
    if (i == 0) init(&barrier, planted ? THREADS + 1 : THREADS);
    __syncthreads();
    row[i] = x[i];
    barrier.arrive_and_wait();  // BUG one_too_few
    out[i] = row[THREADS - 1 - i];
}

// out = x, reversed. With the mistake nobody has initialised the barrier.
__global__ void not_initialised(const float* __restrict__ x,  // [THREADS]
                                float* __restrict__ out,      // [THREADS]
                                bool planted) {
    __shared__ float row[THREADS];
    __shared__ Barrier barrier;
    const int i = threadIdx.x;
    if (i == 0 && !planted) init(&barrier, THREADS);
    __syncthreads();
    row[i] = x[i];
    barrier.arrive_and_wait();  // BUG not_initialised
    out[i] = row[THREADS - 1 - i];
}
