// What cub's collectives combine with, pairs of a key and a value, room for values in shared memory,
// and what moves a value between lanes.
#pragma once

#include <optional>

#include "../cuda/functional"
#include "../simt.h"

namespace cub {

#define SIMT_OPERATOR(name, Result, expression)                                                \
    struct name {                                                                              \
        template <class T>                                                                     \
        SIMT_METHOD Result operator()(const T& a, const T& b) const { return expression; }     \
    };
SIMT_OPERATOR(Sum, T, a + b)
SIMT_OPERATOR(Max, T, a < b ? b : a)
SIMT_OPERATOR(Min, T, b < a ? b : a)
SIMT_OPERATOR(Equality, bool, a == b)
SIMT_OPERATOR(Inequality, bool, !(a == b))
// Of pairs with equal values the one with the smaller key.
SIMT_OPERATOR(ArgMax, T, a.value < b.value || (a.value == b.value && b.key < a.key) ? b : a)
SIMT_OPERATOR(ArgMin, T, b.value < a.value || (a.value == b.value && b.key < a.key) ? b : a)
#undef SIMT_OPERATOR

template <class K, class V>
struct KeyValuePair {
    using Key = K;
    using Value = V;
    K key;
    V value;
    KeyValuePair() = default;
    SIMT_METHOD KeyValuePair(const K& key, const V& value) : key(key), value(value) {}
};
struct NullType {};

template <int N>
struct Log2 { static constexpr int VALUE = N > 1 ? 32 - __builtin_clz(N - 1) : 0; };
template <int N>
struct PowerOfTwo { static constexpr bool VALUE = (N & (N - 1)) == 0; };

// Numbers as unsigned integers of the same order.
template <class T>
struct Traits {
    using UnsignedBits = std::conditional_t<
        sizeof(T) == 1, uint8_t,
        std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
    static constexpr bool is_float = std::numeric_limits<T>::is_iec559 || std::is_same_v<T, __half>
        || std::is_same_v<T, __nv_bfloat16>;
    static constexpr bool is_unsigned = std::is_unsigned_v<T>;
    static constexpr UnsignedBits HIGH_BIT = UnsignedBits(UnsignedBits(1) << (8 * sizeof(T) - 1));
    SIMT_METHOD static UnsignedBits TwiddleIn(UnsignedBits key) {
        if (is_unsigned) return key;
        return is_float && key & HIGH_BIT ? UnsignedBits(~key) : UnsignedBits(key ^ HIGH_BIT);
    }
    SIMT_METHOD static UnsignedBits TwiddleOut(UnsignedBits key) {
        if (is_unsigned) return key;
        return is_float && !(key & HIGH_BIT) ? UnsignedBits(~key) : UnsignedBits(key ^ HIGH_BIT);
    }
};

// Room for values that no constructor runs for.
template <class T, int N>
struct Room {
    __align__(alignof(T)) char bytes[N * sizeof(T)];
    SIMT_METHOD T& operator[](int i) { return ((T*)bytes)[i]; }
    // Unlike an assignment, this writes the padding at the end of a class too, which a copy may read.
    SIMT_METHOD void put(int i, const T& value) { __builtin_memcpy(bytes + i * sizeof(T), &value, sizeof(T)); }
};

SIMT_INLINE int thread_rank() {
    return (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}
struct Line { int number; };  // of the kernel, where a collective is called
template <class T>
struct Total {  // the variable for the total of all threads, if the caller wants the total
    T* place = nullptr;
    Total() = default;
    SIMT_METHOD Total(T& total) : place(&total) {}
    SIMT_METHOD void operator=(const T& value) const {
        if (place) *place = value;
    }
};

// The shared memory of a collective: the caller's, or the class's own.
template <class Storage, class Self>
class Collective {
    SIMT_METHOD static Storage& own() {
        __shared__ Storage storage;
        return storage;
    }

public:
    using TempStorage = Storage;
    SIMT_METHOD Collective(TempStorage& storage) : temp(storage) {}
    SIMT_METHOD Collective() : temp(own()) {}

protected:
    TempStorage& temp;
};

SIMT_INLINE unsigned LaneId() { return simt_lane(); }
SIMT_INLINE unsigned WarpId() { return (unsigned)thread_rank() / 32; }
SIMT_INLINE int RowMajorTid(int, int, int) { return thread_rank(); }
template <int width>
SIMT_INLINE unsigned WarpMask(unsigned warp) {
    return width == 32 ? ~0u : ((1u << width % 32) - 1) << warp * width % 32;
}
SIMT_INLINE void CTA_SYNC(Line line = {__builtin_LINE()}) { __syncthreads(line.number); }

// Any type goes from lane to lane in words. `first` and `last` are lanes of the logical warp.
template <int width, class T>
SIMT_INLINE T from_lane(const T& input, int source, unsigned mask) {
    unsigned words[(sizeof(T) + 3) / 4] = {};
    __builtin_memcpy(words, &input, sizeof(T));
    for (unsigned& word : words) word = __shfl_sync(mask, word, source, width);
    T out;
    __builtin_memcpy((void*)&out, words, sizeof(T));
    return out;
}
template <int width, class T>
SIMT_INLINE T ShuffleUp(T input, int offset, int first, unsigned mask) {
    int lane = (int)simt_lane() % width;
    return from_lane<width>(input, lane - offset < first ? lane : lane - offset, mask);
}
template <int width, class T>
SIMT_INLINE T ShuffleDown(T input, int offset, int last, unsigned mask) {
    int lane = (int)simt_lane() % width;
    return from_lane<width>(input, lane + offset > last ? lane : lane + offset, mask);
}
template <int width, class T>
SIMT_INLINE T ShuffleIndex(T input, int source, unsigned mask) { return from_lane<width>(input, source, mask); }

template <class T>
struct Uninitialized {
    __align__(alignof(T)) char bytes[sizeof(T)];
    SIMT_METHOD T& Alias() { return *(T*)bytes; }
};
}  // namespace cub
#define CUB_PTX_WARP_THREADS 32
#define CUB_PTX_LOG_WARP_THREADS 5
#define CUB_WARP_THREADS(arch) 32
#define CUB_LOG_WARP_THREADS(arch) 5
#define CUB_PTX_SMEM_BANKS 32
