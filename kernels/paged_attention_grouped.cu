// Paged attention that reads K and V once for several query heads (lesson 5).
//
// With grouped-query attention, num_heads / num_kv_heads query heads share a KV head. v1 and v2 of
// paged_attention.cu read the keys and values of that KV head once for each of them. Here a thread block
// attends with QUERY_HEADS of these heads at once, so it reads every key and value once for all of them.
// The stages have the names and the order that they have in paged_attention.cu, and every array has one
// more dimension. paged_attention_merge_kernel merges the partitions, as for v2.

#include "paged_attention.cu"

namespace grouped {

// The number of warps, a power of two, that share `sums` sums so that each thread keeps at most 32.
__device__ constexpr int warps_for(int sums, int num_warps) {
    int warps = 1;
    while (warps < num_warps && sums > 32 * warps) warps *= 2;
    return warps;
}

// In PV, ROW_WARPS warps share the rows of a block, because the sums of many heads would not fit in the
// registers of one warp. The warps form BLOCK_WARPS teams, and each team reads a block of its own.
template <typename scalar, typename cache, int head_size, int block_size, int num_threads,
          int query_heads>
struct Workers : ::Workers<scalar, cache, head_size, block_size, num_threads> {
    using Base = ::Workers<scalar, cache, head_size, block_size, num_threads>;
    static constexpr int QUERY_HEADS = query_heads;
    static constexpr int ROW_WARPS = warps_for(QUERY_HEADS * Base::ROWS_PER_THREAD, Base::NUM_WARPS);
    static constexpr int BLOCK_WARPS = Base::NUM_WARPS / ROW_WARPS;
    static constexpr int ROWS_PER_THREAD = divide_up(head_size, Base::ROWS_PER_STEP * ROW_WARPS);

    __device__ static int team() { return threadIdx.x / WARP_SIZE / ROW_WARPS; }
    // The r-th row of this thread. Rows from HEAD_SIZE on do not exist.
    __device__ static int row(int r) {
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
        return (r * ROW_WARPS + warp % ROW_WARPS) * Base::ROWS_PER_STEP + lane / Base::VECS_PER_ROW;
    }
};

// Lesson 3's summary of a span, for each query head. A thread has only its own rows of acc.
template <class W>
struct Partial {
    float m[W::QUERY_HEADS], l[W::QUERY_HEADS], acc[W::QUERY_HEADS][W::ROWS_PER_THREAD];
};

// `reduce_thread_block` for one value per query head, with one barrier for all of them.
template <int NUM_WARPS, int NEAREST, int N, typename Op>
__device__ void reduce_thread_block(
    float (&values)[N],
    float (*scratch)[NUM_WARPS],  // shared [N][NUM_WARPS]
    Op op)
{
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

// Global → shared: the queries, which are neighbours in memory.
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

// The scores of all keys of the span, −∞ after the end of the sequence. m[h] becomes the largest score
// that this thread has seen.
template <class W>
__device__ void score_keys(
    float* scores,  // shared [QUERY_HEADS][num_slots]
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
        // Without this fence the compiler keeps all of q_vecs in registers, and registers spill.
        if (W::QUERY_HEADS * W::VECS_PER_THREAD * W::VEC_SIZE > 64) __syncwarp();

        for (int i = 0; i < W::TOKENS_PER_GROUP; ++i) {
            const int offset = group + i * W::GROUPS_PER_WARP;  // of the token in its block
            const int token = block * W::BLOCK_SIZE + offset;

            K_vec k_vecs[W::VECS_PER_THREAD];  // global → registers, once for all heads
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
                // A slot without a token may hold anything, also NaN: select its score, do not add to it.
                const float score = token < span.seq_len ? scale * qk[h] + bias : -INFINITY;
                if (member == 0) scores[h * span.num_slots() + token - span.first_token()] = score;
                m[h] = fmaxf(m[h], score);
            }
        }
    }
}

// Replace each score by exp(score − m). l[h] becomes the sum of the weights that this thread computed.
template <class W>
__device__ void exponentiate(
    float* scores,  // shared [QUERY_HEADS][num_slots]
    float (&l)[W::QUERY_HEADS], const float (&m)[W::QUERY_HEADS], Span<W> span)
{
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h)
        for (int i = threadIdx.x; i < span.num_slots(); i += blockDim.x) {
            float& score = scores[h * span.num_slots() + i];
            const float weight = expf(score - finite(m[h]));
            score = weight;
            l[h] += weight;
        }
}

// acc[h][r] = Σ weight · v over the blocks of this team, for row r of this thread. A thread reads
// V_VEC_SIZE tokens of a row, VECS_PER_ROW lanes together read the whole row, and the sums of these lanes
// are added at the end.
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

    for (int block = span.first_block + W::team(); block < span.end_block; block += W::BLOCK_WARPS) {
        const cache_t* v_block = v_cache + int64_t(block_table[block]) * kv_block_stride;
        const int token = block * W::BLOCK_SIZE + offset;
        const int live = span.seq_len - token;  // tokens of this thread that exist

        Vec<float, W::V_VEC_SIZE> w[W::QUERY_HEADS];
#pragma unroll
        for (int h = 0; h < W::QUERY_HEADS; ++h) {
            const float* first_weight = weights + h * span.num_slots() + token - span.first_token();
#pragma unroll
            for (int i = 0; i < W::V_VEC_SIZE; i += 4)
                *reinterpret_cast<float4*>(w[h].data + i) =
                    *reinterpret_cast<const float4*>(first_weight + i);
        }

#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            if (W::row(r) < W::HEAD_SIZE) {
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

// Add the sums of all teams, in log₂(BLOCK_WARPS) rounds: the upper half of the teams stores its sums,
// and the lower half adds them to its own. Team 0 has the result.
template <class W>
__device__ void add_warps(
    float (&acc)[W::QUERY_HEADS][W::ROWS_PER_THREAD],
    float* scratch)  // shared [BLOCK_WARPS / 2][QUERY_HEADS][HEAD_SIZE]
{
    for (int half = W::BLOCK_WARPS / 2; half > 0; half /= 2) {
        float* sums = scratch + W::team() % half * W::QUERY_HEADS * W::HEAD_SIZE;
        __syncthreads();  // all warps have read what is overwritten now
        if (W::team() >= half && W::team() < 2 * half && W::stores_row())
#pragma unroll
            for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
                for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
                    if (W::row(r) < W::HEAD_SIZE) sums[h * W::HEAD_SIZE + W::row(r)] = acc[h][r];
        __syncthreads();
        if (W::team() < half)
#pragma unroll
            for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
                for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
                    if (W::row(r) < W::HEAD_SIZE) acc[h][r] += sums[h * W::HEAD_SIZE + W::row(r)];
    }
}

// Registers → global: the sums of team 0.
template <class W>
__device__ void write_rows(
    float* out,  // [QUERY_HEADS, HEAD_SIZE], heads head_stride apart
    int64_t head_stride, const float (&acc)[W::QUERY_HEADS][W::ROWS_PER_THREAD])
{
    if (W::team() > 0 || !W::stores_row()) return;
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            if (W::row(r) < W::HEAD_SIZE) out[h * head_stride + W::row(r)] = acc[h][r];
}

}  // namespace grouped

// Grid: (num_heads / QUERY_HEADS, num_seqs, max_num_partitions). Dynamic shared memory: QUERY_HEADS times
// PARTITION_SIZE floats, or QUERY_HEADS times NUM_WARPS / 2 · HEAD_SIZE floats, whichever is more.
template <typename scalar_t, typename cache_t, int HEAD_SIZE, int BLOCK_SIZE, int NUM_THREADS,
          int PARTITION_SIZE, int QUERY_HEADS>
__global__ void __launch_bounds__(NUM_THREADS, 1) paged_attention_grouped_kernel(
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
    using W = grouped::Workers<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, NUM_THREADS, QUERY_HEADS>;
    static_assert(PARTITION_SIZE % BLOCK_SIZE == 0, "a partition is whole blocks");
    constexpr int PARTITION_BLOCKS = PARTITION_SIZE / BLOCK_SIZE;
    __shared__ typename W::Q_vec q_vecs[QUERY_HEADS][W::NUM_VECS];
    __shared__ float maxima[QUERY_HEADS][W::NUM_WARPS], sums[QUERY_HEADS][W::NUM_WARPS];
    extern __shared__ __align__(16) float scores[];  // [QUERY_HEADS][num_slots]; later the sums of warps

    const int seq = blockIdx.y, partition = blockIdx.z;
    const int head = blockIdx.x * QUERY_HEADS, num_heads = gridDim.x * QUERY_HEADS;  // its first head
    const int seq_len = seq_lens[seq], num_blocks = divide_up(seq_len, BLOCK_SIZE);
    const int first_block = partition * PARTITION_BLOCKS;
    if (!has_keys(seq_len, max_seq_len) || first_block >= num_blocks) return;

    const Span<W> span{first_block, min(first_block + PARTITION_BLOCKS, num_blocks), seq_len};
    const int kv_head = head / (num_heads / num_kv_heads);
    k_cache += kv_head * kv_head_stride;
    v_cache += kv_head * kv_head_stride;
    const int* block_table = block_tables + seq * table_stride;

    grouped::Partial<W> partial = {};
    float slopes[QUERY_HEADS];
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
        partial.m[h] = -INFINITY;
        slopes[h] = alibi_slopes ? alibi_slopes[head + h] : 0.0f;
    }

    grouped::load_queries<W>(q_vecs, q + seq * q_stride + head * HEAD_SIZE);
    __syncthreads();
    grouped::score_keys<W>(
        scores, partial.m, q_vecs, k_cache, kv_block_stride, block_table, span, scale, slopes);
    grouped::reduce_thread_block<W::NUM_WARPS, W::THREAD_GROUP_SIZE>(partial.m, maxima, Max());
    grouped::exponentiate<W>(scores, partial.l, partial.m, span);
    grouped::reduce_thread_block<W::NUM_WARPS, 1>(partial.l, sums, Sum());
    grouped::weigh_values<W>(partial.acc, scores, v_cache, kv_block_stride, block_table, span);
    grouped::add_warps<W>(partial.acc, scores);

    const int64_t row = int64_t(seq) * num_heads + head;  // of [num_seqs, num_heads]
    const int64_t index = row * gridDim.z + partition;    // of [num_seqs, num_heads, max_num_partitions]
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h)
        if (threadIdx.x == 0) {
            m[index + int64_t(h) * gridDim.z] = partial.m[h];
            l[index + int64_t(h) * gridDim.z] = partial.l[h];
        }
    grouped::write_rows<W>(acc + index * HEAD_SIZE, int64_t(gridDim.z) * HEAD_SIZE, partial.acc);
}
