// WARP_SHFL and its like, as torch's header of this name has them.
#pragma once

#include "../../cudascope_torch.h"

__device__ __forceinline__ unsigned ACTIVE_MASK() { return __activemask(); }
__device__ __forceinline__ void WARP_SYNC(unsigned mask = 0xffffffff) { __syncwarp(mask); }
__device__ __forceinline__ unsigned WARP_BALLOT(int predicate, unsigned mask = 0xffffffff) {
    return __ballot_sync(mask, predicate);
}
__device__ __forceinline__ int WARP_ANY(int predicate, unsigned mask = 0xffffffff) {
    return __any_sync(mask, predicate);
}
__device__ __forceinline__ int WARP_ALL(int predicate, unsigned mask = 0xffffffff) {
    return __all_sync(mask, predicate);
}

#define CUDASCOPE_SHUFFLE_16(name, function, Source, T)                                                      \
    __device__ __forceinline__ T name(T value, Source source, int width = 32, unsigned mask = 0xffffffff) {  \
        return {(unsigned short)function(mask, (unsigned)value.x, source, width), T::from_bits()};           \
    }
#define CUDASCOPE_SHUFFLE(name, function, Source)                                                            \
    template <class T>                                                                                       \
    __device__ __forceinline__ T name(T value, Source source, int width = 32, unsigned mask = 0xffffffff) {  \
        return function(mask, value, source, width);                                                         \
    }                                                                                                        \
    CUDASCOPE_SHUFFLE_16(name, function, Source, c10::Half)                                                  \
    CUDASCOPE_SHUFFLE_16(name, function, Source, c10::BFloat16)                                              \
    template <class T>                                                                                       \
    __device__ __forceinline__ c10::complex<T> name(                                                         \
        c10::complex<T> value, Source source, int width = 32, unsigned mask = 0xffffffff) {                  \
        T real = function(mask, value.real_, source, width);                                                 \
        return {real, function(mask, value.imag_, source, width)};                                           \
    }
CUDASCOPE_SHUFFLE(WARP_SHFL, __shfl_sync, int)
CUDASCOPE_SHUFFLE(WARP_SHFL_XOR, __shfl_xor_sync, int)
CUDASCOPE_SHUFFLE(WARP_SHFL_UP, __shfl_up_sync, unsigned)
CUDASCOPE_SHUFFLE(WARP_SHFL_DOWN, __shfl_down_sync, unsigned)
#undef CUDASCOPE_SHUFFLE
#undef CUDASCOPE_SHUFFLE_16

template <class T>
__device__ __forceinline__ T doLdg(const T* address) { return __ldg(address); }
