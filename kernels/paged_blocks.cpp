// Writing the keys and values of a step into a paged cache on a CPU (lesson 9).
//
// torch's indexed assignment looks every index up for every row, and needs rows that lie one behind the other.

#include "vectors.h"

namespace {

// x is k or v [T, Hkv, D], and cache [N, P, Hkv, D]. A slot of -1 writes nowhere.
template <class T>
void write(const Tensor& x, const Tensor& cache, const int64_t* slots, int64_t rows, int64_t heads, int64_t D,
           int64_t P) {
    for (int64_t row = 0; row < rows; row++) {
        if (slots[row] < 0) continue;
        const int64_t block = slots[row] / P, offset = slots[row] % P;
        for (int64_t head = 0; head < heads; head++)
            std::memcpy(at<T>(cache, block, offset, head), at<T>(x, row, head, 0), D * sizeof(T));
    }
}

}  // namespace

#define FUNCTION(name, T)                                                                                   \
    extern "C" void write_##name(Tensor x, Tensor cache, const int64_t* slots, int64_t rows, int64_t heads, \
                                 int64_t D, int64_t P) {                                                    \
        write<T>(x, cache, slots, rows, heads, D, P);                                                       \
    }
FUNCTION(float32, float)
FUNCTION(bfloat16, BFloat16)
