// Vectors of numbers in float32, and tensors, for the kernels of this folder that run on a CPU.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int W = 16;  // elements of a vector, which fill a register
#else
constexpr int W = 8;
#endif
using Floats = float __attribute__((vector_size(4 * W)));
using Ints = int32_t __attribute__((vector_size(4 * W)));
using Bits = uint32_t __attribute__((vector_size(4 * W)));
using Shorts = uint16_t __attribute__((vector_size(2 * W)));

struct BFloat16 {
    uint16_t bits;
};

template <class Vector> Vector read(const void* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

Floats load(const float* x) { return read<Floats>(x); }

Floats load(const BFloat16* x) {
    return (Floats)(__builtin_convertvector(read<Shorts>(x), Bits) << 16);
}

float value(float x) { return x; }

float value(BFloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

void store(BFloat16* to, Floats x) {  // to nearest, ties to even
    const Bits bits = (Bits)x;
    const auto rounded = __builtin_convertvector((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, Shorts);
    std::memcpy(to, &rounded, sizeof rounded);
}

constexpr float LOG2_E = 1.44269504f;

// 2 to the power of x <= 0, to 1e-7 of the result. Results below 2^-126 are 0. NaN stays NaN.
Floats exp2(Floats x) {
    const Floats low = x < -126.0f ? Floats{} - 126.0f : x;
    const Ints whole = __builtin_convertvector(low - 0.5f, Ints);  // rounds towards 0: to nearest, as low <= 0
    const Floats part = low - __builtin_convertvector(whole, Floats);  // in [-0.5, 0.5]
    Floats y = part * 1.5403530e-4f + 1.3333558e-3f;  // the Taylor series of 2^part
    y = y * part + 9.6181291e-3f;
    y = y * part + 5.5504109e-2f;
    y = y * part + 2.4022651e-1f;
    y = y * part + 6.9314718e-1f;
    y = y * part + 1.0f;
    return x < -126.0f ? Floats{} : y * (Floats)((whole + 127) << 23);
}

Floats shifted(Floats x, int step) {
    Ints lanes;
    for (int i = 0; i < W; i++) lanes[i] = i ^ step;
    return __builtin_shuffle(x, lanes);
}

float max_of(Floats x) {
    for (int step = W / 2; step > 0; step /= 2) {
        const Floats other = shifted(x, step);
        x = other > x ? other : x;
    }
    return x[0];
}

float sum_of(Floats x) {
    for (int step = W / 2; step > 0; step /= 2) x += shifted(x, step);
    return x[0];
}

struct Tensor {
    void* data;
    int64_t strides[3];  // in elements; the last axis has neighbours
};

template <class T> T* at(const Tensor& x, int64_t i, int64_t j, int64_t k) {
    return (T*)x.data + i * x.strides[0] + j * x.strides[1] + k * x.strides[2];
}

}  // namespace
