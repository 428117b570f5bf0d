// Paged attention that reads K and V once for several query heads (lesson 5).
//
// With grouped-query attention, num_heads / num_kv_heads query heads share a KV head. v1 and v2 of
// paged_attention.cu read the keys and values of that KV head once for each of them. Here a thread block
// attends with QUERY_HEADS of these heads at once, so it reads every key and value once for all of them.
// The kernel calls most stages of paged_attention.cu once per head. The two stages that are defined here
// go through K or V once for all heads. paged_attention_merge_kernel merges the partitions.

#include "paged_attention.cu"

namespace grouped {

// In PV, all warps share the rows of each block, because the sums of many heads would not fit in the
// registers of one warp. No warp then has to add the sums of other warps. The cost: each warp reads the
// weights of all tokens, and some warps have no row of a small head in blocks of few tokens.
template <class Base, int query_heads>
struct Workers : Base {
    static constexpr int QUERY_HEADS = query_heads;
    static constexpr int ROWS_PER_STEP = NUM_WARPS * Base::ROWS_PER_STEP;  // of all warps
    static constexpr int ROWS_PER_THREAD = divide_up(Base::HEAD_SIZE, ROWS_PER_STEP);

    // The r-th row of this thread. Rows from HEAD_SIZE on do not exist.
    __device__ static int row(int r) { return r * ROWS_PER_STEP + threadIdx.x / Base::VECS_PER_ROW; }
};

// The scores of all keys of the span. Each partial's m becomes the largest score that this thread has seen.
template <class W>
__device__ void score_keys(
    Partial<W> (&partials)[W::QUERY_HEADS],
    float* scores,                    // shared [QUERY_HEADS][num_slots]
    const typename W::Q_vec* q_vecs,  // shared [QUERY_HEADS][NUM_VECS]
    Span<W> span, float scale, const float (&slopes)[W::QUERY_HEADS])
{
    for_each_key<W>(span, [&](int token, const auto& k_vecs) {
        // Without this fence the compiler keeps all of q_vecs in registers, and registers spill.
        if (W::QUERY_HEADS * W::VECS_PER_THREAD * W::VEC_SIZE > 64) __syncwarp();
#pragma unroll
        for (int h = 0; h < W::QUERY_HEADS; ++h) {
            const auto* q_vecs_of_head = q_vecs + h * W::NUM_VECS;
            const float score = score_key<W>(q_vecs_of_head, k_vecs, token, span.seq_len, scale, slopes[h]);
            if (W::member() == 0) scores[h * span.num_slots() + token - span.first_token()] = score;
            partials[h].m = fmaxf(partials[h].m, score);
        }
    });
}

// acc[r] = Σ weight · v over all blocks, for each head and row r of this thread.
template <class W>
__device__ void weigh_values(
    Partial<W> (&partials)[W::QUERY_HEADS],
    const float* weights,  // shared [QUERY_HEADS][num_slots]
    Span<W> span)
{
    const int64_t offset = threadIdx.x % W::VECS_PER_ROW * W::V_VEC_SIZE;  // of its tokens in the block

    for (int block = span.first_block; block < span.end_block; ++block) {
        const auto* v_row = span.values(block) + W::row(0) * W::BLOCK_SIZE + offset;
        const int token = block * W::BLOCK_SIZE + offset, live = span.seq_len - token;
        typename W::weights_t w[W::QUERY_HEADS];
#pragma unroll
        for (int h = 0; h < W::QUERY_HEADS; ++h)
            w[h] = reinterpret_cast<const typename W::weights_t&>(
                weights[h * span.num_slots() + token - span.first_token()]);
#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            if (W::row(r) < W::HEAD_SIZE) {
                // once for all heads
                const auto v_vec = load_values<W>(v_row + r * W::ROWS_PER_STEP * W::BLOCK_SIZE, live);
#pragma unroll
                for (int h = 0; h < W::QUERY_HEADS; ++h) partials[h].acc[r] += dot(w[h], v_vec);
            }
    }
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h)
#pragma unroll
        for (float& sum : partials[h].acc) sum = reduce_lanes<1, W::VECS_PER_ROW / 2>(sum, add);
}

}  // namespace grouped

// The arguments are those of v2. Grid: (num_heads / QUERY_HEADS, num_seqs, max_num_partitions). Dynamic
// shared memory: QUERY_HEADS * num_slots floats.
template <typename scalar_t, typename cache_t, int HEAD_SIZE, int BLOCK_SIZE, int QUERY_HEADS>
__global__ void __launch_bounds__(NUM_THREADS, 1) paged_attention_grouped_kernel(
    float* __restrict__ m, float* __restrict__ l, float* __restrict__ acc,
    const scalar_t* __restrict__ q, const cache_t* __restrict__ k_cache,
    const cache_t* __restrict__ v_cache, const int* __restrict__ block_tables,
    const int* __restrict__ seq_lens, const float* __restrict__ alibi_slopes,
    int num_kv_heads, int max_seq_len, float scale,
    int64_t q_stride, int64_t kv_block_stride, int64_t kv_head_stride, int64_t table_stride,
    int partition_blocks)
{
    using Base = Workers<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE>;
    using W = grouped::Workers<Base, QUERY_HEADS>;
    __shared__ typename W::Q_vec q_vecs[QUERY_HEADS * W::NUM_VECS];
    __shared__ float maxima[NUM_WARPS], sums[NUM_WARPS];
    extern __shared__ __align__(16) float scores[];  // [QUERY_HEADS][num_slots]

    const int seq = blockIdx.y, num_heads = gridDim.x * QUERY_HEADS, first_head = blockIdx.x * QUERY_HEADS;
    const auto span = span_of_partition<W>(
        partition_blocks, first_head / (num_heads / num_kv_heads), k_cache, v_cache, block_tables,
        seq_lens, max_seq_len, kv_block_stride, kv_head_stride, table_stride);
    if (span.num_slots() <= 0) return;

    Partial<W> partials[QUERY_HEADS];
    float slopes[QUERY_HEADS];
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) slopes[h] = alibi_slopes ? alibi_slopes[first_head + h] : 0.0f;
    load_query<W>(q_vecs, q + seq * q_stride + first_head * HEAD_SIZE);
    __syncthreads();
    grouped::score_keys<W>(partials, scores, q_vecs, span, scale, slopes);
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {  // all heads use `maxima`: the barrier for l is in between
        auto& [m, l, acc] = partials[h];
        m = reduce_thread_block<W::THREAD_GROUP_SIZE>(m, maxima, fmaxf);
        l = exponentiate<W>(scores + h * span.num_slots(), m, span);
        l = reduce_thread_block<1>(l, sums, add);
    }
    grouped::weigh_values<W>(partials, scores, span);

#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
        const int64_t row = int64_t(seq) * num_heads + first_head + h;  // of [num_seqs, num_heads]
        const int64_t index = row * gridDim.z + blockIdx.z;  // of [num_seqs, num_heads, max_num_partitions]
        if (threadIdx.x == 0) {
            m[index] = partials[h].m;
            l[index] = partials[h].l;
        }
        write_rows<W>(acc + index * HEAD_SIZE, partials[h].acc, 1);
    }
}
