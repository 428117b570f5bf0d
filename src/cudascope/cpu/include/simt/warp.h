// The functions of a warp: shuffles, votes, matches, reductions.
#pragma once

#include "threads.h"

namespace simt {
template <class T>
SIMT_INLINE T shuffle(Collective function, unsigned mask, const T& value, int source) {
    return from_bits<T>(simt_shuffle(function, mask, bits(value), source));
}
// The lanes in a segment of a shuffle. PTX turns any other number into a mask of bits that no one means.
SIMT_INLINE int width_of_segment(int width) {
    if (width < 1 || width > 32 || (width & (width - 1)))
        simt_refuse(simt_lane(), "calls a shuffle with a width that is not 1, 2, 4, 8, 16 or 32");
    return width;
}
// What each lane gets of op(… op(op(v0, v1), v2) …): all of it, all up to its own value, or all before.
enum class Fold { all, inclusive, exclusive };
template <Fold fold, class T, class Op>
struct Folding {
    T value;
    Op* op;
    SIMT_UNSEEN static void complete(void** lanes) {
        bool any = false;
        T total{};
        for (int lane = 0; lane < 32; ++lane) {
            Folding* mine = (Folding*)lanes[lane];
            if (!mine) continue;
            T before = total;
            total = any ? T((*mine->op)(before, mine->value)) : mine->value;
            mine->value = fold == Fold::exclusive ? before : total;
            any = true;
        }
        for (int lane = 0; fold == Fold::all && lane < 32; ++lane)
            if (lanes[lane]) ((Folding*)lanes[lane])->value = total;
    }
};
template <Fold fold, class T, class Op>
SIMT_INLINE T folded(Collective collective, unsigned mask, const T& value, Op& op, int line) {
    Folding<fold, T, Op> mine{value, &op};
    simt_meet(collective, mask, &mine, Folding<fold, T, Op>::complete, line);
    return mine.value;
}
template <class T, class Op>
SIMT_INLINE T reduce(unsigned mask, const T& value, Op op) {
    return folded<Fold::all>(REDUCE, mask, value, op, 0);
}
}  // namespace simt

// Lanes form segments of `width`; a source outside the own segment means the own value.
template <class T>
SIMT_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    width = simt::width_of_segment(width);
    int lane = simt_lane();
    return simt::shuffle(simt::SHFL_IDX, mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
SIMT_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    width = simt::width_of_segment(width);
    int lane = simt_lane(), source = lane - (int)delta;
    return simt::shuffle(simt::SHFL_UP, mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <class T>
SIMT_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    width = simt::width_of_segment(width);
    int lane = simt_lane(), source = lane + (int)delta;
    return simt::shuffle(simt::SHFL_DOWN, mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    width = simt::width_of_segment(width);
    int lane = simt_lane(), source = lane ^ lane_mask;
    return simt::shuffle(simt::SHFL_XOR, mask, value, source > (lane | (width - 1)) ? lane : source);
}

SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffff) { simt_syncwarp(mask); }
SIMT_INLINE unsigned __activemask() { return simt_activemask(); }
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int predicate) { return simt_vote(simt::VOTE_BALLOT, mask, predicate).yes; }
SIMT_INLINE int __any_sync(unsigned mask, int predicate) { return simt_vote(simt::VOTE_ANY, mask, predicate).yes != 0; }
SIMT_INLINE int __all_sync(unsigned mask, int predicate) { return simt_vote(simt::VOTE_ALL, mask, predicate).no == 0; }
template <class T>
SIMT_INLINE unsigned __match_any_sync(unsigned mask, T value) {
    return simt_match(simt::MATCH_ANY, mask, simt::bits(value));
}
template <class T>
SIMT_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all) {
    *all = simt_match(simt::MATCH_ALL, mask, simt::bits(value)) == mask;
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
