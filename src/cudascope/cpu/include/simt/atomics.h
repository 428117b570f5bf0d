// Atomics, and the loads and stores that carry a hint for the caches.
#pragma once

#include "threads.h"

namespace simt {
template <class T>
struct identity { using type = T; };
template <class T>
using value_of = typename identity<T>::type;  // the second argument follows the pointer's type, as in CUDA

// Every atomic is a loop of compare-and-swap; returns what was there before.
template <class T, class Next>
SIMT_INLINE T atomic_begun(T* address, Next next) {
    uint64_t seen = 0;
    T desired = next(from_bits<T>(seen));
    while (!simt_exchange_if(address, sizeof(T), &seen, bits(desired))) desired = next(from_bits<T>(seen));
    return from_bits<T>(seen);
}
template <class T, class Next>
SIMT_INLINE T atomic(T* address, Next next) {
    simt_atomic(address, sizeof(T));
    return atomic_begun(address, next);
}
}  // namespace simt

#define SIMT_ATOMIC(name, expression)                                                             \
    template <class T>                                                                            \
    SIMT_INLINE T name(T* address, simt::value_of<T> value) {                                     \
        return simt::atomic(address, [&](T old) -> T { return expression; });                     \
    }                                                                                             \
    template <class T>                                                                            \
    SIMT_INLINE T name##_block(T* address, simt::value_of<T> value) {                             \
        simt::Scope scope(true);                                                                  \
        return name(address, value);                                                              \
    }                                                                                             \
    template <class T>                                                                            \
    SIMT_INLINE T name##_system(T* address, simt::value_of<T> value) { return name(address, value); }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicSub, old - value)
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicExch, value)
SIMT_ATOMIC(atomicAnd, old & value)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef SIMT_ATOMIC
template <class T>
SIMT_INLINE T atomicCAS(T* address, simt::value_of<T> compare, simt::value_of<T> value) {
#ifdef SIMT_INSTRUMENTED
    simt_atomic_if(address, sizeof(T), simt::bits(compare));
#else
    simt_atomic(address, sizeof(T));
#endif
    return simt::atomic_begun(address, [&](T old) -> T { return simt::bits(old) == simt::bits(compare) ? value : old; });
}

template <class T>
SIMT_INLINE T atomicCAS_block(T* address, simt::value_of<T> compare, simt::value_of<T> value) {
    simt::Scope scope(true);
    return atomicCAS(address, compare, value);
}
template <class T>
SIMT_INLINE T atomicCAS_system(T* address, simt::value_of<T> compare, simt::value_of<T> value) {
    return atomicCAS(address, compare, value);
}

SIMT_INLINE float2 atomicAdd(float2* address, float2 value) {  // element by element
    return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y)};
}
SIMT_INLINE float4 atomicAdd(float4* address, float4 value) {
    float* p = &address->x;
    return {atomicAdd(p, value.x), atomicAdd(p + 1, value.y), atomicAdd(p + 2, value.z), atomicAdd(p + 3, value.w)};
}

#define SIMT_LOAD(name) \
    template <class T>  \
    SIMT_INLINE T name(const T* address) { return *address; }
SIMT_LOAD(__ldg) SIMT_LOAD(__ldca) SIMT_LOAD(__ldcg) SIMT_LOAD(__ldcs) SIMT_LOAD(__ldcv) SIMT_LOAD(__ldlu)
#undef SIMT_LOAD
#define SIMT_STORE(name) \
    template <class T>   \
    SIMT_INLINE void name(T* address, simt::value_of<T> value) { *address = value; }
SIMT_STORE(__stcg) SIMT_STORE(__stcs) SIMT_STORE(__stwb) SIMT_STORE(__stwt)
#undef SIMT_STORE
