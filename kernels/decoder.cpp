// RMSNorm, RoPE and SwiGLU on a CPU: what a Llama computes besides its matrix products and its attention (lesson 9).
//
// torch needs seven operators for an RMSNorm and eight for RoPE. Each of them reads and writes a whole tensor, and its
// start takes as long as its work on the few rows of a decode step. Here a row is read once or twice, from a cache.
//
// A tensor [A, B, n] has A · B rows of n neighbours, where n is a multiple of W. Sums are float32. Results are rounded
// to T where torch's operators round, so they differ from torch's in the order of sums and in the last bits of exp alone.

#include "vectors.h"

namespace {

template <class T> Floats rounded(Floats x) {
    T in_memory[W];
    store(in_memory, x);
    return load(in_memory);
}

// Calls work(a, b) for each row, on several threads if there is enough to do.
template <class Work> void for_each_row(int64_t A, int64_t B, int64_t n, int num_threads, const Work& work) {
#pragma omp parallel for num_threads(num_threads) if (A * B * n >= 1 << 15)
    for (int64_t row = 0; row < A * B; row++) work(row / B, row % B);
}

template <class T>
void rms_norm(Tensor x, const T* weight, Tensor out, int64_t A, int64_t B, int64_t n, float eps, int num_threads) {
    for_each_row(A, B, n, num_threads, [&](int64_t a, int64_t b) {
        const T* from = at<T>(x, a, b, 0);
        T* to = at<T>(out, a, b, 0);
        Floats squares = {};
        for (int64_t i = 0; i < n; i += W) {
            const Floats v = load(from + i);
            squares += v * v;
        }
        const float factor = 1.0f / std::sqrt(sum_of(squares) / n + eps);
        for (int64_t i = 0; i < n; i += W)
            store(to + i, rounded<T>(load(from + i) * factor) * load(weight + i));
    });
}

// Rotates each pair (x[i], x[i + D / 2]) of x [heads, rows, D] in place. cos and sin are [rows, D] in float32, and both
// halves of their rows are the same.
template <class T>
void rotate(Tensor x, const float* cos, const float* sin, int64_t heads, int64_t rows, int64_t D, int num_threads) {
    for_each_row(rows, heads, D, num_threads, [&](int64_t row, int64_t head) {
        T *first = at<T>(x, head, row, 0), *second = first + D / 2;
        for (int64_t i = 0; i < D / 2; i += W) {
            const Floats c = load(cos + row * D + i), s = load(sin + row * D + i);
            const Floats a = load(first + i), b = load(second + i);
            store(first + i, a * c - b * s);
            store(second + i, b * c + a * s);
        }
    });
}

// silu(x) = x / (1 + exp(-x)), by an exponential that cannot overflow.
Floats silu(Floats x) {
    const Floats e = exp2((x > 0 ? -x : x) * LOG2_E);
    return x * (x > 0 ? Floats{} + 1.0f : e) / (1.0f + e);
}

template <class T>
void silu_and_mul(Tensor gate, Tensor up, Tensor out, int64_t A, int64_t B, int64_t n, int num_threads) {
    for_each_row(A, B, n, num_threads, [&](int64_t a, int64_t b) {
        const T *x = at<T>(gate, a, b, 0), *y = at<T>(up, a, b, 0);
        T* to = at<T>(out, a, b, 0);
        for (int64_t i = 0; i < n; i += W) store(to + i, rounded<T>(silu(load(x + i))) * load(y + i));
    });
}

}  // namespace

#define FUNCTIONS(name, T)                                                                                     \
    extern "C" void rms_norm_##name(Tensor x, const T* weight, Tensor out, int64_t A, int64_t B, int64_t n,    \
                                    float eps, int num_threads) {                                              \
        rms_norm(x, weight, out, A, B, n, eps, num_threads);                                                   \
    }                                                                                                          \
    extern "C" void rotate_##name(Tensor x, const float* cos, const float* sin, int64_t heads, int64_t rows,   \
                                  int64_t D, int num_threads) {                                                \
        rotate<T>(x, cos, sin, heads, rows, D, num_threads);                                                   \
    }                                                                                                          \
    extern "C" void silu_and_mul_##name(Tensor gate, Tensor up, Tensor out, int64_t A, int64_t B, int64_t n,   \
                                        int num_threads) {                                                     \
        silu_and_mul<T>(gate, up, out, A, B, n, num_threads);                                                  \
    }
FUNCTIONS(float32, float)
FUNCTIONS(bfloat16, BFloat16)
