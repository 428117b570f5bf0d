// gpuAtomicAdd and its like, as torch's header of this name has them.
#pragma once

#include "../../cudascope_torch.h"

namespace cudascope {
template <int bytes>
struct Word {};
template <>
struct Word<2> { using type = unsigned short; };
template <>
struct Word<4> { using type = unsigned; };
template <>
struct Word<8> { using type = unsigned long long; };

// Replace the old value by next(old value), and return the old value. The bits are compared: a NaN equals itself.
template <class T, class Next>
__device__ __forceinline__ T atomic_update(T* address, Next next) {
    using W = typename Word<sizeof(T)>::type;
    W* place = reinterpret_cast<W*>(address);
    W old = *place, assumed;
    do {
        assumed = old;
        T value = next(*reinterpret_cast<T*>(&assumed));
        old = atomicCAS(place, assumed, *reinterpret_cast<W*>(&value));
    } while (assumed != old);
    return *reinterpret_cast<T*>(&old);
}
}  // namespace cudascope

#ifdef CUDASCOPE  // atomicAdd of any type
template <class T>
__device__ __forceinline__ T gpuAtomicAdd(T* address, T value) { return atomicAdd(address, value); }
#else
template <class T>
__device__ __forceinline__ T gpuAtomicAdd(T* address, T value) {
    if constexpr (sizeof(T) == 2)
        return cudascope::atomic_update(address, [&](T old) { return T(old + value); });
    else
        return atomicAdd(address, value);
}
__device__ __forceinline__ int64_t gpuAtomicAdd(int64_t* address, int64_t value) {
    return (int64_t)atomicAdd((unsigned long long*)address, (unsigned long long)value);
}
__device__ __forceinline__ int64_t atomicAdd(int64_t* address, int64_t value) { return gpuAtomicAdd(address, value); }
#define CUDASCOPE_ADD(T, Raw)                                                                              \
    __device__ __forceinline__ T gpuAtomicAdd(T* address, T value) { return atomicAdd((Raw*)address, (Raw)value); } \
    __device__ __forceinline__ T atomicAdd(T* address, T value) { return gpuAtomicAdd(address, value); }
CUDASCOPE_ADD(c10::Half, __half)
CUDASCOPE_ADD(c10::BFloat16, __nv_bfloat16)
#undef CUDASCOPE_ADD
#endif
template <class T>
__device__ __forceinline__ void gpuAtomicAdd(c10::complex<T>* address, c10::complex<T> value) {
    gpuAtomicAdd(&address->real_, value.real_);
    gpuAtomicAdd(&address->imag_, value.imag_);
}
template <class T>
__device__ __forceinline__ void gpuAtomicAddNoReturn(T* address, T value) { gpuAtomicAdd(address, value); }
template <class T>
__device__ __forceinline__ T gpuAtomicMul(T* address, T value) {
    return cudascope::atomic_update(address, [&](T old) { return T(old * value); });
}
template <class T>
__device__ __forceinline__ T gpuAtomicMax(T* address, T value) {
    return cudascope::atomic_update(address, [&](T old) { return at::_isnan(value) || old < value ? value : old; });
}
template <class T>
__device__ __forceinline__ T gpuAtomicMin(T* address, T value) {
    return cudascope::atomic_update(address, [&](T old) { return at::_isnan(value) || value < old ? value : old; });
}
