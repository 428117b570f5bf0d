// Flat GEMM: the matrix products of a decode step, in which x has few rows (lesson 8).
//
//     out = x wᵀ          out[m, n] = Σ_k x[m, k] · w[n, k]          summed in float32
//
// Each weight is used only M times, with M ≤ 64, so reading the weights from memory sets the time.
//
// gemv_kernel       multiplies on CUDA cores, for the fewest rows. A thread block owns COLUMNS columns
//                   of out, and its threads share K.
// flat_gemm_kernel  multiplies on tensor cores. It is FlashDecoding++'s flat GEMM (Hong et al. 2023)
//                   with a longer ring. A thread block owns B_N columns of out, and its warps share K.
//                   wmma multiplies 32 × 16 by 16 × 8. The weights are the matrix with 32 rows, so M is
//                   padded to a multiple of 8. It needs sm_80, for asynchronous copies and bfloat16.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <stdint.h>

using namespace nvcuda;

constexpr int WARP_SIZE = 32;
constexpr unsigned ALL_LANES = 0xffffffff;
constexpr int NUM_WARPS = 4;  // of a thread block

__device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// ----------------------------------------------------------------------------------- on CUDA cores

constexpr int COLUMNS = 4;  // of out that a thread block owns: it reads x once for all of them

// N neighbouring elements, at most 16 bytes, that one instruction moves.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T data[N];
};

// Add the values of all lanes by a butterfly of shuffles. Every lane gets the sum.
__device__ float add_lanes(float value) {
#pragma unroll
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// Global → registers: sums[m][n] = Σ x[m, k] · w[n, k] over every blockDim.x-th vec k. Rows from `rows`
// and columns from `columns` on do not exist. The last row or column is read again instead of them.
template <int ROWS, int VEC, typename scalar_t>
__device__ void multiply_vecs(
    float (&sums)[ROWS][COLUMNS],
    const scalar_t* x,  // [rows, K]
    const scalar_t* w,  // [columns, K]
    int rows, int columns, int K, int64_t x_stride, int64_t w_stride)
{
    using vec_t = Vec<scalar_t, VEC>;
    for (int k = threadIdx.x * VEC; k < K; k += blockDim.x * VEC) {
        vec_t w_vecs[COLUMNS];
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
            w_vecs[n] = *reinterpret_cast<const vec_t*>(w + min(n, columns - 1) * w_stride + k);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const vec_t x_vec = *reinterpret_cast<const vec_t*>(x + min(m, rows - 1) * x_stride + k);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                for (int i = 0; i < VEC; ++i) sums[m][n] += float(x_vec.data[i]) * float(w_vecs[n].data[i]);
        }
    }
}

// Add the sums of all threads: first the lanes of each warp by shuffles, then the warps in their order.
template <int ROWS, typename scalar_t>
__device__ void write_sums(
    scalar_t* out,                     // [rows, columns], rows N apart
    float (*of_warps)[ROWS][COLUMNS],  // shared [NUM_WARPS][ROWS][COLUMNS]
    const float (&sums)[ROWS][COLUMNS], int rows, int columns, int N)
{
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            const float sum = add_lanes(sums[m][n]);
            if (lane == 0) of_warps[warp][m][n] = sum;
        }
    __syncthreads();  // all warps' sums are stored
    const int m = threadIdx.x / COLUMNS, n = threadIdx.x % COLUMNS;
    if (m < min(rows, ROWS) && n < columns) {
        float sum = 0;
        for (int from = 0; from < NUM_WARPS; ++from) sum += of_warps[from][m][n];
        out[int64_t(m) * N + n] = scalar_t(sum);
    }
    __syncthreads();  // they have all been read
}

// Grid: ⌈N / COLUMNS⌉. The kernel multiplies ROWS rows of x at a time. From the second time on, the
// weights of the thread block come from the cache.
template <typename scalar_t, int ROWS, int VEC>
__global__ void __launch_bounds__(NUM_WARPS * WARP_SIZE) gemv_kernel(
    scalar_t* __restrict__ out,      // [M, N]
    const scalar_t* __restrict__ x,  // [M, K], rows x_stride apart
    const scalar_t* __restrict__ w,  // [N, K], rows w_stride apart
    int M, int N, int K, int64_t x_stride, int64_t w_stride)
{
    __shared__ float of_warps[NUM_WARPS][ROWS][COLUMNS];
    const int first = blockIdx.x * COLUMNS, columns = min(N - first, COLUMNS);
    w += first * w_stride;
    for (int m = 0; m < M; m += ROWS) {
        float sums[ROWS][COLUMNS] = {};
        multiply_vecs<ROWS, VEC>(sums, x + m * x_stride, w, M - m, columns, K, x_stride, w_stride);
        write_sums(out + int64_t(m) * N + first, of_warps, sums, M - m, columns, N);
    }
}

// ----------------------------------------------------------------------------------- on tensor cores

constexpr int B_N = 32;      // columns of out that a thread block owns, the rows of one fragment of w
constexpr int TILE_M = 8;    // rows of x in a fragment
constexpr int STEP_K = 16;   // columns of x and w in a fragment
constexpr int TILE_K = 64;   // columns of x and w in one stage: 128 bytes of each row
// Rows are an odd number of 16 bytes apart. The eight rows of a fragment then use different banks.
constexpr int ROW = TILE_K + 8;

// A tile of w, and the tile of x with the same columns.
template <typename scalar_t, int M_TILES>
struct alignas(32) Stage {
    scalar_t w[B_N][ROW];
    scalar_t x[M_TILES * TILE_M][ROW];
};

template <int M_TILES>
using Sums = wmma::fragment<wmma::accumulator, B_N, TILE_M, STEP_K, float>[M_TILES];

// Start to copy 16 bytes, global → shared, or to write zeros if they do not exist. Wait before reading.
__device__ void copy_async(void* shared, const void* global, bool exist) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(unsigned(__cvta_generic_to_shared(shared))), "l"(global), "r"(exist ? 16 : 0) : "memory");
}
// Make one group of the copies that this thread started since its last commit.
__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for all groups of this thread but the NEWEST last ones.
template <int NEWEST>
__device__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(NEWEST) : "memory"); }

// Global → shared: one warp loads a tile of w or x from column k on. A lane copies 16 bytes of every
// fourth row, asynchronously, or element by element if VEC is 1. Missing rows and columns become zeros.
template <int ROWS, int VEC, typename scalar_t>
__device__ void load_tile(
    scalar_t (*tile)[ROW],   // shared [ROWS][ROW], of which TILE_K columns are used
    const scalar_t* source,  // [rows, K], row_stride apart
    int64_t row_stride, int rows, int k, int K)
{
    constexpr int SHARE = 16 / sizeof(scalar_t), LANES = TILE_K / SHARE;  // per row
    const int lane = threadIdx.x % WARP_SIZE, first = lane / LANES, column = lane % LANES * SHARE;
    source += first * row_stride + k + column;
#pragma unroll
    for (int row = 0; row < ROWS; row += WARP_SIZE / LANES) {
        const int columns = first + row < rows ? K - k - column : 0;  // columns that exist
        scalar_t* target = &tile[first + row][column];
        if constexpr (VEC == SHARE) {
            copy_async(target, source, columns > 0);
        } else {
#pragma unroll 1
            for (int i = 0; i < SHARE; ++i) target[i] = i < columns ? source[i] : scalar_t(0.0f);
        }
        source += WARP_SIZE / LANES * row_stride;
    }
}

// Shared → registers, fragment by fragment: sums += w xᵀ for one stage.
template <typename scalar_t, int M_TILES>
__device__ void multiply(Sums<M_TILES>& sums, const Stage<scalar_t, M_TILES>& stage) {
#pragma unroll
    for (int k = 0; k < TILE_K; k += STEP_K) {
        wmma::fragment<wmma::matrix_a, B_N, TILE_M, STEP_K, scalar_t, wmma::row_major> w;
        wmma::load_matrix_sync(w, &stage.w[0][k], ROW);
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
            wmma::fragment<wmma::matrix_b, B_N, TILE_M, STEP_K, scalar_t, wmma::col_major> x;
            wmma::load_matrix_sync(x, &stage.x[t * TILE_M][k], ROW);
            wmma::mma_sync(sums[t], w, x, sums[t]);
        }
    }
}

// Multiply this warp's share of K: every NUM_WARPS-th tile, through a ring of its own. While the warp
// multiplies one stage, the copies into the other stages are running. No warp waits for another warp.
template <int NUM_STAGES, int VEC, typename scalar_t, int M_TILES>
__device__ void multiply_through_ring(
    Sums<M_TILES>& sums,
    Stage<scalar_t, M_TILES>* ring,  // shared [NUM_STAGES]
    const scalar_t* x,               // [M, K]
    const scalar_t* w,               // [columns, K]
    int M, int columns, int K, int64_t x_stride, int64_t w_stride)
{
    const int warp = threadIdx.x / WARP_SIZE;
    const int turns = divide_up(divide_up(K, TILE_K) - warp, NUM_WARPS);  // tiles of this warp
    const auto load_stage = [&](int turn) {
        auto& stage = ring[turn % NUM_STAGES];
        const int k = (turn * NUM_WARPS + warp) * TILE_K;
        if (turn < turns) {
            load_tile<B_N, VEC>(stage.w, w, w_stride, columns, k, K);
            load_tile<M_TILES * TILE_M, VEC>(stage.x, x, x_stride, M, k, K);
        }
        commit_copies();  // also an empty group: the wait counts groups
    };
    for (int turn = 0; turn < NUM_STAGES - 1; ++turn) load_stage(turn);
    for (int turn = 0; turn < turns; ++turn) {
        wait_for_copies<NUM_STAGES - 2>();  // this lane's copies into this turn's stage have ended
        __syncwarp();                       // so have all lanes'; the last turn's stage has been read
        load_stage(turn + NUM_STAGES - 1);  // overwrites the last turn's stage
        multiply(sums, ring[turn % NUM_STAGES]);
    }
}

// Registers → shared → global: add the sums of the warps in their order, and write them.
template <typename scalar_t, int M_TILES, class Ring>
__device__ void write_tile(
    scalar_t* out,  // [M, columns], rows N apart
    const Sums<M_TILES>& sums,
    Ring* rings,    // shared [NUM_WARPS]; a warp stores its sums over its own ring
    int M, int columns, int N)
{
    using WarpSums = float[M_TILES * TILE_M][B_N + 4];  // as out lies, rows a multiple of 16 bytes apart
    static_assert(sizeof(WarpSums) <= sizeof(Ring), "the sums fit in the ring");
    const auto sums_of = [&](int warp) -> auto& { return reinterpret_cast<WarpSums&>(rings[warp]); };
    auto& mine = sums_of(threadIdx.x / WARP_SIZE);
    __syncwarp();  // the last stages have been read
#pragma unroll
    for (int t = 0; t < M_TILES; ++t)
        wmma::store_matrix_sync(mine[t * TILE_M], sums[t], B_N + 4, wmma::mem_col_major);
    __syncthreads();  // all have stored their sums
    for (int i = threadIdx.x; i < M * B_N; i += blockDim.x) {
        const int m = i / B_N, n = i % B_N;
        float sum = 0;
        for (int warp = 0; warp < NUM_WARPS; ++warp) sum += sums_of(warp)[m][n];
        if (n < columns) out[int64_t(m) * N + n] = scalar_t(sum);
    }
}

// Grid: ⌈N / B_N⌉. Dynamic shared memory: a ring of NUM_STAGES stages for each warp. VEC is the number of
// elements that one copy moves: 16 bytes, or 1 element, without asynchronous copies, where the rows of
// x or w do not begin at multiples of 16 bytes.
template <typename scalar_t, int M_TILES, int NUM_STAGES, int VEC>
__global__ void __launch_bounds__(NUM_WARPS * WARP_SIZE, 1) flat_gemm_kernel(
    scalar_t* __restrict__ out,      // [M, N], M ≤ M_TILES · TILE_M
    const scalar_t* __restrict__ x,  // [M, K], rows x_stride apart
    const scalar_t* __restrict__ w,  // [N, K], rows w_stride apart
    int M, int N, int K, int64_t x_stride, int64_t w_stride)
{
    using Ring = Stage<scalar_t, M_TILES>[NUM_STAGES];
    extern __shared__ __align__(32) unsigned char shared[];
    auto* rings = reinterpret_cast<Ring*>(shared);  // [NUM_WARPS]
    const int first = blockIdx.x * B_N, columns = min(N - first, B_N);

    Sums<M_TILES> sums;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) wmma::fill_fragment(sums[t], 0.0f);
    multiply_through_ring<NUM_STAGES, VEC>(
        sums, rings[threadIdx.x / WARP_SIZE], x, w + first * w_stride, M, columns, K, x_stride, w_stride);
    write_tile(out + first, sums, rings, M, columns, N);
}
