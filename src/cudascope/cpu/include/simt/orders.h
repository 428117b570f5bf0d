// Atomics with an order: __nv_atomic_* of CUDA 12.8, and what cuda::atomic is made of.
#pragma once

#include "atomics.h"

#define __NV_ATOMIC_RELAXED 0
#define __NV_ATOMIC_CONSUME 1
#define __NV_ATOMIC_ACQUIRE 2
#define __NV_ATOMIC_RELEASE 3
#define __NV_ATOMIC_ACQ_REL 4
#define __NV_ATOMIC_SEQ_CST 5
#define __NV_THREAD_SCOPE_THREAD 0
#define __NV_THREAD_SCOPE_BLOCK 1
#define __NV_THREAD_SCOPE_CLUSTER 2
#define __NV_THREAD_SCOPE_DEVICE 3
#define __NV_THREAD_SCOPE_SYSTEM 4

namespace simt {
constexpr int SYSTEM = __NV_THREAD_SCOPE_SYSTEM;
constexpr bool is_block(int scope) { return scope == __NV_THREAD_SCOPE_BLOCK; }
// An atomic between the fences that its order asks for.
template <class Function>
SIMT_INLINE auto ordered(int order, int scope, Function function) {
    Scope within(is_block(scope));
    if (order >= __NV_ATOMIC_RELEASE) simt_fence();
    auto seen = function();
    if (order != __NV_ATOMIC_RELAXED && order != __NV_ATOMIC_RELEASE) simt_acquire();
    return seen;
}
template <class T>
SIMT_INLINE T load_ordered(const T* address, int order, int scope) {
    return ordered(order, scope, [&] { return atomic((T*)address, [](T old) { return old; }); });
}
template <class T>
SIMT_INLINE T exchange_ordered(T* address, value_of<T> value, int order, int scope) {
    return ordered(order, scope, [&] { return atomicExch(address, value); });
}
template <class T>
SIMT_INLINE bool compare_exchange_ordered(T* address, T* expected, value_of<T> value, int order, int scope) {
    T wanted = *expected;
    *expected = ordered(order, scope, [&] { return atomicCAS(address, wanted, value); });
    return bits(*expected) == bits(wanted);
}
}  // namespace simt

template <class T>
SIMT_INLINE T __nv_atomic_load_n(const T* from, int order, int scope = simt::SYSTEM) {
    return simt::load_ordered(from, order, scope);
}
template <class T>
SIMT_INLINE void __nv_atomic_load(const T* from, T* out, int order, int scope = simt::SYSTEM) {
    *out = simt::load_ordered(from, order, scope);
}
template <class T>
SIMT_INLINE T __nv_atomic_exchange_n(T* at, simt::value_of<T> value, int order, int scope = simt::SYSTEM) {
    return simt::exchange_ordered(at, value, order, scope);
}
template <class T>
SIMT_INLINE void __nv_atomic_exchange(T* at, T* value, T* out, int order, int scope = simt::SYSTEM) {
    *out = simt::exchange_ordered(at, *value, order, scope);
}
template <class T>
SIMT_INLINE void __nv_atomic_store_n(T* at, simt::value_of<T> value, int order, int scope = simt::SYSTEM) {
    simt::exchange_ordered(at, value, order, scope);
}
template <class T>
SIMT_INLINE void __nv_atomic_store(T* at, T* value, int order, int scope = simt::SYSTEM) {
    simt::exchange_ordered(at, *value, order, scope);
}
template <class T>
SIMT_INLINE bool __nv_atomic_compare_exchange_n(
    T* at, T* expected, simt::value_of<T> value, bool, int order, int failed, int scope = simt::SYSTEM) {
    return simt::compare_exchange_ordered(at, expected, value, order > failed ? order : failed, scope);
}
template <class T>
SIMT_INLINE bool __nv_atomic_compare_exchange(
    T* at, T* expected, T* value, bool, int order, int failed, int scope = simt::SYSTEM) {
    return simt::compare_exchange_ordered(at, expected, *value, order > failed ? order : failed, scope);
}
SIMT_INLINE void __nv_atomic_thread_fence(int order, int scope = simt::SYSTEM) {
    simt::Scope within(simt::is_block(scope));
    if (order) simt_fence();
}
#define SIMT_ORDERED(name, function)                                                                              \
    template <class T>                                                                                            \
    SIMT_INLINE T __nv_atomic_fetch_##name(T* at, simt::value_of<T> value, int order, int scope = simt::SYSTEM) { \
        return simt::ordered(order, scope, [&] { return function(at, value); });                                  \
    }                                                                                                             \
    template <class T>                                                                                            \
    SIMT_INLINE void __nv_atomic_##name(T* at, simt::value_of<T> value, int order, int scope = simt::SYSTEM) {    \
        __nv_atomic_fetch_##name(at, value, order, scope);                                                        \
    }
SIMT_ORDERED(add, atomicAdd) SIMT_ORDERED(sub, atomicSub) SIMT_ORDERED(min, atomicMin) SIMT_ORDERED(max, atomicMax)
SIMT_ORDERED(and, atomicAnd) SIMT_ORDERED(or, atomicOr) SIMT_ORDERED(xor, atomicXor)
#undef SIMT_ORDERED
