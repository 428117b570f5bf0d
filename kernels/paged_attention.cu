// Paged attention: one new query per sequence, over keys and values that are stored in blocks (lesson 5).
//
//     k, v = k_cache[block_table], v_cache[block_table]: the first seq_len tokens
//     s_j  = scale · q·k_j + alibi_slope · (j − (seq_len − 1))
//     out  = v_scale · softmax(s) v         lse = log Σ exp(s_j)        softmax in float32
//
// The design is that of vLLM's paged_attention v1 and v2 (Kwon et al. 2023). The code is our own.
//
//     grid           (num_heads, num_seqs, partitions), one thread block for each
//     warp           reads a block of BLOCK_SIZE tokens at a time: warp w reads w, w + NUM_WARPS, …
//     thread group   THREAD_GROUP_SIZE neighbouring threads, which compute q·k of one key together
//     vec            the elements that a thread reads at once; in QK, the threads of a thread group
//                    together read 16 bytes of scalar_t
//
// v1 is one kernel. v2 is a kernel that writes lesson 3's Partial(m, l, acc) of each partition, and their merge.
// paged_attention_grouped.cu has the variant that reads K and V once for several query heads.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

constexpr int WARP_SIZE = 32, NUM_WARPS = 4, NUM_THREADS = NUM_WARPS * WARP_SIZE;  // of a thread block
constexpr unsigned ALL_LANES = 0xffffffff;

__device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// N neighbouring elements. One instruction moves at most 16 bytes of them.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
    T data[N];
};

template <typename A, typename B, int N>
__device__ float dot(const Vec<A, N>& a, const Vec<B, N>& b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += float(a.data[i]) * float(b.data[i]);
    return sum;
}

// How the threads of a thread block share the work. The stages call it W.
template <typename scalar, typename cache, int head_size, int block_size>
struct Workers {
    using scalar_t = scalar;  // of q and out
    using cache_t = cache;    // of the caches: scalar_t or float8
    static constexpr int HEAD_SIZE = head_size, BLOCK_SIZE = block_size;
    // QK: k_cache [num_blocks, num_kv_heads, HEAD_SIZE / X, BLOCK_SIZE, X]
    static constexpr int X = 16 / sizeof(cache_t);
    static constexpr int THREAD_GROUP_SIZE = WARP_SIZE / BLOCK_SIZE;  // a thread group per token
    static constexpr int VEC_SIZE = 16 / (THREAD_GROUP_SIZE * sizeof(scalar_t));
    static constexpr int NUM_VECS = HEAD_SIZE / VEC_SIZE;  // of one query, of one key
    static constexpr int VECS_PER_THREAD = NUM_VECS / THREAD_GROUP_SIZE;
    using Q_vec = Vec<scalar_t, VEC_SIZE>;
    using K_vec = Vec<cache_t, VEC_SIZE>;
    // PV: v_cache [num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE]; a row is one element of the head
    static constexpr int V_VEC_SIZE = 16 / sizeof(scalar_t);  // tokens
    static constexpr int VECS_PER_ROW = BLOCK_SIZE / V_VEC_SIZE;
    static constexpr int ROWS_PER_STEP = WARP_SIZE / VECS_PER_ROW;  // rows that a warp reads at once
    static constexpr int ROWS_PER_THREAD = divide_up(HEAD_SIZE, ROWS_PER_STEP);
    using V_vec = Vec<cache_t, V_VEC_SIZE>;
    using weights_t = Vec<float, V_VEC_SIZE>;

    // This thread in its thread group.
    __device__ static int member() { return threadIdx.x % THREAD_GROUP_SIZE; }
    // The r-th row of this thread. Rows from HEAD_SIZE on do not exist.
    __device__ static int row(int r) { return r * ROWS_PER_STEP + threadIdx.x % WARP_SIZE / VECS_PER_ROW; }

    static_assert(BLOCK_SIZE == 8 || BLOCK_SIZE == 16 || BLOCK_SIZE == 32, "whole thread groups and vecs");
    static_assert(HEAD_SIZE % X == 0, "the layout of k_cache has HEAD_SIZE / X rows of 16 bytes");
    static_assert(NUM_VECS % THREAD_GROUP_SIZE == 0, "a thread group reads whole vecs");
};

// What one thread block sees of the caches: tokens of one sequence and one KV head, in whole blocks, of which
// the last may not be full.
template <class W>
struct Span {
    const typename W::cache_t* k_cache;  // of the KV head: [blocks][HEAD_SIZE / X][BLOCK_SIZE][X]
    const typename W::cache_t* v_cache;  // of the KV head: [blocks][HEAD_SIZE][BLOCK_SIZE]
    int64_t kv_block_stride;
    const int* block_table;  // [max_num_blocks]
    int first_block, end_block, seq_len;

    __device__ int first_token() const { return first_block * W::BLOCK_SIZE; }
    __device__ int num_slots() const { return (end_block - first_block) * W::BLOCK_SIZE; }
    __device__ auto* keys(int block) const { return k_cache + offset(block); }
    __device__ auto* values(int block) const { return v_cache + offset(block); }
    __device__ int64_t offset(int block) const { return int64_t(block_table[block]) * kv_block_stride; }
};

// Lesson 3's summary of a span. A thread has only its own rows of acc.
template <class W>
struct Partial {
    float m = -INFINITY, l = 0, acc[W::ROWS_PER_THREAD] = {};
};

__device__ float add(float a, float b) { return a + b; }

// Combine the values of lanes that are a multiple of NEAREST apart, by a butterfly of shuffles.
template <int NEAREST, int FARTHEST = WARP_SIZE / 2, typename Op>
__device__ float reduce_lanes(float value, Op op) {
#pragma unroll
    for (int distance = FARTHEST; distance >= NEAREST; distance /= 2)
        value = op(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// Combine the values of all threads: first the lanes of each warp, then the warps. Every thread gets
// the result.
template <int NEAREST, typename Op>
__device__ float reduce_thread_block(
    float value,
    float* scratch,  // shared [NUM_WARPS]
    Op op)
{
    value = reduce_lanes<NEAREST>(value, op);
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < NUM_WARPS; ++warp) value = op(value, scratch[warp]);
    return value;
}

// m, with 0 where every score is −∞ because a product overflowed: (−∞) − (−∞) would be NaN.
__device__ float finite(float m) { return m == -INFINITY ? 0.0f : m; }

// ----------------------------------------------------------------------------------- the stages

// Global → shared: the query, vec by vec. The threads of a group then read neighbouring vecs.
template <class W, int N>
__device__ void load_query(
    typename W::Q_vec (&q_vecs)[N],  // shared; N = NUM_VECS for one query
    const typename W::scalar_t* q)   // [N * VEC_SIZE]
{
    for (int i = threadIdx.x; i < N; i += blockDim.x)
        q_vecs[i] = *reinterpret_cast<const typename W::Q_vec*>(q + i * W::VEC_SIZE);
}

// Global → registers: the vecs of one key that this thread multiplies. No other thread needs them.
template <class W>
__device__ void load_key(
    typename W::K_vec (&k_vecs)[W::VECS_PER_THREAD],
    const typename W::cache_t* key)  // [HEAD_SIZE / X][X], rows BLOCK_SIZE * X apart
{
#pragma unroll
    for (int j = 0; j < W::VECS_PER_THREAD; ++j) {
        const int element = (j * W::THREAD_GROUP_SIZE + W::member()) * W::VEC_SIZE;
        const auto* address = key + element / W::X * W::BLOCK_SIZE * W::X + element % W::X;
        k_vecs[j] = *reinterpret_cast<const typename W::K_vec*>(address);
    }
}

// The score of one key, −∞ after the end of the sequence. The members of a thread group add their parts of
// q·k. Each of them gets the score.
template <class W>
__device__ float score_key(
    const typename W::Q_vec* q_vecs,  // shared [NUM_VECS]
    const typename W::K_vec (&k_vecs)[W::VECS_PER_THREAD],
    int token, int seq_len, float scale, float slope)
{
    float qk = 0;
#pragma unroll
    for (int j = 0; j < W::VECS_PER_THREAD; ++j) {
        const typename W::Q_vec q_vec = q_vecs[j * W::THREAD_GROUP_SIZE + W::member()];
        qk += dot(q_vec, k_vecs[j]);
    }
    qk = reduce_lanes<1, W::THREAD_GROUP_SIZE / 2>(qk, add);
    const float bias = slope * (token - (seq_len - 1));
    // A slot without a token may hold anything, also NaN: select its score, do not add to it.
    return token < seq_len ? scale * qk + bias : -INFINITY;
}

// Load each key of the span in turn, and call `score` with its token and this thread's vecs of it.
template <class W, class Score>
__device__ void for_each_key(Span<W> span, Score score) {
    const int warp = threadIdx.x / WARP_SIZE;
    const int offset = threadIdx.x % WARP_SIZE / W::THREAD_GROUP_SIZE;  // of the token in its block
    for (int block = span.first_block + warp; block < span.end_block; block += NUM_WARPS) {
        typename W::K_vec k_vecs[W::VECS_PER_THREAD];
        load_key<W>(k_vecs, span.keys(block) + offset * W::X);
        score(block * W::BLOCK_SIZE + offset, k_vecs);
    }
}

// The scores of all keys of the span. Returns the largest score that this thread has seen.
template <class W>
__device__ float score_keys(
    float* scores,                    // shared [num_slots]
    const typename W::Q_vec* q_vecs,  // shared [NUM_VECS]
    Span<W> span, float scale, float slope)
{
    float m = -INFINITY;
    for_each_key<W>(span, [&](int token, const auto& k_vecs) {
        // Without this fence the compiler keeps all of q_vecs in registers, and registers spill.
        if (W::VECS_PER_THREAD * W::VEC_SIZE > 64) __syncwarp();
        const float score = score_key<W>(q_vecs, k_vecs, token, span.seq_len, scale, slope);
        if (W::member() == 0) scores[token - span.first_token()] = score;
        m = fmaxf(m, score);
    });
    return m;
}

// Replace each score by exp(score − m). Returns the sum of the weights that this thread computed.
template <class W>
__device__ float exponentiate(
    float* scores,  // shared [num_slots]
    float m, Span<W> span)
{
    float l = 0;
    for (int i = threadIdx.x; i < span.num_slots(); i += blockDim.x) {
        const float weight = expf(scores[i] - finite(m));
        scores[i] = weight;
        l += weight;
    }
    return l;
}

// Global → registers: one row of V_VEC_SIZE values. Only the first `live` of them belong to tokens. The
// others may hold NaN, which a weight of 0 does not hide, so they become 0.
template <class W>
__device__ typename W::V_vec load_values(const typename W::cache_t* v_row, int live) {
    using cache_t = typename W::cache_t;
    auto v_vec = *reinterpret_cast<const typename W::V_vec*>(v_row);
    if (live < W::V_VEC_SIZE)
#pragma unroll
        for (int i = 0; i < W::V_VEC_SIZE; ++i)
            if (i >= live) v_vec.data[i] = cache_t(0.0f);
    return v_vec;
}

// acc[r] = Σ weight · v over the blocks of this warp, for row r of this thread. This stage has no thread
// groups. A thread reads V_VEC_SIZE tokens of a row, VECS_PER_ROW lanes together read the whole row, and
// the sums of these lanes are added at the end.
template <class W>
__device__ void weigh_values(
    float (&acc)[W::ROWS_PER_THREAD],
    const float* weights,  // shared [num_slots]
    Span<W> span)
{
    const int warp = threadIdx.x / WARP_SIZE;
    // Of its tokens in the block. With an int, the compiler would compute the address of each row anew.
    const int64_t offset = threadIdx.x % W::VECS_PER_ROW * W::V_VEC_SIZE;

    for (int block = span.first_block + warp; block < span.end_block; block += NUM_WARPS) {
        const auto* v_row = span.values(block) + W::row(0) * W::BLOCK_SIZE + offset;
        const int token = block * W::BLOCK_SIZE + offset, live = span.seq_len - token;
        const auto w = *reinterpret_cast<const typename W::weights_t*>(weights + token - span.first_token());
#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            if (W::row(r) < W::HEAD_SIZE)
                acc[r] += dot(w, load_values<W>(v_row + r * W::ROWS_PER_STEP * W::BLOCK_SIZE, live));
    }
#pragma unroll
    for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
        acc[r] = reduce_lanes<1, W::VECS_PER_ROW / 2>(acc[r], add);
}

// Registers → memory: the rows of this thread, times `factor`. VECS_PER_ROW lanes share a row, and the first
// of them writes it.
template <class W, typename out_t>
__device__ void write_rows(
    out_t* out,  // [HEAD_SIZE]
    const float (&acc)[W::ROWS_PER_THREAD], float factor)
{
    if (threadIdx.x % W::VECS_PER_ROW != 0) return;
#pragma unroll
    for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
        if (W::row(r) < W::HEAD_SIZE) out[W::row(r)] = out_t(acc[r] * factor);
}

// Add the sums of all warps, in log₂(NUM_WARPS) rounds: the upper half of the warps stores its sums, and
// the lower half adds them to its own. Warp 0 has the result.
template <class W>
__device__ void add_warps(
    float (&acc)[W::ROWS_PER_THREAD],
    float* scratch)  // shared [NUM_WARPS / 2][HEAD_SIZE]
{
    const int warp = threadIdx.x / WARP_SIZE;
    for (int half = NUM_WARPS / 2; half > 0; half /= 2) {
        float* sums = scratch + warp % half * W::HEAD_SIZE;
        __syncthreads();  // all warps have read what is overwritten now
        if (warp >= half && warp < 2 * half) write_rows<W>(sums, acc, 1);
        __syncthreads();
        if (warp < half)
#pragma unroll
            for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
                if (W::row(r) < W::HEAD_SIZE) acc[r] += sums[W::row(r)];
    }
}

// Whether the launch was made for this length. The results of other lengths are NaN.
__device__ bool is_allowed(int seq_len, int max_seq_len) { return 0 <= seq_len && seq_len <= max_seq_len; }

// The span of partition blockIdx.z. It has no slots if the sequence ends before it, or is not allowed. The
// arguments are those of the kernels.
template <class W>
__device__ Span<W> span_of_partition(
    int partition_blocks, int kv_head, const typename W::cache_t* k_cache,
    const typename W::cache_t* v_cache, const int* block_tables, const int* seq_lens, int max_seq_len,
    int64_t kv_block_stride, int64_t kv_head_stride, int64_t table_stride)
{
    const int seq = blockIdx.y, seq_len = seq_lens[seq], first_block = blockIdx.z * partition_blocks;
    const int num_blocks = is_allowed(seq_len, max_seq_len) ? divide_up(seq_len, W::BLOCK_SIZE) : 0;
    return {k_cache + kv_head * kv_head_stride, v_cache + kv_head * kv_head_stride, kv_block_stride,
            block_tables + seq * table_stride, first_block, min(first_block + partition_blocks, num_blocks), seq_len};
}

// All stages: one query head over the keys of a span. The arguments are those of the kernels. Dynamic
// shared memory: num_slots floats or NUM_WARPS / 2 · HEAD_SIZE floats, whichever is larger.
template <class W>
__device__ Partial<W> attend_to_span(
    Span<W> span, const typename W::scalar_t* q, const float* alibi_slopes, float scale, int64_t q_stride)
{
    __shared__ typename W::Q_vec q_vecs[W::NUM_VECS];
    __shared__ float maxima[NUM_WARPS], sums[NUM_WARPS];
    extern __shared__ __align__(16) float scores[];  // [num_slots]; later the sums of warps

    const int seq = blockIdx.y, head = blockIdx.x;
    const float slope = alibi_slopes ? alibi_slopes[head] : 0.0f;
    Partial<W> partial;
    auto& [m, l, acc] = partial;
    load_query<W>(q_vecs, q + seq * q_stride + head * W::HEAD_SIZE);
    __syncthreads();
    m = score_keys<W>(scores, q_vecs, span, scale, slope);
    m = reduce_thread_block<W::THREAD_GROUP_SIZE>(m, maxima, fmaxf);
    l = exponentiate<W>(scores, m, span);
    l = reduce_thread_block<1>(l, sums, add);
    weigh_values<W>(acc, scores, span);
    add_warps<W>(acc, scores);
    return partial;
}

// ----------------------------------------------------------------------------------- the kernels

// One pass: a thread block sees a whole sequence, and the scores must fit in its shared memory.
// Grid: (num_heads, num_seqs).
template <typename scalar_t, typename cache_t, int HEAD_SIZE, int BLOCK_SIZE>
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
    using W = Workers<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE>;
    const auto span = span_of_partition<W>(
        divide_up(max_seq_len, BLOCK_SIZE), blockIdx.x / (gridDim.x / num_kv_heads), k_cache, v_cache,
        block_tables, seq_lens, max_seq_len, kv_block_stride, kv_head_stride, table_stride);
    auto [m, l, acc] = attend_to_span<W>(span, q, alibi_slopes, scale, q_stride);
    if (!is_allowed(span.seq_len, max_seq_len)) l = NAN;

    const int64_t row = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;  // of [num_seqs, num_heads]
    // If every weight is 0, then acc is 0 already and l must not divide it.
    if (threadIdx.x < WARP_SIZE) write_rows<W>(out + row * HEAD_SIZE, acc, l == 0 ? v_scale : v_scale / l);
    if (threadIdx.x == 0) lse[row] = m + logf(l);
}

// Partitions in parallel, each of partition_blocks blocks: any length, and many SMs for a single sequence.
// Grid: (num_heads, num_seqs, max_num_partitions). The arguments from q to table_stride are those of v1.
template <typename scalar_t, typename cache_t, int HEAD_SIZE, int BLOCK_SIZE>
__global__ void __launch_bounds__(NUM_THREADS, 1) paged_attention_v2_kernel(
    float* __restrict__ m,    // [num_seqs, num_heads, max_num_partitions]
    float* __restrict__ l,    // [num_seqs, num_heads, max_num_partitions]
    float* __restrict__ acc,  // [num_seqs, num_heads, max_num_partitions, HEAD_SIZE]
    const scalar_t* __restrict__ q, const cache_t* __restrict__ k_cache,
    const cache_t* __restrict__ v_cache, const int* __restrict__ block_tables,
    const int* __restrict__ seq_lens, const float* __restrict__ alibi_slopes,
    int num_kv_heads, int max_seq_len, float scale,
    int64_t q_stride, int64_t kv_block_stride, int64_t kv_head_stride, int64_t table_stride,
    int partition_blocks)
{
    using W = Workers<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE>;
    const auto span = span_of_partition<W>(
        partition_blocks, blockIdx.x / (gridDim.x / num_kv_heads), k_cache, v_cache, block_tables,
        seq_lens, max_seq_len, kv_block_stride, kv_head_stride, table_stride);
    if (span.num_slots() <= 0) return;
    const auto partial = attend_to_span<W>(span, q, alibi_slopes, scale, q_stride);

    const int64_t row = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;  // of [num_seqs, num_heads]
    const int64_t index = row * gridDim.z + blockIdx.z;  // of [num_seqs, num_heads, max_num_partitions]
    if (threadIdx.x == 0) {
        m[index] = partial.m;
        l[index] = partial.l;
    }
    if (threadIdx.x < WARP_SIZE) write_rows<W>(acc + index * HEAD_SIZE, partial.acc, 1);
}

// The second kernel of v2: lesson 3's merge of the partitions of one head, for any number of them.
//     m = max mᵢ        l = Σ exp(mᵢ − m) · lᵢ        out = v_scale · Σ exp(mᵢ − m) · accᵢ / l
// Grid: (num_heads, num_seqs).
template <typename scalar_t, int HEAD_SIZE>
__global__ void __launch_bounds__(NUM_THREADS) paged_attention_merge_kernel(
    scalar_t* __restrict__ out,        // [num_seqs, num_heads, HEAD_SIZE]
    float* __restrict__ lse,           // [num_seqs, num_heads]
    const float* __restrict__ m,       // [num_seqs, num_heads, max_num_partitions]
    const float* __restrict__ l,       // [num_seqs, num_heads, max_num_partitions]
    const float* __restrict__ acc,     // [num_seqs, num_heads, max_num_partitions, HEAD_SIZE]
    const int* __restrict__ seq_lens,  // [num_seqs]
    int max_num_partitions, int partition_size, int max_seq_len, float v_scale)
{
    __shared__ float maxima[NUM_WARPS], sums[NUM_WARPS];

    const int64_t row = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;  // of [num_seqs, num_heads]
    const int seq_len = seq_lens[blockIdx.y];
    const bool allowed = is_allowed(seq_len, max_seq_len);
    const int num_partitions = allowed ? divide_up(seq_len, partition_size) : 0;
    m += row * max_num_partitions;
    l += row * max_num_partitions;
    acc += row * max_num_partitions * HEAD_SIZE;

    float m_all = -INFINITY, l_all = allowed ? 0 : NAN;
    for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS) m_all = fmaxf(m_all, m[i]);
    m_all = reduce_thread_block<1>(m_all, maxima, fmaxf);
    for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS)
        l_all += expf(m[i] - finite(m_all)) * l[i];
    l_all = reduce_thread_block<1>(l_all, sums, add);

    for (int d = threadIdx.x; d < HEAD_SIZE; d += NUM_THREADS) {
        float acc_all = 0;
        for (int i = 0; i < num_partitions; ++i)
            acc_all += expf(m[i] - finite(m_all)) * acc[int64_t(i) * HEAD_SIZE + d];
        out[row * HEAD_SIZE + d] = scalar_t(v_scale * acc_all / (l_all == 0 ? 1 : l_all));
    }
    if (threadIdx.x == 0) lse[row] = m_all + logf(l_all);
}
