// The product y = x Wᵀ + b of a linear layer on a CPU, by a weight W that is packed once (lesson 9).
//
// A decode step has few rows x, so its products take as long as reading W. A core reads fast where addresses follow each
// other, and where it asks for a line long before it needs the line. So W is packed in the order in which it is read.
//
//     a panel   the weights of some outputs, [K, outputs]. Panels follow each other in memory, and a thread computes
//               some of them. A panel that was read for the first rows of x waits in the L2 cache for the others.
//     a block   a few rows of x, [K, rows], packed in the same way
//
// The matrix unit AMX (Intel, since 2023) multiplies [16, 32] by [32, 16] numbers in bfloat16 by one instruction. Its
// tiles of W hold pairs of neighbours along K: [K / 2, 16, 2]. float32, and bfloat16 without AMX, is multiplied in
// vectors of AVX-512 or AVX2.
//
// Sums are float32, and each goes along K in order. So the bits of a row of y depend on its own row of x alone.

#pragma GCC target("amx-tile,amx-bf16")

#include "vectors.h"

#include <algorithm>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

constexpr int64_t AHEAD = 2048;  // bytes between the weights in use and those that are asked for
constexpr int TILE_ROWS = 16, MOST_ROWS = 32;  // rows of x in a tile of AMX, and in a block
constexpr int VECTOR_ROWS = W == 16 ? 12 : 6;  // rows of a block of vectors: their sums take 3 of 4 registers

int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

void ask_for(const void* address) { __builtin_prefetch((const char*)address + AHEAD); }

// sums = x w of R rows, for x [K, R] in float32 and a panel w [K, 2 W].
template <int R, class T> void block_of(const float* x, const T* w, int64_t K, bool first, float (*sums)[2 * W]) {
    Floats left[R] = {}, right[R] = {};
    for (int64_t k = 0; k < K; k++, x += R, w += 2 * W) {
        if (first)
            for (size_t i = 0; i < 2 * W; i += 64 / sizeof(T)) ask_for(w + i);
        const Floats a = load(w), b = load(w + W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            left[r] += x[r] * a;
            right[r] += x[r] * b;
        }
    }
    for (int r = 0; r < R; r++) {
        store(sums[r], left[r]);
        store(sums[r] + W, right[r]);
    }
}

// Rows of x for vectors, in float32: as few blocks as possible, and no block has two rows more than another.
template <class T> class VectorRows {
  public:
    static constexpr int64_t PANEL = 2 * W;
    const int64_t blocks;

    VectorRows(const T* x, int64_t stride, int64_t M, int64_t K)
        : blocks(cdiv(M, VECTOR_ROWS)), M(M), K(K), packed(M * K) {
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = start(block), rows = start(block + 1) - first;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t k = 0; k < K; k++) packed[first * K + k * rows + r] = value(x[(first + r) * stride + k]);
        }
    }
    static int64_t panel_size(int64_t K) { return K * PANEL; }
    static int64_t place(int64_t output, int64_t k) { return k * PANEL + output; }
    int64_t start(int64_t block) const { return M * block / blocks; }
    void enter() const {}
    void leave() const {}
    void multiply(int64_t block, const T* panel, float (*sums)[PANEL]) const {
        multiply(block, panel, sums, std::make_integer_sequence<int, VECTOR_ROWS>());
    }

  private:
    const int64_t M, K;
    std::vector<float> packed;

    template <int... R>
    void multiply(int64_t block, const T* panel, float (*sums)[PANEL], std::integer_sequence<int, R...>) const {
        constexpr decltype(&block_of<1, T>) of_rows[] = {block_of<R + 1, T>...};
        of_rows[start(block + 1) - start(block) - 1](packed.data() + start(block) * K, panel, K, block == 0, sums);
    }
};

struct alignas(64) Tile {
    BFloat16 numbers[TILE_ROWS][32];
};

// Rows of x in bfloat16 for AMX, in tiles of 16 rows and 32 numbers along K. Missing rows and numbers are 0.
class TileRows {
  public:
    static constexpr int64_t PANEL = 32;
    const int64_t blocks;

    TileRows(const BFloat16* x, int64_t stride, int64_t M, int64_t K)
        : blocks(cdiv(M, MOST_ROWS)), M(M), steps(cdiv(K, 32)), packed(cdiv(M, TILE_ROWS) * steps) {
        for (int64_t r = 0; r < M; r++)
            for (int64_t k = 0; k < K; k += 32)
                std::memcpy(packed[r / TILE_ROWS * steps + k / 32].numbers[r % TILE_ROWS], x + r * stride + k,
                            std::min<int64_t>(32, K - k) * sizeof(BFloat16));
    }
    static int64_t panel_size(int64_t K) { return cdiv(K, 32) * 32 * PANEL; }
    static int64_t place(int64_t output, int64_t k) {  // two tiles for 32 numbers along K
        return k / 32 * 32 * PANEL + output / 16 * 512 + k % 32 / 2 * 32 + output % 16 * 2 + k % 2;
    }
    int64_t start(int64_t block) const { return std::min(M, block * MOST_ROWS); }
    void enter() const {
        struct {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } tiles;
        _tile_loadconfig(&tiles);
    }
    void leave() const { _tile_release(); }
    void multiply(int64_t block, const BFloat16* panel, float (*sums)[PANEL]) const {
        const Tile* w = (const Tile*)panel;
        const Tile *upper = packed.data() + block * 2 * steps, *lower = upper + steps;
        const bool is_tall = start(block + 1) - start(block) > TILE_ROWS;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < steps; step++, w += 2) {
            if (block == 0)
                for (size_t i = 0; i < 2 * sizeof(Tile); i += 64) ask_for((const char*)w + i);
            _tile_loadd(4, w, 64);
            _tile_loadd(5, w + 1, 64);
            _tile_loadd(6, upper + step, 64);
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 6, 5);
            if (is_tall) {
                _tile_loadd(7, lower + step, 64);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
            }
        }
        _tile_stored(0, sums[0], sizeof *sums);
        _tile_stored(1, sums[0] + 16, sizeof *sums);
        _tile_stored(2, sums[TILE_ROWS], sizeof *sums);
        _tile_stored(3, sums[TILE_ROWS] + 16, sizeof *sums);
    }

  private:
    const int64_t M, steps;
    std::vector<Tile> packed;
};

template <class Rows, class T>
void product(const T* x, int64_t stride, const T* packed, const T* bias, T* y, int64_t M, int64_t N, int64_t K,
             int num_threads) {
    constexpr int64_t PANEL = Rows::PANEL;
    const Rows rows(x, stride, M, K);
#pragma omp parallel num_threads(num_threads) if (M * N * K >= 1 << 18)
    {
        rows.enter();
#pragma omp for
        for (int64_t n = 0; n < N; n += PANEL) {
            const int64_t outputs = std::min(PANEL, N - n);
            T biases[PANEL] = {}, line[PANEL];
            if (bias) std::memcpy(biases, bias + n, outputs * sizeof(T));
            for (int64_t block = 0; block < rows.blocks; block++) {
                alignas(64) float sums[MOST_ROWS][PANEL];
                rows.multiply(block, packed + n / PANEL * Rows::panel_size(K), sums);
                for (int64_t m = rows.start(block); m < rows.start(block + 1); m++) {
                    T* to = outputs == PANEL ? y + m * N + n : line;
                    for (int64_t i = 0; i < PANEL; i += W)
                        store(to + i, load(sums[m - rows.start(block)] + i) + load(biases + i));
                    if (to == line) std::memcpy(y + m * N + n, line, outputs * sizeof(T));
                }
            }
        }
        rows.leave();
    }
}

// Packs weights [N, K]. `packed` is zeros of as many whole panels as hold them.
template <class Rows, class T> void pack(const T* weight, T* packed, int64_t N, int64_t K, int num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++)
            packed[n / Rows::PANEL * Rows::panel_size(K) + Rows::place(n % Rows::PANEL, k)] = weight[n * K + k];
}

// Whether this process may use AMX. Linux allows it once, and then to all threads.
bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return allowed;
}

}  // namespace

#define FUNCTIONS(name, T, tiled, Tiles, Vectors)                                                              \
    extern "C" int has_tiles_##name() { return tiled; }                                                        \
    extern "C" void pack_##name(const T* weight, T* packed, int64_t N, int64_t K, int num_threads) {           \
        (tiled ? pack<Tiles, T> : pack<Vectors, T>)(weight, packed, N, K, num_threads);                        \
    }                                                                                                          \
    extern "C" void product_##name(const T* x, int64_t stride, const T* packed, const T* bias, T* y,           \
                                   int64_t M, int64_t N, int64_t K, int num_threads) {                         \
        (tiled ? product<Tiles, T> : product<Vectors, T>)(x, stride, packed, bias, y, M, N, K, num_threads);   \
    }
FUNCTIONS(float32, float, false, VectorRows<float>, VectorRows<float>)
FUNCTIONS(bfloat16, BFloat16, may_use_tiles(), TileRows, VectorRows<BFloat16>)
