// PTX instructions on memory: addresses of the state spaces, loads, stores, atomics.
#pragma once

#include "addresses.h"
#include "atomics.h"
#include "ptx_floats.h"
#include "warp.h"

namespace simt::ptx {

// A generic address is a pointer. One of shared memory is 32 bits that count from the thread block's own.
SIMT_INLINE char* generic_address(u64 address, int64_t offset) { return (char*)address + offset; }
SIMT_INLINE char* shared_address(u32 address, int64_t offset) {
    return (char*)__cvta_shared_to_generic(address) + offset;
}
// Triton keeps the lower half of an address of local memory. All of the memory lies near the stack's frame.
SIMT_INLINE char* local_address(u32 address, int64_t offset, void* near) {
    return (char*)near + (s32)(address - (u32)(u64)near) + offset;
}
SIMT_INLINE u64 cvta_to_shared(u64 address) { return __cvta_generic_to_shared((void*)address); }
SIMT_INLINE u64 cvta_shared(u32 address) { return (u64)__cvta_shared_to_generic(address); }
SIMT_INLINE u64 cvta_global(u64 address) { return address; }
SIMT_INLINE bool is_shared(u64 address) { return __isShared((const void*)address); }
SIMT_INLINE bool is_global(u64 address) { return __isGlobal((const void*)address); }

// The parameters of kernels and of functions. Each belongs to one thread.
template <int size, int alignment>
struct alignas(alignment) Bytes { char bytes[size]; };
template <class T>
SIMT_INLINE T parameter(const char* address) {
    T value;
    __builtin_memcpy(&value, address, sizeof(T));
    return value;
}
template <class T>
SIMT_INLINE void set_parameter(char* address, const T& value) { __builtin_memcpy(address, &value, sizeof(T)); }

// An access happens as often as it is written: a thread may wait for what another one stores.
SIMT_INLINE void as_written() {
#ifndef SIMT_INSTRUMENTED  // there a hook stands before every access
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
#endif
}
template <class T, int N, bool is_volatile = false>
SIMT_INLINE Vector<T, N> load(const char* address) {
#ifndef SIMT_INSTRUMENTED
    if (is_volatile) simt_poll(address, sizeof(T) * N);
#endif
    as_written();
    return read<Vector<T, N>, is_volatile>(address);
}
template <class T, int N, bool is_volatile = false>
SIMT_INLINE void store(char* address, Vector<T, N> value) {
    write<Vector<T, N>, is_volatile>(address, value);
    as_written();
}

// .relaxed, .acquire, .release and .mmio do not race with atomics, and are ones: element by element.
template <class T, int N>
SIMT_INLINE Vector<T, N> load_strong(const char* address) {
    Vector<T, N> out;
    for (int i = 0; i < N; ++i) out.x[i] = simt::atomic((T*)address + i, [](T old) { return old; });
    return out;
}
template <class T, int N>
SIMT_INLINE void store_strong(char* address, Vector<T, N> value) {
    for (int i = 0; i < N; ++i) simt::atomic((T*)address + i, [&](T) { return value.x[i]; });
}

enum class Atomic { add, min, max, inc, dec, and_, or_, xor_, exch, cas };
template <Atomic op, class T, int N>
SIMT_INLINE Vector<T, N> atom(char* address, Vector<T, N> value, Vector<T, N> other = {}) {
    Vector<T, N> out;
    for (int i = 0; i < N; ++i) {
        T *p = (T*)address + i, v = value.x[i];
        if constexpr (op == Atomic::add) out.x[i] = atomicAdd(p, v);
        else if constexpr (op == Atomic::min && !is_integer<T>)  // a number, not NaN; of a pair each for itself
            out.x[i] = simt::atomic(p, [&](T old) { return min<T>(old, v); });
        else if constexpr (op == Atomic::max && !is_integer<T>)
            out.x[i] = simt::atomic(p, [&](T old) { return max<T>(old, v); });
        else if constexpr (op == Atomic::min) out.x[i] = atomicMin(p, v);
        else if constexpr (op == Atomic::max) out.x[i] = atomicMax(p, v);
        else if constexpr (op == Atomic::inc) out.x[i] = atomicInc(p, v);
        else if constexpr (op == Atomic::dec) out.x[i] = atomicDec(p, v);
        else if constexpr (op == Atomic::and_) out.x[i] = atomicAnd(p, v);
        else if constexpr (op == Atomic::or_) out.x[i] = atomicOr(p, v);
        else if constexpr (op == Atomic::xor_) out.x[i] = atomicXor(p, v);
        else if constexpr (op == Atomic::exch) out.x[i] = atomicExch(p, v);
        else out.x[i] = atomicCAS(p, v, other.x[i]);
    }
    return out;
}

// What an atomic stores in the place of `old`.
template <Atomic op, class T>
SIMT_INLINE T updated(T old, T value) {
    if constexpr (op == Atomic::add) return add<T>(old, value);
    else if constexpr (op == Atomic::min) return min<T>(old, value);
    else if constexpr (op == Atomic::max) return max<T>(old, value);
    else if constexpr (op == Atomic::inc) return old >= value ? 0 : old + 1;
    else if constexpr (op == Atomic::dec) return old == 0 || old > value ? value : old - 1;
    else if constexpr (op == Atomic::and_) return old & value;
    else if constexpr (op == Atomic::or_) return old | value;
    else return old ^ value;
}
template <Atomic op, class T>
SIMT_UNSEEN void combine_elements(char* to, const char* from, u32 bytes) {
    constexpr bool adds = op == Atomic::add, orders = op == Atomic::min || op == Atomic::max;
    constexpr bool counts = op == Atomic::inc || op == Atomic::dec;
    if constexpr (adds || (is_integer<T> ? (!counts || std::is_unsigned_v<T>) : orders && is_half<T>)) {
        for (u32 at = 0; at < bytes; at += sizeof(T)) {
            T value = *(const T*)(from + at);
            simt::atomic_begun((T*)(to + at), [&](T old) { return updated<op, T>(old, value); });
        }
    } else simt_lacks("a bulk reduction of elements of a type for which PTX does not have the operation");
}
// A bulk reduction (cp.reduce.async.bulk) of elements whose type has this number in tensor maps.
template <Atomic op>
SIMT_UNSEEN void combine(char* to, const char* from, u32 bytes, u32 type) {
    switch (type) {
        case 2: return combine_elements<op, u32>(to, from, bytes);
        case 3: return combine_elements<op, s32>(to, from, bytes);
        case 4: return combine_elements<op, u64>(to, from, bytes);
        case 5: return combine_elements<op, s64>(to, from, bytes);
        case 6: return combine_elements<op, f16>(to, from, bytes);
        case 7: case 8: return combine_elements<op, f32>(to, from, bytes);
        case 9: return combine_elements<op, f64>(to, from, bytes);
        case 10: return combine_elements<op, bf16>(to, from, bytes);
        default: simt_lacks("a bulk reduction of elements of a type that PTX does not reduce");
    }
}

// A tensor map. In shared memory its address may have 64 bits, of which the lower half counts.
SIMT_INLINE char* map_address(u64 address, int64_t offset) {
    return address >> 32 ? (char*)address + offset : shared_address((u32)address, offset);
}
template <class Field>
SIMT_INLINE void set_field(Field* field, u64 value) { write<Field>((char*)field, (Field)value); }
SIMT_INLINE void publish_map(char* to, const char* from) {  // by all lanes of a warp, which take four bytes each
    u32 lane = simt_lane();
    __syncwarp();
    write<u32>(to + 4 * lane, read<u32>(from + 4 * lane));
    simt_fence();
    __syncwarp();
}
SIMT_INLINE simt::TensorMap map_at(u64 address) {
    simt::TensorMap map;
    for (u32 i = 0; i < sizeof(map); i += 8) {
        u64 word = read<u64>((const char*)address + i);
        __builtin_memcpy((char*)&map + i, &word, 8);
    }
    return map;
}

SIMT_INLINE void copy_async(char* to, const char* from, u32 bytes, u32 from_source) {
    simt_copy_async(to, from, bytes, bytes - std::min(bytes, from_source));
}
}  // namespace simt::ptx
