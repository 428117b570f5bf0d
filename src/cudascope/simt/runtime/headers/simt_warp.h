// The functions of a warp: shuffles, votes, matches, reductions.
#pragma once

#include "simt_threads.h"

namespace simt {
template <class T>
SIMT_INLINE T shuffle(unsigned mask, const T& value, int source) {
    uint64_t values[32];
    simt_collective(SHFL, mask, bits(value), source, values);
    return from_bits<T>(values[source]);
}
template <class T, class Op>
SIMT_INLINE T reduce(unsigned mask, T value, Op op) {
    uint64_t values[32];
    unsigned lanes = simt_collective(REDUCE, mask, bits(value), -1, values);
    int first = __builtin_ctz(lanes);
    T total = from_bits<T>(values[first]);
    for (int lane = first + 1; lane < 32; ++lane)
        if (lanes >> lane & 1) total = op(total, from_bits<T>(values[lane]));
    return total;
}
SIMT_INLINE unsigned ballot(unsigned mask, int predicate, unsigned* lanes) {
    uint64_t values[32];
    *lanes = simt_collective(VOTE, mask, predicate != 0, -1, values);
    unsigned set = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (*lanes >> lane & 1 && values[lane]) set |= 1u << lane;
    return set;
}
}  // namespace simt

// Lanes form segments of `width`; a source outside the own segment means the own value.
template <class T>
SIMT_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    int lane = simt_lane();
    return simt::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
SIMT_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = simt_lane(), source = lane - (int)delta;
    return simt::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <class T>
SIMT_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = simt_lane(), source = lane + (int)delta;
    return simt::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    int lane = simt_lane(), source = lane ^ lane_mask;
    return simt::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}

SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffff) {
    simt_collective(simt::SYNCWARP, mask, 0, -1, nullptr);
}
SIMT_INLINE unsigned __activemask() { return simt_activemask(); }
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned lanes;
    return simt::ballot(mask, predicate, &lanes);
}
SIMT_INLINE int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
SIMT_INLINE int __all_sync(unsigned mask, int predicate) {
    unsigned lanes, set = simt::ballot(mask, predicate, &lanes);
    return set == lanes;
}
template <class T>
SIMT_INLINE unsigned __match_any_sync(unsigned mask, T value) {
    uint64_t values[32];
    unsigned lanes = simt_collective(simt::MATCH, mask, simt::bits(value), -1, values), same = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1 && values[lane] == simt::bits(value)) same |= 1u << lane;
    return same;
}
template <class T>
SIMT_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all) {
    *all = __match_any_sync(mask, value) == mask;
    return *all ? mask : 0;
}
#define SIMT_REDUCE(name, T, expression)                                                  \
    SIMT_INLINE T __reduce_##name##_sync(unsigned mask, T value) {                        \
        return simt::reduce(mask, value, [](T a, T b) -> T { return expression; });       \
    }
SIMT_REDUCE(add, int, a + b) SIMT_REDUCE(add, unsigned, a + b)
SIMT_REDUCE(min, int, a < b ? a : b) SIMT_REDUCE(min, unsigned, a < b ? a : b)
SIMT_REDUCE(max, int, a > b ? a : b) SIMT_REDUCE(max, unsigned, a > b ? a : b)
SIMT_REDUCE(and, unsigned, a & b) SIMT_REDUCE(or, unsigned, a | b) SIMT_REDUCE(xor, unsigned, a ^ b)
#undef SIMT_REDUCE
