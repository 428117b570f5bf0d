// FlashAttention-2, forward pass (lesson 6): exact attention that never writes its scores to memory.
//
//     S = scale · Q Kᵀ, −∞ where causal hides a key        O = softmax(S) V        L = log Σ exp(S)
//
// Dao 2023, Algorithm 1, with its names: i counts tiles of Br queries, and j counts tiles of Bc keys.
//
//     grid           (⌈T / Br⌉, H, B): a thread block keeps one Q_i and loops over all K_j and V_j
//     shared memory  Q_i, K_j, V_j
//     thread         one row of the tile; its registers hold m, l, O and the scores of KEYS keys
//
// The kernel splits Q between the warps, as FlashAttention-2 does: no warp needs a result of another warp.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int WARP_SIZE = 32, NUM_WARPS = 4;
constexpr int Br = NUM_WARPS * WARP_SIZE, Bc = 32;
constexpr int KEYS = 8;  // keys that a thread scores at once: more would not fit in its registers
static_assert(Bc % KEYS == 0, "whole steps");

// 16 bytes, which one instruction moves.
template <typename T>
struct alignas(16) Vec {
    static constexpr int SIZE = 16 / sizeof(T);
    T data[SIZE];
};

// The sizes of a row. The stages call it W.
template <typename scalar, int head_size>
struct Rows {
    using scalar_t = scalar;
    using vec_t = Vec<scalar>;
    static constexpr int D = head_size;
    static constexpr int VECS = D / vec_t::SIZE;  // of one row
    // Rows of Q are an odd number of vecs apart: lanes that read the same column use different banks.
    static constexpr int Q_STRIDE = VECS + 1;
    static_assert(VECS % 2 == 0 && VECS * vec_t::SIZE == D, "whole vecs, an even number");
};

// The online softmax of one row over the keys seen so far. Only the last stage divides O by l.
template <class W>
struct Row {
    float m = -INFINITY, l = 0, O[W::D] = {};
};

// m, with 0 where every score is −∞: (−∞) − (−∞) would be NaN.
__device__ float finite(float m) { return m == -INFINITY ? 0.0f : m; }

// The number of keys that a query sees: with `causal`, the last query sees all. Missing rows see none.
__device__ int visible_keys(int row, int T, int S, bool causal) {
    return row >= T ? 0 : causal ? max(row + S - T + 1, 0) : S;
}

// ----------------------------------------------------------------------------------- the stages

// Global → shared: load Q_i, K_j or V_j; neighbouring threads load neighbouring vecs. Rows from `rows` on
// become zeros: the memory after the tensor may hold NaN, which a weight of 0 does not hide.
template <class W, int ROWS, int STRIDE>
__device__ void load_tile(
    typename W::vec_t* tile,        // shared [ROWS][STRIDE], of which VECS are used
    const typename W::scalar_t* x,  // [rows, D], rows row_stride apart
    int64_t row_stride, int rows)
{
    using vec_t = typename W::vec_t;
    for (int i = threadIdx.x; i < ROWS * W::VECS; i += blockDim.x) {
        const int row = i / W::VECS, c = i % W::VECS;
        vec_t vec = {};
        if (row < rows) vec = *reinterpret_cast<const vec_t*>(x + row * row_stride + c * vec_t::SIZE);
        tile[row * STRIDE + c] = vec;
    }
}

// S_ij = scale · Q_i K_jᵀ for one row, with −∞ from key `visible` on.
template <class W>
__device__ void score(
    float (&S)[KEYS],            // zeros before
    const typename W::vec_t* Q,  // shared [VECS]: the row
    const typename W::vec_t* K,  // shared [KEYS][VECS]
    int visible, float scale)
{
#pragma unroll 2
    for (int c = 0; c < W::VECS; ++c) {
        const typename W::vec_t q = Q[c];
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
            const typename W::vec_t key = K[k * W::VECS + c];
#pragma unroll
            for (int n = 0; n < q.SIZE; ++n) S[k] += float(q.data[n]) * float(key.data[n]);
        }
    }
#pragma unroll
    for (int k = 0; k < KEYS; ++k) S[k] = k < visible ? scale * S[k] : -INFINITY;
}

// m ← max(m, rowmax S)      P = exp(S − m), which overwrites S      l ← alpha · l + rowsum P
// Returns alpha = e^{m_old − m}.
__device__ float exponentiate(float (&S)[KEYS], float& m, float& l) {
    const float m_old = m;
#pragma unroll
    for (int k = 0; k < KEYS; ++k) m = fmaxf(m, S[k]);
    const float alpha = expf(m_old - finite(m));
    l *= alpha;
#pragma unroll
    for (int k = 0; k < KEYS; ++k) S[k] = expf(S[k] - finite(m)), l += S[k];
    return alpha;
}

// O ← alpha · O + P V for one row.
template <class W>
__device__ void add_PV(
    float (&O)[W::D], float alpha, const float (&P)[KEYS],
    const typename W::vec_t* V)  // shared [KEYS][VECS]
{
#pragma unroll
    for (int d = 0; d < W::D; ++d) O[d] *= alpha;
#pragma unroll
    for (int c = 0; c < W::VECS; ++c)
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
            const typename W::vec_t v = V[k * W::VECS + c];
#pragma unroll
            for (int n = 0; n < v.SIZE; ++n) O[c * v.SIZE + n] += P[k] * float(v.data[n]);
        }
}

// Each warp owns 32 rows and sees all keys of the tile. This thread attends with its own row.
template <class W>
__device__ void attend_to_tile(
    Row<W>& row,
    const typename W::vec_t* Q_i,  // shared [Br][Q_STRIDE]
    const typename W::vec_t* K_j,  // shared [Bc][VECS]
    const typename W::vec_t* V_j,  // shared [Bc][VECS]
    int first, int j, int T, int S, float scale, bool causal)
{
    const int visible = visible_keys(first + threadIdx.x, T, S, causal) - j;  // of this tile
#pragma unroll 1
    for (int step = 0; step < Bc && step < visible; step += KEYS) {
        float P[KEYS] = {};
        score<W>(P, Q_i + threadIdx.x * W::Q_STRIDE, K_j + step * W::VECS, visible - step, scale);
        const float alpha = exponentiate(P, row.m, row.l);
        add_PV<W>(row.O, alpha, P, V_j + step * W::VECS);
    }
}

// O_i ← O / l      L_i = m + log l      registers → shared, over Q_i → global, vec by vec.
template <class W>
__device__ void write_tile(
    typename W::scalar_t* out,  // [rows, D], rows row_stride apart
    float* lse,                 // [rows]
    typename W::vec_t* tile,    // shared [Br][Q_STRIDE]
    const Row<W>& row, int64_t row_stride, int rows)
{
    using vec_t = typename W::vec_t;
    // A row that saw no key gives 0. NaN stays NaN.
    const float factor = row.l > 0 ? 1 / row.l : row.l;
    __syncthreads();  // Q_i has been read
#pragma unroll
    for (int c = 0; c < W::VECS; ++c) {
        vec_t vec;
#pragma unroll
        for (int n = 0; n < vec_t::SIZE; ++n)
            vec.data[n] = typename W::scalar_t(row.O[c * vec_t::SIZE + n] * factor);
        tile[threadIdx.x * W::Q_STRIDE + c] = vec;
    }
    __syncwarp();  // a warp writes its own 32 rows
    const int lane = threadIdx.x % WARP_SIZE, first = threadIdx.x - lane;
    for (int i = lane; i < WARP_SIZE * W::VECS; i += WARP_SIZE) {
        const int r = first + i / W::VECS, c = i % W::VECS;
        if (r < rows)
            *reinterpret_cast<vec_t*>(out + r * row_stride + c * vec_t::SIZE) = tile[r * W::Q_STRIDE + c];
    }
    if (threadIdx.x < rows) lse[threadIdx.x] = row.m + logf(row.l);
}

// ----------------------------------------------------------------------------------- the kernel

// Grid: (⌈T / Br⌉, H, B). Dynamic shared memory: Q_i, K_j, V_j.
template <typename scalar_t, int D>
__global__ void __launch_bounds__(Br, 1) flash_attention_kernel(
    scalar_t* __restrict__ out,      // O [B, H, T, D], strides o_batch, o_head, o_row, 1
    float* __restrict__ lse,         // L [B, H, T]
    const scalar_t* __restrict__ q,  // [B, H, T, D]
    const scalar_t* __restrict__ k,  // [B, Hkv, S, D]
    const scalar_t* __restrict__ v,  // [B, Hkv, S, D]
    int T, int S, int num_kv_heads, float scale, bool causal,
    int64_t o_batch, int64_t o_head, int64_t o_row, int64_t q_batch, int64_t q_head, int64_t q_row,
    int64_t k_batch, int64_t k_head, int64_t k_row, int64_t v_batch, int64_t v_head, int64_t v_row)
{
    using W = Rows<scalar_t, D>;
    extern __shared__ __align__(16) unsigned char shared[];
    auto* Q_i = reinterpret_cast<typename W::vec_t*>(shared);  // [Br][Q_STRIDE]
    auto* K_j = Q_i + Br * W::Q_STRIDE;                     // [Bc][VECS]
    auto* V_j = K_j + Bc * W::VECS;                            // [Bc][VECS]

    const int64_t batch = blockIdx.z, head = blockIdx.y, kv_head = head / (gridDim.y / num_kv_heads);
    const int64_t first = int64_t(blockIdx.x) * Br;
    const int rows = min(T - int(first), Br);
    const int keys = visible_keys(first + rows - 1, T, S, causal);  // of the tile's last row, which sees most
    out += batch * o_batch + head * o_head + first * o_row;
    lse += (batch * gridDim.y + head) * T + first;
    q += batch * q_batch + head * q_head + first * q_row;
    k += batch * k_batch + kv_head * k_head;
    v += batch * v_batch + kv_head * v_head;

    Row<W> row;
    load_tile<W, Br, W::Q_STRIDE>(Q_i, q, q_row, rows);
    for (int j = 0; j < keys; j += Bc) {  // skips the tiles outside the mask
        __syncthreads();                  // K_j and V_j have been read
        load_tile<W, Bc, W::VECS>(K_j, k + j * k_row, k_row, keys - j);
        load_tile<W, Bc, W::VECS>(V_j, v + j * v_row, v_row, keys - j);
        __syncthreads();  // Q_i, K_j and V_j have been loaded
        attend_to_tile<W>(row, Q_i, K_j, V_j, first, j, T, S, scale, causal);
    }
    write_tile<W>(out, lse, Q_i, row, o_row, rows);
}
