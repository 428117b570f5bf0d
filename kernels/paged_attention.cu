// Paged attention: one new query per sequence over keys and values that lie in blocks (lesson 5).
//
//     k   = k_cache[block_table] of the first seq_len tokens            v likewise
//     s_j = scale · q·k_j + alibi_slope · (j − (seq_len − 1))
//     out = v_scale · softmax(s) v          lse = log Σ exp(s_j)        softmax in float32
//
// The design is that of vLLM's paged_attention v1 and v2 (Kwon et al. 2023), written anew.
//
//     grid           (num_heads / QUERY_HEADS, num_seqs, partitions), a thread block each
//     warp           a block of BLOCK_SIZE tokens at a time: warp w takes w, w + NUM_WARPS, …
//     thread group   one key of the block, in QK: THREAD_GROUP_SIZE neighbouring threads
//     vec            what a thread reads at once: its group together reads 16 bytes of scalar_t
//
// paged_attention_v1_kernel: one thread block sees all tokens of a sequence and writes out and lse.
// paged_attention_v2_kernel: thread block z sees tokens z · PARTITION_SIZE … and writes lesson 3's
// Partial(m, l, acc); paged_attention_merge_kernel merges them. QUERY_HEADS > 1: query heads that
// share a KV head are handled together, and every key and value is read once for all of them.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

constexpr int WARP_SIZE = 32;
constexpr unsigned ALL_LANES = 0xffffffff;

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// N neighbouring elements, at most 16 bytes, that one instruction moves.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T data[N];
};

template <typename A, typename B, int N>
__device__ float dot(const Vec<A, N>& a, const Vec<B, N>& b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += float(a.data[i]) * float(b.data[i]);
    return sum;
}

// Warps, a power of two, to share `sums` accumulators so that each thread keeps at most 32.
__device__ constexpr int warps_for(int sums, int num_warps) {
    int warps = 1;
    while (warps < num_warps && sums > 32 * warps) warps *= 2;
    return warps;
}

// How the threads of a thread block share its work: W in the stages. VEC_SIZE follows scalar_t, the
// layout's X follows cache_t: in a float8 cache the X = 16 elements of 16 bytes are what a thread
// group reads in two turns or more.
template <typename scalar, typename cache, int head_size, int block_size, int num_threads,
          int query_heads>
struct Workers {
    using scalar_t = scalar;
    using cache_t = cache;
    static constexpr int HEAD_SIZE = head_size, BLOCK_SIZE = block_size, QUERY_HEADS = query_heads;
    static constexpr int NUM_WARPS = num_threads / WARP_SIZE;
    // QK: k_cache [num_blocks, num_kv_heads, HEAD_SIZE / X, BLOCK_SIZE, X]
    static constexpr int X = 16 / sizeof(cache_t);
    static constexpr int THREAD_GROUP_SIZE = larger(WARP_SIZE / BLOCK_SIZE, 1);
    static constexpr int GROUPS_PER_WARP = WARP_SIZE / THREAD_GROUP_SIZE;
    static constexpr int TOKENS_PER_GROUP = divide_up(BLOCK_SIZE, WARP_SIZE);  // of one block
    static constexpr int VEC_SIZE = larger(16 / (THREAD_GROUP_SIZE * sizeof(scalar_t)), 1);
    static constexpr int NUM_VECS = HEAD_SIZE / VEC_SIZE;  // of one query, of one key
    static constexpr int VECS_PER_THREAD = NUM_VECS / THREAD_GROUP_SIZE;
    using Q_vec = Vec<scalar_t, VEC_SIZE>;
    using K_vec = Vec<cache_t, VEC_SIZE>;
    // PV: v_cache [num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE]; a row: one element of the head
    static constexpr int V_VEC_SIZE = smaller(16 / sizeof(scalar_t), BLOCK_SIZE);
    static constexpr int VECS_PER_ROW = BLOCK_SIZE / V_VEC_SIZE;
    static constexpr int ROWS_PER_STEP = WARP_SIZE / VECS_PER_ROW;  // that a warp reads at once
    using V_vec = Vec<cache_t, V_VEC_SIZE>;
    // so many warps share a block's rows: 1, unless the sums of many heads would not fit registers
    static constexpr int ROW_WARPS =
        warps_for(QUERY_HEADS * divide_up(HEAD_SIZE, ROWS_PER_STEP), NUM_WARPS);
    static constexpr int BLOCK_WARPS = NUM_WARPS / ROW_WARPS;  // blocks read at once
    static constexpr int ROWS_PER_THREAD = divide_up(HEAD_SIZE, ROWS_PER_STEP * ROW_WARPS);
    static constexpr bool ALL_ROWS_EXIST = HEAD_SIZE % (ROWS_PER_STEP * ROW_WARPS) == 0;

    __device__ static int block_warp() { return threadIdx.x / WARP_SIZE / ROW_WARPS; }
    __device__ static int row(int r) {  // the r-th of this thread's rows; from HEAD_SIZE on: none
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
        return (r * ROW_WARPS + warp % ROW_WARPS) * ROWS_PER_STEP + lane / VECS_PER_ROW;
    }
    // of the lanes of a row, the one that hands its sum on
    __device__ static bool has_sum() { return threadIdx.x % VECS_PER_ROW == 0; }

    static_assert(num_threads % WARP_SIZE == 0 && (NUM_WARPS & (NUM_WARPS - 1)) == 0, "the tree");
    static_assert(HEAD_SIZE % X == 0, "the layout of k_cache has HEAD_SIZE / X rows of 16 bytes");
    static_assert(NUM_VECS % THREAD_GROUP_SIZE == 0, "a thread group reads whole vecs");
    static_assert(BLOCK_SIZE % V_VEC_SIZE == 0, "a row is whole vecs");
    static_assert(WARP_SIZE % VECS_PER_ROW == 0, "a warp reads whole rows");
};

// The tokens of a sequence that one thread block sees: whole blocks; the last may not be full.
template <class W>
struct Span {
    int first_block, end_block;
    int seq_len;

    __device__ int first_token() const { return first_block * W::BLOCK_SIZE; }
    __device__ int num_slots() const { return (end_block - first_block) * W::BLOCK_SIZE; }
};

// Lesson 3's summary of a span, for each query head. Of acc's rows, those of one thread.
template <class W>
struct Partial {
    float m[W::QUERY_HEADS], l[W::QUERY_HEADS], acc[W::QUERY_HEADS][W::ROWS_PER_THREAD];
};

struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// Lanes a multiple of NEAREST apart become one value, by a butterfly of shuffles.
template <int NEAREST, int FARTHEST = WARP_SIZE / 2, typename Op>
__device__ float reduce_lanes(float value, Op op) {
#pragma unroll
    for (int distance = FARTHEST; distance >= NEAREST; distance /= 2)
        value = op(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// m, with 0 where every score is −∞ (a product overflowed): (−∞) − (−∞) would be NaN.
__device__ float finite(float m) { return m == -INFINITY ? 0.0f : m; }

// All threads' values become one, known to all: lanes, then warps. scratch: shared [N][NUM_WARPS].
template <int NUM_WARPS, int NEAREST, int N, typename Op>
__device__ void reduce_thread_block(float (&values)[N], float (*scratch)[NUM_WARPS], Op op) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        values[n] = reduce_lanes<NEAREST>(values[n], op);
        if (lane == 0) scratch[n][warp] = values[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
        values[n] = scratch[n][0];
        for (int w = 1; w < NUM_WARPS; ++w) values[n] = op(values[n], scratch[n][w]);
    }
}

// ----------------------------------------------------------------------------------- the stages

// Global → shared: the queries, vec by vec, in their own order, so that the threads of a group will
// read neighbouring vecs.
template <class W>
__device__ void load_queries(
    typename W::Q_vec (*q_vecs)[W::NUM_VECS],  // shared [QUERY_HEADS][NUM_VECS]
    const typename W::scalar_t* q)             // [QUERY_HEADS, HEAD_SIZE]
{
    using Q_vec = typename W::Q_vec;
    for (int i = threadIdx.x; i < W::QUERY_HEADS * W::NUM_VECS; i += blockDim.x) {
        const int h = i / W::NUM_VECS, vec = i % W::NUM_VECS;
        q_vecs[h][vec] = *reinterpret_cast<const Q_vec*>(q + i * W::VEC_SIZE);
    }
}

// Scores of all keys of the span, −∞ past the sequence's end; m[h] becomes the largest that this
// thread has seen.
template <class W>
__device__ void score_keys(
    float* scores,                                   // shared [QUERY_HEADS][num_slots]
    float (&m)[W::QUERY_HEADS],
    const typename W::Q_vec (*q_vecs)[W::NUM_VECS],  // shared [QUERY_HEADS][NUM_VECS]
    const typename W::cache_t* k_cache,  // of this KV head: [blocks][HEAD_SIZE / X][BLOCK_SIZE][X]
    int64_t kv_block_stride,
    const int* block_table,  // [max_num_blocks]
    Span<W> span, float scale, const float (&slopes)[W::QUERY_HEADS])
{
    using Q_vec = typename W::Q_vec;
    using K_vec = typename W::K_vec;
    const int warp = threadIdx.x / WARP_SIZE;
    const int group = threadIdx.x % WARP_SIZE / W::THREAD_GROUP_SIZE;  // in its warp
    const int member = threadIdx.x % W::THREAD_GROUP_SIZE;             // in its thread group

    for (int block = span.first_block + warp; block < span.end_block; block += W::NUM_WARPS) {
        const auto* k_block = k_cache + int64_t(block_table[block]) * kv_block_stride;
        // a fence for the compiler, which else keeps q_vecs in registers all along, and they spill
        if (W::QUERY_HEADS * W::VECS_PER_THREAD * W::VEC_SIZE > 64) __syncwarp();

        for (int i = 0; i < W::TOKENS_PER_GROUP; ++i) {
            const int offset = group + i * W::GROUPS_PER_WARP;  // of the token in its block
            const int token = block * W::BLOCK_SIZE + offset;

            K_vec k_vecs[W::VECS_PER_THREAD];  // global → registers: no other thread needs them
#pragma unroll
            for (int j = 0; j < W::VECS_PER_THREAD; ++j) {
                const int element = (j * W::THREAD_GROUP_SIZE + member) * W::VEC_SIZE;
                const int row = element / W::X, column = element % W::X;
                const auto* address = k_block + (row * W::BLOCK_SIZE + offset) * W::X + column;
                k_vecs[j] = *reinterpret_cast<const K_vec*>(address);
            }

            float qk[W::QUERY_HEADS] = {};
#pragma unroll
            for (int j = 0; j < W::VECS_PER_THREAD; ++j)
#pragma unroll
                for (int h = 0; h < W::QUERY_HEADS; ++h) {
                    const Q_vec q_vec = q_vecs[h][j * W::THREAD_GROUP_SIZE + member];
                    qk[h] += dot(q_vec, k_vecs[j]);
                }

#pragma unroll
            for (int h = 0; h < W::QUERY_HEADS; ++h) {
                qk[h] = reduce_lanes<1, W::THREAD_GROUP_SIZE / 2>(qk[h], Sum());
                const float bias = slopes[h] * (token - (span.seq_len - 1));
                // where no token is, the slot may hold anything, NaN too: select, do not add
                const float score = token < span.seq_len ? scale * qk[h] + bias : -INFINITY;
                if (member == 0) scores[h * span.num_slots() + token - span.first_token()] = score;
                m[h] = fmaxf(m[h], score);
            }
        }
    }
}

// Scores → exp(score − m), in place; l[h] becomes the sum that this thread has seen.
template <class W>
__device__ void exponentiate(
    float* scores,  // shared [QUERY_HEADS][num_slots]
    float (&l)[W::QUERY_HEADS], const float (&m)[W::QUERY_HEADS], Span<W> span)
{
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h)
        for (int i = threadIdx.x; i < span.num_slots(); i += blockDim.x) {
            float& slot = scores[h * span.num_slots() + i];
            const float weight = expf(slot - finite(m[h]));
            slot = weight;
            l[h] += weight;
        }
}

// acc[h][r] = Σ weight · v over this warp's blocks, for row r of this thread. No thread groups here: a
// thread reads V_VEC_SIZE tokens of a row, VECS_PER_ROW lanes side by side a whole row, and at the
// end their sums become one.
template <class W>
__device__ void weigh_values(
    float (&acc)[W::QUERY_HEADS][W::ROWS_PER_THREAD],
    const float* weights,                // shared [QUERY_HEADS][num_slots]
    const typename W::cache_t* v_cache,  // of this KV head: [blocks][HEAD_SIZE][BLOCK_SIZE]
    int64_t kv_block_stride,
    const int* block_table,  // [max_num_blocks]
    Span<W> span)
{
    using V_vec = typename W::V_vec;
    using cache_t = typename W::cache_t;
    const int offset = threadIdx.x % W::VECS_PER_ROW * W::V_VEC_SIZE;  // of its tokens in the block

    int block = span.first_block + W::block_warp();
    for (; block < span.end_block; block += W::BLOCK_WARPS) {
        const cache_t* v_block = v_cache + int64_t(block_table[block]) * kv_block_stride;
        const int token = block * W::BLOCK_SIZE + offset;
        const int live = span.seq_len - token;  // so many of this thread's tokens exist

        Vec<float, W::V_VEC_SIZE> w[W::QUERY_HEADS];
#pragma unroll
        for (int h = 0; h < W::QUERY_HEADS; ++h) {
            const float* of_head = weights + h * span.num_slots() + token - span.first_token();
#pragma unroll
            for (int i = 0; i < W::V_VEC_SIZE; i += 4)
                *reinterpret_cast<float4*>(w[h].data + i) = *reinterpret_cast<const float4*>(of_head + i);
        }

#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            if (W::ALL_ROWS_EXIST || W::row(r) < W::HEAD_SIZE) {
                const cache_t* address = v_block + W::row(r) * W::BLOCK_SIZE + offset;
                V_vec v_vec = *reinterpret_cast<const V_vec*>(address);
                if (live < W::V_VEC_SIZE)  // a weight of 0 does not hide NaN
#pragma unroll
                    for (int i = 0; i < W::V_VEC_SIZE; ++i)
                        if (i >= live) v_vec.data[i] = cache_t(0.0f);
#pragma unroll
                for (int h = 0; h < W::QUERY_HEADS; ++h) acc[h][r] += dot(w[h], v_vec);
            }
    }
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            acc[h][r] = reduce_lanes<1, W::VECS_PER_ROW / 2>(acc[h][r], Sum());
}

// The sums of warps with the same rows become one, in the first of them, in log₂(BLOCK_WARPS) rounds:
// the upper half hands over to the lower half.
template <class W>
__device__ void add_warps(
    float (&acc)[W::QUERY_HEADS][W::ROWS_PER_THREAD],
    float* handed)  // shared [BLOCK_WARPS / 2][QUERY_HEADS][HEAD_SIZE]
{
    for (int half = W::BLOCK_WARPS / 2; half > 0; half /= 2) {
        const bool takes = W::block_warp() < half, gives = !takes && W::block_warp() < 2 * half;
        float* slot = handed + W::block_warp() % half * W::QUERY_HEADS * W::HEAD_SIZE;
        __syncthreads();  // all have read what is overwritten now
#pragma unroll
        for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
            for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
                if (gives && W::has_sum() && W::row(r) < W::HEAD_SIZE)
                    slot[h * W::HEAD_SIZE + W::row(r)] = acc[h][r];
        __syncthreads();
#pragma unroll
        for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
            for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
                if (takes && W::row(r) < W::HEAD_SIZE)
                    acc[h][r] += slot[h * W::HEAD_SIZE + W::row(r)];
    }
}

// The sums, times `factor`, to global memory.
template <class W, typename out_t>
__device__ void write_rows(
    out_t* out,  // [QUERY_HEADS, HEAD_SIZE], with head_stride
    int64_t head_stride, const float (&acc)[W::QUERY_HEADS][W::ROWS_PER_THREAD], float factor)
{
    if (W::block_warp() > 0 || !W::has_sum()) return;
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            if (W::row(r) < W::HEAD_SIZE)
                out[h * head_stride + W::row(r)] = out_t(acc[h][r] * factor);
}

// A length from 1 to what was announced.
__device__ bool has_keys(int seq_len, int max_seq_len) {
    return 0 < seq_len && seq_len <= max_seq_len;
}

// A sequence of length 0 gives 0 and lse −∞; one with a length that cannot be gives NaN.
template <typename scalar_t>
__device__ void write_without_keys(
    scalar_t* out,  // [head_size]
    float* lse,     // [1]
    int head_size, int seq_len)
{
    for (int row = threadIdx.x; row < head_size; row += blockDim.x)
        out[row] = scalar_t(seq_len == 0 ? 0.0f : NAN);
    if (threadIdx.x == 0) *lse = seq_len == 0 ? -INFINITY : NAN;
}

// All stages: the query heads of this thread block over the keys of its span. acc is whole in the
// threads that write_rows lets write. Dynamic shared memory: the larger of QUERY_HEADS · num_slots
// and BLOCK_WARPS / 2 · QUERY_HEADS · HEAD_SIZE floats.
template <class W>
__device__ Partial<W> attend_to_span(
    Span<W> span,
    const typename W::scalar_t* q,       // [num_seqs, num_heads, HEAD_SIZE]
    const typename W::cache_t* k_cache,  // [num_blocks, num_kv_heads, HEAD_SIZE / X, BLOCK_SIZE, X]
    const typename W::cache_t* v_cache,  // [num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE]
    const int* block_tables,             // [num_seqs, max_num_blocks]
    const float* alibi_slopes,           // [num_heads], or null
    int num_kv_heads, float scale,
    int64_t q_stride, int64_t kv_block_stride, int64_t kv_head_stride, int64_t table_stride)
{
    __shared__ typename W::Q_vec q_vecs[W::QUERY_HEADS][W::NUM_VECS];
    __shared__ float maxima[W::QUERY_HEADS][W::NUM_WARPS], sums[W::QUERY_HEADS][W::NUM_WARPS];
    extern __shared__ __align__(16) float scores[];  // [QUERY_HEADS][num_slots], later warps' sums

    const int seq = blockIdx.y, head = blockIdx.x * W::QUERY_HEADS;  // the first of QUERY_HEADS
    const int num_heads = gridDim.x * W::QUERY_HEADS, kv_head = head / (num_heads / num_kv_heads);
    k_cache += kv_head * kv_head_stride;
    v_cache += kv_head * kv_head_stride;
    const int* block_table = block_tables + seq * table_stride;

    Partial<W> partial = {};
    auto& [m, l, acc] = partial;
    float slopes[W::QUERY_HEADS];
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h)
        m[h] = -INFINITY, slopes[h] = alibi_slopes ? alibi_slopes[head + h] : 0.0f;

    load_queries<W>(q_vecs, q + seq * q_stride + head * W::HEAD_SIZE);
    __syncthreads();
    score_keys<W>(scores, m, q_vecs, k_cache, kv_block_stride, block_table, span, scale, slopes);
    reduce_thread_block<W::NUM_WARPS, W::THREAD_GROUP_SIZE>(m, maxima, Max());
    exponentiate<W>(scores, l, m, span);
    reduce_thread_block<W::NUM_WARPS, 1>(l, sums, Sum());
    weigh_values<W>(acc, scores, v_cache, kv_block_stride, block_table, span);
    add_warps<W>(acc, scores);
    return partial;
}

// ----------------------------------------------------------------------------------- the kernels

// One pass: a thread block sees a whole sequence, and its scores must fit shared memory.
// Grid: (num_heads, num_seqs).
template <typename scalar_t, typename cache_t, int HEAD_SIZE, int BLOCK_SIZE, int NUM_THREADS>
__global__ void __launch_bounds__(NUM_THREADS, 1) paged_attention_v1_kernel(
    scalar_t* __restrict__ out,              // [num_seqs, num_heads, HEAD_SIZE]
    float* __restrict__ lse,                 // [num_seqs, num_heads]
    const scalar_t* __restrict__ q,          // [num_seqs, num_heads, HEAD_SIZE]
    const cache_t* __restrict__ k_cache,     // [num_blocks, num_kv_heads, HEAD_SIZE / X, BLOCK_SIZE, X]
    const cache_t* __restrict__ v_cache,     // [num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE]
    const int* __restrict__ block_tables,    // [num_seqs, max_num_blocks]
    const int* __restrict__ seq_lens,        // [num_seqs]
    const float* __restrict__ alibi_slopes,  // [num_heads], or null
    int num_kv_heads, int max_seq_len, float scale,
    int64_t q_stride, int64_t kv_block_stride, int64_t kv_head_stride, int64_t table_stride,
    float v_scale)
{
    using W = Workers<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, NUM_THREADS, 1>;
    const int64_t row = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;  // of [num_seqs, num_heads]
    const int seq_len = seq_lens[blockIdx.y];
    out += row * HEAD_SIZE;
    lse += row;
    if (!has_keys(seq_len, max_seq_len)) return write_without_keys(out, lse, HEAD_SIZE, seq_len);

    const Span<W> span{0, divide_up(seq_len, BLOCK_SIZE), seq_len};
    const auto [m, l, acc] = attend_to_span<W>(
        span, q, k_cache, v_cache, block_tables, alibi_slopes, num_kv_heads, scale, q_stride,
        kv_block_stride, kv_head_stride, table_stride);
    // no weight at all: the sums are 0 already
    write_rows<W>(out, HEAD_SIZE, acc, l[0] > 0 ? v_scale / l[0] : v_scale);
    if (threadIdx.x == 0) *lse = m[0] + logf(l[0]);
}

// Partitions side by side, then their merge: any length, and many SMs for a single sequence.
// Grid: (num_heads / QUERY_HEADS, num_seqs, max_num_partitions).
template <typename scalar_t, typename cache_t, int HEAD_SIZE, int BLOCK_SIZE, int NUM_THREADS,
          int PARTITION_SIZE, int QUERY_HEADS>
__global__ void __launch_bounds__(NUM_THREADS, 1) paged_attention_v2_kernel(
    float* __restrict__ m,                   // [num_seqs, num_heads, max_num_partitions]
    float* __restrict__ l,                   // [num_seqs, num_heads, max_num_partitions]
    float* __restrict__ acc,                 // [num_seqs, num_heads, max_num_partitions, HEAD_SIZE]
    const scalar_t* __restrict__ q,          // [num_seqs, num_heads, HEAD_SIZE]
    const cache_t* __restrict__ k_cache,     // [num_blocks, num_kv_heads, HEAD_SIZE / X, BLOCK_SIZE, X]
    const cache_t* __restrict__ v_cache,     // [num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE]
    const int* __restrict__ block_tables,    // [num_seqs, max_num_blocks]
    const int* __restrict__ seq_lens,        // [num_seqs]
    const float* __restrict__ alibi_slopes,  // [num_heads], or null
    int num_kv_heads, int max_seq_len, float scale,
    int64_t q_stride, int64_t kv_block_stride, int64_t kv_head_stride, int64_t table_stride)
{
    using W = Workers<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, NUM_THREADS, QUERY_HEADS>;
    static_assert(PARTITION_SIZE % BLOCK_SIZE == 0, "a partition is whole blocks");
    constexpr int PARTITION_BLOCKS = PARTITION_SIZE / BLOCK_SIZE;

    const int seq_len = seq_lens[blockIdx.y], num_blocks = divide_up(seq_len, BLOCK_SIZE);
    const int partition = blockIdx.z, first_block = partition * PARTITION_BLOCKS;
    if (!has_keys(seq_len, max_seq_len) || first_block >= num_blocks) return;

    const Span<W> span{first_block, min(first_block + PARTITION_BLOCKS, num_blocks), seq_len};
    const Partial<W> partial = attend_to_span<W>(
        span, q, k_cache, v_cache, block_tables, alibi_slopes, num_kv_heads, scale, q_stride,
        kv_block_stride, kv_head_stride, table_stride);

    const int64_t row = (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * QUERY_HEADS;
    const int64_t part = row * gridDim.z + partition;  // of [num_seqs, num_heads, max_num_partitions]
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h)
        if (threadIdx.x == 0) {
            m[part + int64_t(h) * gridDim.z] = partial.m[h];
            l[part + int64_t(h) * gridDim.z] = partial.l[h];
        }
    write_rows<W>(acc + part * HEAD_SIZE, int64_t(gridDim.z) * HEAD_SIZE, partial.acc, 1);
}

// v2's second kernel: lesson 3's merge of the partitions of one head, for any number of them.
//     m = max mᵢ        l = Σ exp(mᵢ − m) · lᵢ        out = v_scale · Σ exp(mᵢ − m) · accᵢ / l
// Grid: (num_heads, num_seqs).
template <typename scalar_t, int HEAD_SIZE, int NUM_THREADS>
__global__ void __launch_bounds__(NUM_THREADS) paged_attention_merge_kernel(
    scalar_t* __restrict__ out,        // [num_seqs, num_heads, HEAD_SIZE]
    float* __restrict__ lse,           // [num_seqs, num_heads]
    const float* __restrict__ m,       // [num_seqs, num_heads, max_num_partitions]
    const float* __restrict__ l,       // [num_seqs, num_heads, max_num_partitions]
    const float* __restrict__ acc,     // [num_seqs, num_heads, max_num_partitions, HEAD_SIZE]
    const int* __restrict__ seq_lens,  // [num_seqs]
    int max_num_partitions, int partition_size, int max_seq_len, float v_scale)
{
    constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
    __shared__ float maxima[1][NUM_WARPS], sums[1][NUM_WARPS];

    const int64_t row = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;  // of [num_seqs, num_heads]
    const int seq_len = seq_lens[blockIdx.y];
    out += row * HEAD_SIZE;
    lse += row;
    if (!has_keys(seq_len, max_seq_len)) return write_without_keys(out, lse, HEAD_SIZE, seq_len);

    const int num_partitions = divide_up(seq_len, partition_size);
    m += row * max_num_partitions;
    l += row * max_num_partitions;
    acc += row * max_num_partitions * HEAD_SIZE;

    float m_all[1] = {-INFINITY}, l_all[1] = {0};
    for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS)
        m_all[0] = fmaxf(m_all[0], m[i]);
    reduce_thread_block<NUM_WARPS, 1>(m_all, maxima, Max());
    for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS)
        l_all[0] += expf(m[i] - finite(m_all[0])) * l[i];
    reduce_thread_block<NUM_WARPS, 1>(l_all, sums, Sum());

    for (int d = threadIdx.x; d < HEAD_SIZE; d += NUM_THREADS) {
        float acc_all = 0;
        for (int i = 0; i < num_partitions; ++i)
            acc_all += expf(m[i] - finite(m_all[0])) * acc[int64_t(i) * HEAD_SIZE + d];
        out[d] = scalar_t(v_scale * acc_all / (l_all[0] > 0 ? l_all[0] : 1));
    }
    if (threadIdx.x == 0) *lse = m_all[0] + logf(l_all[0]);
}
