// Products of matrices on tensor cores, and the mistakes that wmma invites. One warp multiplies one tile, unless said
// otherwise; a is [M, K], b is [K, N], both row by row (a layout of columns takes the transposed matrix).

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

constexpr int WARP = 32;
constexpr int TILE = 16;

using RowMajor = wmma::row_major;
using ColMajor = wmma::col_major;
using A = wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, __half, RowMajor>;
using B = wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, __half, RowMajor>;
using Sum = wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float>;

template <class Layout>
constexpr bool by_rows = false;
template <>
constexpr bool by_rows<RowMajor> = true;

// d = a @ b + c
template <int M, int N, int K, class T, class LayoutA, class LayoutB, bool SATURATE = false, class Memory, class Number>
__device__ void product(const Memory* a, const Memory* b, const Number* c, Number* d) {
    wmma::fragment<wmma::matrix_a, M, N, K, T, LayoutA> fragment_a;
    wmma::fragment<wmma::matrix_b, M, N, K, T, LayoutB> fragment_b;
    wmma::fragment<wmma::accumulator, M, N, K, Number> sum;
    wmma::load_matrix_sync(fragment_a, a, by_rows<LayoutA> ? K : M);
    wmma::load_matrix_sync(fragment_b, b, by_rows<LayoutB> ? N : K);
    wmma::load_matrix_sync(sum, c, N, wmma::mem_row_major);
    if constexpr (SATURATE) wmma::mma_sync(sum, fragment_a, fragment_b, sum, true);
    else wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    wmma::store_matrix_sync(d, sum, N, wmma::mem_row_major);
}

__global__ void half_16_16_16(const __half* a, const __half* b, const float* c, float* d) {
    product<16, 16, 16, __half, RowMajor, ColMajor>(a, b, c, d);
}
__global__ void half_32_8_16(const __half* a, const __half* b, const float* c, float* d) {
    product<32, 8, 16, __half, ColMajor, RowMajor>(a, b, c, d);
}
__global__ void half_8_32_16(const __half* a, const __half* b, const __half* c, __half* d) {
    product<8, 32, 16, __half, RowMajor, RowMajor>(a, b, c, d);
}
__global__ void bfloat16_16_16_16(const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c, float* d) {
    product<16, 16, 16, __nv_bfloat16, ColMajor, ColMajor>(a, b, c, d);
}
__global__ void bfloat16_8_32_16(const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c, float* d) {
    product<8, 32, 16, __nv_bfloat16, ColMajor, ColMajor>(a, b, c, d);
}
__global__ void tf32_16_16_8(const float* a, const float* b, const float* c, float* d) {
    product<16, 16, 8, wmma::precision::tf32, RowMajor, ColMajor>(a, b, c, d);
}
__global__ void int8_16_16_16(const signed char* a, const signed char* b, const int* c, int* d) {
    product<16, 16, 16, signed char, RowMajor, ColMajor>(a, b, c, d);
}

// d = a, by way of accumulators of two types: element by element, as an epilogue converts its sums
template <int M, int N, class To, int K = 16, class From>
__device__ void converted(const From* a, To* d) {
    wmma::fragment<wmma::accumulator, M, N, K, From> from;
    wmma::fragment<wmma::accumulator, M, N, 16, To> to;
    wmma::load_matrix_sync(from, a, N, wmma::mem_row_major);
    for (int i = 0; i < to.num_elements; ++i) to.x[i] = (To)(float)from.x[i];
    wmma::store_matrix_sync(d, to, N, wmma::mem_row_major);
}
__global__ void float_to_half_16_16(const float* a, __half* d) { converted<16, 16>(a, d); }
__global__ void float_to_half_32_8(const float* a, __half* d) { converted<32, 8>(a, d); }
__global__ void half_to_float_8_32(const __half* a, float* d) { converted<8, 32>(a, d); }
__global__ void int_to_float_16_16(const int* a, float* d) { converted<16, 16>(a, d); }
__global__ void sums_of_tf32_to_half_16_16(const float* a, __half* d) { converted<16, 16, __half, 8>(a, d); }

__global__ void int8_saturated(const signed char* a, const signed char* b, const int* c, int* d) {
    product<16, 16, 16, signed char, RowMajor, ColMajor, true>(a, b, c, d);
}
__global__ void uint8_32_8_16(const unsigned char* a, const unsigned char* b, const int* c, int* d) {
    product<32, 8, 16, unsigned char, RowMajor, ColMajor>(a, b, c, d);
}
__global__ void double_8_8_4(const double* a, const double* b, const double* c, double* d) {
    product<8, 8, 4, double, RowMajor, ColMajor>(a, b, c, d);
}

// out[0] = x[0] rounded to tf32 by hand, out[1] = x[0] · 1 as the tensor core multiplies it unrounded.
__global__ void tf32_rounding(const float* x, float* out) {
    wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, RowMajor> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, RowMajor> b;
    wmma::fragment<wmma::accumulator, 16, 16, 8, float> sum;
    __shared__ __align__(32) float tile[TILE * TILE];
    wmma::fill_fragment(a, x[0]);
    wmma::fill_fragment(b, 0.125f);  // 8 · ⅛ = 1
    wmma::fill_fragment(sum, 0.0f);
    wmma::mma_sync(sum, a, b, sum);
    wmma::store_matrix_sync(tile, sum, TILE, wmma::mem_row_major);
    __syncwarp();
    if (threadIdx.x == 0) out[0] = wmma::__float_to_tf32(x[0]), out[1] = tile[0];
}

// d = scale · (a @ b) + c, tile by tile, a warp per tile of 16 × 16: what does the same to every element works.
__global__ void gemm(const __half* __restrict__ a,  // [M, K]
                     const __half* __restrict__ b,  // [K, N]
                     const float* __restrict__ c,   // [M, N]
                     float* __restrict__ d,         // [M, N]
                     int N, int K, float scale) {
    const int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    A fragment_a;
    B fragment_b;
    Sum sum, own;
    wmma::fill_fragment(sum, 0.0f);
    for (int k = 0; k < K; k += TILE) {
        wmma::load_matrix_sync(fragment_a, a + row * K + k, K);
        wmma::load_matrix_sync(fragment_b, b + k * N + column, N);
        wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    }
    wmma::load_matrix_sync(own, c + row * N + column, N, wmma::mem_row_major);
    for (int i = 0; i < sum.num_elements; ++i) sum.x[i] = scale * sum.x[i] + own.x[i];
    wmma::store_matrix_sync(d + row * N + column, sum, N, wmma::mem_row_major);
}

// counts = num_elements of each kind of fragment
__global__ void elements(int* counts) {  // [6]
    if (threadIdx.x > 0) return;
    counts[0] = A::num_elements;
    counts[1] = Sum::num_elements;
    counts[2] = wmma::fragment<wmma::matrix_b, 32, 8, 16, __nv_bfloat16, RowMajor>::num_elements;
    counts[3] = wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, RowMajor>::num_elements;
    counts[4] = wmma::fragment<wmma::matrix_a, 32, 8, 16, signed char, RowMajor>::num_elements;
    counts[5] = wmma::fragment<wmma::accumulator, 8, 8, 4, double>::num_elements;
}

// ------------------------------------------------------------------------------------------------ planted
// d = a @ b

// Half of the warp has returned.
__global__ void half_a_warp(const __half* a, const __half* b, float* d, bool planted) {
    if (planted && threadIdx.x >= WARP / 2) return;
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, a, TILE);  // BUG half_a_warp
    wmma::load_matrix_sync(fragment_b, b, TILE);
    wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
}

// The same product, in two branches.
__global__ void divergent_product(const __half* a, const __half* b, float* d, bool planted) {
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, a, TILE);
    wmma::load_matrix_sync(fragment_b, b, TILE);
    if (planted && threadIdx.x % 2) {
        wmma::mma_sync(sum, fragment_a, fragment_b, sum);  // BUG divergent_product
    } else {
        wmma::mma_sync(sum, fragment_a, fragment_b, sum);  // BUG divergent_product
    }
    wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
}

// A load waits for the other lanes, but it does not make them see what was written.
__global__ void written_without_a_barrier(const __half* a, const __half* b, float* d, bool planted) {
    __shared__ __align__(32) __half tile[TILE * TILE];
    for (int i = threadIdx.x; i < TILE * TILE; i += WARP) tile[i] = a[i];  // BUG written_without_a_barrier
    if (!planted) __syncwarp();
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, tile, TILE);  // BUG written_without_a_barrier
    wmma::load_matrix_sync(fragment_b, b, TILE);
    wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
}

// The first warp stores what the second one multiplies by the unit matrix.
__global__ void between_warps(const __half* a, const __half* b, float* d, bool planted) {
    __shared__ __align__(32) float tile[TILE * TILE];
    Sum sum;
    if (threadIdx.x < WARP) {
        A fragment_a;
        B fragment_b;
        wmma::fill_fragment(sum, 0.0f);
        wmma::load_matrix_sync(fragment_a, a, TILE);
        wmma::load_matrix_sync(fragment_b, b, TILE);
        wmma::mma_sync(sum, fragment_a, fragment_b, sum);
        wmma::store_matrix_sync(tile, sum, TILE, wmma::mem_col_major);  // BUG between_warps
    }
    if (!planted) __syncthreads();
    if (threadIdx.x >= WARP) {
        wmma::load_matrix_sync(sum, tile, TILE, wmma::mem_col_major);  // BUG between_warps
        wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
    }
}

// Some lanes pass another matrix.
__global__ void own_address(const __half* a, const __half* b, float* d, bool planted) {
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, planted && threadIdx.x > 7 ? b : a, TILE);  // BUG own_address
    wmma::load_matrix_sync(fragment_b, b, TILE);
    wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
}

// Rows of 20 halves are 40 bytes: no multiple of 16.
__global__ void leading_dimension(const __half* a, const __half* b, float* d, bool planted) {
    __shared__ __align__(32) __half tile[TILE * 24];
    const int stride = planted ? 20 : 24;
    for (int i = threadIdx.x; i < TILE * TILE; i += WARP) tile[i / TILE * stride + i % TILE] = a[i];
    __syncwarp();
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, tile, stride);  // BUG leading_dimension
    wmma::load_matrix_sync(fragment_b, b, TILE);
    wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
}

// A matrix must begin at a multiple of 32 bytes.
__global__ void unaligned_matrix(const __half* a, const __half* b, float* d, bool planted) {
    __shared__ __align__(32) __half memory[TILE * TILE + 16];
    __half* tile = memory + (planted ? 8 : 16);
    for (int i = threadIdx.x; i < TILE * TILE; i += WARP) tile[i] = a[i];
    __syncwarp();
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, tile, TILE);  // BUG unaligned_matrix
    wmma::load_matrix_sync(fragment_b, b, TILE);
    wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
}

// The leading dimension of another matrix: the last rows lie past the end.
__global__ void past_the_end(const __half* a, const __half* b, float* d, bool planted) {
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, a, TILE);
    wmma::load_matrix_sync(fragment_b, b, planted ? 2 * TILE : TILE);  // BUG past_the_end
    wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
}

// Writes the sums without store_matrix_sync. With the mistake it counts on where today's GPUs keep them.
__global__ void counts_on_a_layout(const __half* a, const __half* b, float* d, bool planted) {
    A fragment_a;
    B fragment_b;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(fragment_a, a, TILE);
    wmma::load_matrix_sync(fragment_b, b, TILE);
    wmma::mma_sync(sum, fragment_a, fragment_b, sum);
    if (planted) {
        for (int i = 0; i < sum.num_elements; ++i) {
            const int row = threadIdx.x / 4 + i / 2 % 2 * 8, column = threadIdx.x % 4 * 2 + i % 2 + i / 4 * 8;
            d[row * TILE + column] = sum.x[i];
        }
    } else {
        wmma::store_matrix_sync(d, sum, TILE, wmma::mem_row_major);
    }
}
