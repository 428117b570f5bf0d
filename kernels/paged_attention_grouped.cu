// Paged attention that reads K and V once for several query heads (lesson 5).
//
// With grouped-query attention, num_heads / num_kv_heads query heads share a KV head. v1 and v2 of
// paged_attention.cu read the keys and values of that KV head once for each of them. Here a thread block
// attends with QUERY_HEADS of these heads at once, so it reads every key and value once for all of them.
// The stages are those of paged_attention.cu. The kernel calls most of them once per head. The stages that
// are defined here read K or V once, or wait at one barrier, for all heads. Their arguments are those of
// paged_attention.cu with one more dimension. paged_attention_merge_kernel merges the partitions.

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
template <class Base, int query_heads>
struct Workers : Base {
    static constexpr int QUERY_HEADS = query_heads;
    static constexpr int ROW_WARPS = warps_for(QUERY_HEADS * Base::ROWS_PER_THREAD, Base::NUM_WARPS);
    static constexpr int BLOCK_WARPS = Base::NUM_WARPS / ROW_WARPS;
    static constexpr int ROWS_PER_THREAD = divide_up(Base::HEAD_SIZE, Base::ROWS_PER_STEP * ROW_WARPS);

    __device__ static int team() { return threadIdx.x / WARP_SIZE / ROW_WARPS; }
    // The r-th row of this thread. Rows from HEAD_SIZE on do not exist.
    __device__ static int row(int r) {
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
        return (r * ROW_WARPS + warp % ROW_WARPS) * Base::ROWS_PER_STEP + lane / Base::VECS_PER_ROW;
    }
};

// `reduce_thread_block` for one value per query head, with one barrier for all of them.
template <class W, int NEAREST, typename Op>
__device__ void reduce_thread_block(
    float (&values)[W::QUERY_HEADS],
    float (*scratch)[W::NUM_WARPS],  // shared [QUERY_HEADS][NUM_WARPS]
    Op op)
{
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h) {
        values[h] = reduce_lanes<NEAREST>(values[h], op);
        if (threadIdx.x % WARP_SIZE == 0) scratch[h][threadIdx.x / WARP_SIZE] = values[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < W::QUERY_HEADS; ++h) {
        values[h] = scratch[h][0];
        for (int warp = 1; warp < W::NUM_WARPS; ++warp) values[h] = op(values[h], scratch[h][warp]);
    }
}

// The scores of all keys of the span, −∞ after the end of the sequence. m[h] becomes the largest score
// that this thread has seen.
template <class W>
__device__ void score_keys(
    float* scores,                    // shared [QUERY_HEADS][num_slots]
    const typename W::Q_vec* q_vecs,  // shared [QUERY_HEADS][NUM_VECS]
    float (&m)[W::QUERY_HEADS], const typename W::cache_t* k_cache, int64_t kv_block_stride,
    const int* block_table, Span<W> span, float scale, const float (&slopes)[W::QUERY_HEADS])
{
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

            typename W::K_vec k_vecs[W::VECS_PER_THREAD];  // global → registers, once for all heads
#pragma unroll
            for (int j = 0; j < W::VECS_PER_THREAD; ++j) {
                const int element = (j * W::THREAD_GROUP_SIZE + member) * W::VEC_SIZE;
                const int row = element / W::X, column = element % W::X;
                const auto* address = k_block + (row * W::BLOCK_SIZE + offset) * W::X + column;
                k_vecs[j] = *reinterpret_cast<const typename W::K_vec*>(address);
            }
            float qk[W::QUERY_HEADS] = {};
#pragma unroll
            for (int j = 0; j < W::VECS_PER_THREAD; ++j)
#pragma unroll
                for (int h = 0; h < W::QUERY_HEADS; ++h) {
                    const auto q_vec = q_vecs[h * W::NUM_VECS + j * W::THREAD_GROUP_SIZE + member];
                    qk[h] += dot(q_vec, k_vecs[j]);
                }
#pragma unroll
            for (int h = 0; h < W::QUERY_HEADS; ++h) {
                qk[h] = reduce_lanes<1, W::THREAD_GROUP_SIZE / 2>(qk[h], Sum());
                const float bias = slopes[h] * (token - (span.seq_len - 1));
                const float score = token < span.seq_len ? scale * qk[h] + bias : -INFINITY;
                if (member == 0) scores[h * span.num_slots() + token - span.first_token()] = score;
                m[h] = fmaxf(m[h], score);
            }
        }
    }
}

// acc[h][r] = Σ weight · v over the blocks of this team, for row r of this thread.
template <class W>
__device__ void weigh_values(
    float (&acc)[W::QUERY_HEADS][W::ROWS_PER_THREAD],
    const float* weights,  // shared [QUERY_HEADS][num_slots]
    const typename W::cache_t* v_cache, int64_t kv_block_stride, const int* block_table, Span<W> span)
{
    const int offset = threadIdx.x % W::VECS_PER_ROW * W::V_VEC_SIZE;  // of its tokens in the block

    for (int block = span.first_block + W::team(); block < span.end_block; block += W::BLOCK_WARPS) {
        const auto* v_block = v_cache + int64_t(block_table[block]) * kv_block_stride;
        const int token = block * W::BLOCK_SIZE + offset;
        Vec<float, W::V_VEC_SIZE> w[W::QUERY_HEADS];
#pragma unroll
        for (int h = 0; h < W::QUERY_HEADS; ++h)
            w[h] = load_weights<W>(weights + h * span.num_slots() + token - span.first_token());
#pragma unroll
        for (int r = 0; r < W::ROWS_PER_THREAD; ++r)
            if (W::row(r) < W::HEAD_SIZE) {
                const auto* v_row = v_block + W::row(r) * W::BLOCK_SIZE + offset;
                const auto v_vec = load_values<W>(v_row, span.seq_len - token);  // once for all heads
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

// Add the sums of all teams, in log₂(BLOCK_WARPS) rounds. Team 0 has the result.
template <class W>
__device__ void add_warps(
    float (&acc)[W::QUERY_HEADS][W::ROWS_PER_THREAD],
    float* scratch)  // shared [BLOCK_WARPS / 2][QUERY_HEADS][HEAD_SIZE]
{
    for (int half = W::BLOCK_WARPS / 2; half > 0; half /= 2) {
        float* sums = scratch + W::team() % half * W::QUERY_HEADS * W::HEAD_SIZE;
        __syncthreads();  // all warps have read what is overwritten now
        if (W::team() >= half && W::team() < 2 * half)
#pragma unroll
            for (int h = 0; h < W::QUERY_HEADS; ++h) write_rows<W>(sums + h * W::HEAD_SIZE, acc[h], 1);
        __syncthreads();
        if (W::team() < half)
#pragma unroll
            for (int h = 0; h < W::QUERY_HEADS; ++h) add_rows<W>(acc[h], sums + h * W::HEAD_SIZE);
    }
}

}  // namespace grouped

// The arguments are those of v2. Grid: (num_heads / QUERY_HEADS, num_seqs, max_num_partitions). Dynamic
// shared memory: QUERY_HEADS times that of v2.
template <typename scalar_t, typename cache_t, int HEAD_SIZE, int BLOCK_SIZE, int NUM_THREADS,
          int PARTITION_SIZE, int QUERY_HEADS>
__global__ void __launch_bounds__(NUM_THREADS, 1) paged_attention_grouped_kernel(
    float* __restrict__ m, float* __restrict__ l, float* __restrict__ acc,
    const scalar_t* __restrict__ q, const cache_t* __restrict__ k_cache,
    const cache_t* __restrict__ v_cache, const int* __restrict__ block_tables,
    const int* __restrict__ seq_lens, const float* __restrict__ alibi_slopes,
    int num_kv_heads, int max_seq_len, float scale,
    int64_t q_stride, int64_t kv_block_stride, int64_t kv_head_stride, int64_t table_stride)
{
    using Base = Workers<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, NUM_THREADS>;
    using W = grouped::Workers<Base, QUERY_HEADS>;
    __shared__ typename W::Q_vec q_vecs[QUERY_HEADS * W::NUM_VECS];
    __shared__ float maxima[QUERY_HEADS][W::NUM_WARPS], sums[QUERY_HEADS][W::NUM_WARPS];
    extern __shared__ __align__(16) float scores[];  // [QUERY_HEADS][num_slots]; later the sums of warps

    const int seq = blockIdx.y, num_heads = gridDim.x * QUERY_HEADS;
    const Span<W> span = span_of_partition<W, PARTITION_SIZE>(seq_lens[seq], max_seq_len);
    if (span.num_slots() <= 0) return;

    const int first_head = blockIdx.x * QUERY_HEADS, kv_head = first_head / (num_heads / num_kv_heads);
    k_cache += kv_head * kv_head_stride;
    v_cache += kv_head * kv_head_stride;
    const int* block_table = block_tables + seq * table_stride;

    float slopes[QUERY_HEADS], maximum[QUERY_HEADS], sum[QUERY_HEADS];
    float rows[QUERY_HEADS][W::ROWS_PER_THREAD] = {};
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
        maximum[h] = -INFINITY;
        slopes[h] = alibi_slopes ? alibi_slopes[first_head + h] : 0.0f;
    }
    load_query<W>(q_vecs, q + seq * q_stride + first_head * HEAD_SIZE);
    __syncthreads();
    grouped::score_keys<W>(
        scores, q_vecs, maximum, k_cache, kv_block_stride, block_table, span, scale, slopes);
    grouped::reduce_thread_block<W, W::THREAD_GROUP_SIZE>(maximum, maxima, Max());
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h)
        sum[h] = exponentiate<W>(scores + h * span.num_slots(), maximum[h], span);
    grouped::reduce_thread_block<W, 1>(sum, sums, Sum());
    grouped::weigh_values<W>(rows, scores, v_cache, kv_block_stride, block_table, span);
    grouped::add_warps<W>(rows, scores);

#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
        const int64_t row = int64_t(seq) * num_heads + first_head + h;  // of [num_seqs, num_heads]
        const int64_t index = row * gridDim.z + blockIdx.z;  // of [num_seqs, num_heads, max_num_partitions]
        if (threadIdx.x == 0) {
            m[index] = maximum[h];
            l[index] = sum[h];
        }
        if (W::team() == 0) write_rows<W>(acc + index * HEAD_SIZE, rows[h], 1);
    }
}
