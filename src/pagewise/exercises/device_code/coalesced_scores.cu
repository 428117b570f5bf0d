// scores[token] = q·k for the first `length` tokens of a paged cache, on 128 threads.
#include <cuda_fp16.h>
__global__ void coalesced_scores(const __half* q,    // [D]
                                 const __half* k,    // [num_blocks][P][D], as in lesson 4
                                 const int* table,   // the blocks of the sequence
                                 float* scores,      // [length]
                                 int length) {
    constexpr int D = 128, P = 16;
    struct alignas(16) Vec { __half data[8]; };  // one load reads all of it
    const int member = threadIdx.x % 2, slots = (length + P - 1) / P * P;
    for (int token = threadIdx.x / 2; token < slots; token += blockDim.x / 2) {
        const __half* key = k + (table[token / P] * P + token % P) * D;
        float qk = 0;
        for (int d = 8 * member; d < D; d += 16) {
            const Vec vec = *reinterpret_cast<const Vec*>(key + d);
            for (int i = 0; i < 8; ++i) qk += float(q[d + i]) * float(vec.data[i]);
        }
        qk += __shfl_xor_sync(0xffffffff, qk, 1);
        if (member == 0 && token < length) scores[token] = qk;
    }
}
