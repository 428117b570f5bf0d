// PTX instructions in which the lanes of a warp take part together.
#pragma once

#include "ptx_floats.h"
#include "warp.h"

namespace simt::ptx {

struct Answer { u32 value; bool there; };  // d|p
enum class Shuffle { idx, up, down, bfly };

// `bounds`: the clamp in the lowest five bits, the mask of segments eight bits above. Outside: the own value.
template <Shuffle how>
SIMT_INLINE Answer shfl(u32 value, u32 by, u32 bounds, u32 mask) {
    int lane = simt_lane(), segments = bounds >> 8 & 31, clamp = bounds & 31, n = by & 31;
    int first = lane & segments, last = first | (clamp & ~segments);
    int source = how == Shuffle::idx ? first | (n & ~segments) : how == Shuffle::up ? lane - n
        : how == Shuffle::down ? lane + n : lane ^ n;
    bool there = how == Shuffle::up ? source >= last : source <= last;
    constexpr auto function = (Collective)(SHFL_IDX + (int)how);  // kinds.h has the four in this order
    return {simt::shuffle(function, mask, value, there ? source : lane), there};
}

SIMT_INLINE u32 warp() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32; }
SIMT_INLINE u32 warps() { return (blockDim.x * blockDim.y * blockDim.z + 31) / 32; }

SIMT_INLINE u32 vote_ballot(bool predicate, u32 mask) { return __ballot_sync(mask, predicate); }
SIMT_INLINE bool vote_any(bool predicate, u32 mask) { return __any_sync(mask, predicate); }
SIMT_INLINE bool vote_all(bool predicate, u32 mask) { return __all_sync(mask, predicate); }
SIMT_INLINE bool vote_uni(bool predicate, u32 mask) {
    Votes votes = simt_vote(VOTE_UNI, mask, predicate);
    return !votes.yes || !votes.no;
}
template <class T>
SIMT_INLINE u32 match_any(T value, u32 mask) { return __match_any_sync(mask, value); }
template <class T>
SIMT_INLINE Answer match_all(T value, u32 mask) {
    int all;
    unsigned lanes = __match_all_sync(mask, value, &all);
    return {lanes, all != 0};
}
SIMT_INLINE Answer elect(u32 mask) {  // the lowest lane of the mask
    u32 leader = __builtin_ctz(mask);
    __syncwarp(mask);
    return {leader, simt_lane() == leader};
}
template <class T> SIMT_INLINE T redux_add(T value, u32 mask) { return __reduce_add_sync(mask, value); }
// Of floats: NaN comes of NaNs alone, or with .NaN of any. `abs`: of the magnitudes.
template <class T, class Op>
SIMT_INLINE T redux_of(T value, u32 mask, bool abs, Op op) {
    T result = simt::reduce(mask, abs ? std::fabs(value) : value, op);
    return std::isnan(result) ? cast_bits<T>(0x7fffffffu) : result;
}
template <class T, unsigned F = 0, bool abs = false>
SIMT_INLINE T redux_min(T value, u32 mask) {
    if constexpr (is_integer<T>) return __reduce_min_sync(mask, value);
    else return redux_of(value, mask, abs, [](T a, T b) { return min<T, F>(a, b); });
}
template <class T, unsigned F = 0, bool abs = false>
SIMT_INLINE T redux_max(T value, u32 mask) {
    if constexpr (is_integer<T>) return __reduce_max_sync(mask, value);
    else return redux_of(value, mask, abs, [](T a, T b) { return max<T, F>(a, b); });
}
template <class T> SIMT_INLINE T redux_and(T value, u32 mask) { return __reduce_and_sync(mask, value); }
template <class T> SIMT_INLINE T redux_or(T value, u32 mask) { return __reduce_or_sync(mask, value); }
template <class T> SIMT_INLINE T redux_xor(T value, u32 mask) { return __reduce_xor_sync(mask, value); }
}  // namespace simt::ptx
