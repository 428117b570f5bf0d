// What cub's collectives combine with, pairs of a key and a value, and room for values in shared memory.
#pragma once

#include "../cuda/functional"
#include "../simt.h"

namespace cub {

struct Sum { template <class T> SIMT_METHOD T operator()(const T& a, const T& b) const { return a + b; } };
struct Max { template <class T> SIMT_METHOD T operator()(const T& a, const T& b) const { return a < b ? b : a; } };
struct Min { template <class T> SIMT_METHOD T operator()(const T& a, const T& b) const { return b < a ? b : a; } };
struct Equality {
    template <class T>
    SIMT_METHOD bool operator()(const T& a, const T& b) const { return a == b; }
};
struct Inequality {
    template <class T>
    SIMT_METHOD bool operator()(const T& a, const T& b) const { return !(a == b); }
};

template <class K, class V>
struct KeyValuePair {
    using Key = K;
    using Value = V;
    K key;
    V value;
};
// Of equal values the one with the smaller key.
struct ArgMax {
    template <class P>
    SIMT_METHOD P operator()(const P& a, const P& b) const {
        return a.value < b.value || (a.value == b.value && b.key < a.key) ? b : a;
    }
};
struct ArgMin {
    template <class P>
    SIMT_METHOD P operator()(const P& a, const P& b) const {
        return b.value < a.value || (a.value == b.value && b.key < a.key) ? b : a;
    }
};
struct NullType {};

// Room for values that no constructor runs for.
template <class T, int N>
struct Room {
    __align__(alignof(T)) char bytes[N * sizeof(T)];
    SIMT_METHOD T& operator[](int i) { return ((T*)bytes)[i]; }
};

SIMT_INLINE int thread_rank() {
    uint3 thread = simt_thread_idx(), size = simt_block_dim();
    return (int)(thread.x + size.x * (thread.y + size.y * thread.z));
}
struct Line { int number; };  // of the kernel, where a collective is called
SIMT_INLINE unsigned LaneId() { return simt_lane(); }
SIMT_INLINE void CTA_SYNC(Line line = {__builtin_LINE()}) { __syncthreads(line.number); }
}  // namespace cub
