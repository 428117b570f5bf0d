// CUDA C++ for a machine without a GPU: what a kernel may use, said in plain C++ (DESIGN.md §3).
//
// tools/simt.py puts this header in front of an unmodified .cu file and compiles it with g++ or clang++. A thread of
// CUDA becomes a fiber; simt_runtime.cpp runs the fibers of a thread block on one OS thread. Every access to memory
// calls a hook of the runtime when the file is compiled with -fsanitize=thread, with no change to the kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <iostream>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

// ---------------------------------------------------------------------------------------------- the language

#define __global__ __attribute__((flatten, noinline))  // one body per kernel, as nvcc makes it: lines stay exact
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __shared__ thread_local  // one OS thread runs one thread block at a time
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define alignas(n) __attribute__((aligned(n)))  // CUDA accepts it between __shared__ and the type, C++ does not
#define __device_builtin__
#define __cudart_builtin__

// NVIDIA's own types: float4, half, bfloat16, fp8, with the conversions and the arithmetic they have for the host.
#define __CUDA_RUNTIME_API_H__  // their host API is not wanted
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"

#define __CUDACC__ 1
#define PAGEWISE_SIMT 1

#define SIMT_REFUSE(what) _Pragma(what)
#define asm SIMT_REFUSE("GCC error \"inline PTX (asm) runs on a GPU only: give the kernel a plain C++ path\"")
#define __asm__ asm
#define nvcuda SIMT_REFUSE("GCC error \"wmma (nvcuda::) runs on a GPU only: the CPU runner has no tensor cores\"")
#define cooperative_groups \
    SIMT_REFUSE("GCC error \"the CPU runner has no cooperative groups: use __syncthreads and warp functions\"")
#define __pipeline_memcpy_async \
    SIMT_REFUSE("GCC error \"cp.async runs on a GPU only: the CPU runner has no asynchronous copies\"")

// ---------------------------------------------------------------------------------------------- the runtime

extern "C" {
enum SimtCollective : int { SIMT_SHUFFLE, SIMT_VOTE, SIMT_MATCH, SIMT_REDUCE, SIMT_SYNCWARP };

uint3 simt_thread_idx() __attribute__((const));
uint3 simt_block_idx() __attribute__((const));
uint3 simt_block_dim() __attribute__((const));
uint3 simt_grid_dim() __attribute__((const));
unsigned simt_lane() __attribute__((const));

enum SimtBarrier : int { SIMT_SYNC, SIMT_COUNT, SIMT_AND, SIMT_OR };
int simt_barrier(int kind, int predicate, int line);
// values[lane] receives what that lane brought (of a shuffle: values[source] only); returns the lanes that took part.
unsigned simt_collective(int kind, unsigned mask, uint64_t value, int source, uint64_t* values);
unsigned simt_activemask();
void simt_fence();
void simt_yield();
long long simt_clock();
void simt_atomic(const volatile void* address, int bytes);
bool simt_exchange_if(volatile void* address, int bytes, uint64_t* expected, uint64_t desired);
int simt_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void simt_fail(const char* message, const char* file, int line);
void* simt_memcpy(void* to, const void* from, size_t bytes);
void* simt_memset(void* to, int value, size_t bytes);
}

#define threadIdx (simt_thread_idx())
#define blockIdx (simt_block_idx())
#define blockDim (simt_block_dim())
#define gridDim (simt_grid_dim())
#ifndef warpSize
#define warpSize 32
#endif
#define SIMT_INLINE static inline __attribute__((always_inline, unused))

#define printf simt_printf
#undef assert
#define assert(condition) ((condition) ? (void)0 : simt_fail("assertion failed: " #condition, __FILE__, __LINE__))
#define __trap() simt_fail("__trap()", __FILE__, __LINE__)
#ifdef SIMT_INSTRUMENTED
#define memcpy simt_memcpy
#define memset simt_memset
#endif

// ---------------------------------------------------------------------------------------------- barriers and fences

// The line of the caller tells one barrier from another, also where the compiler makes one call of two.
SIMT_INLINE void __syncthreads(int line = __builtin_LINE()) { simt_barrier(SIMT_SYNC, 0, line); }
SIMT_INLINE int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    return simt_barrier(SIMT_COUNT, predicate != 0, line);
}
SIMT_INLINE int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    return simt_barrier(SIMT_AND, predicate != 0, line);
}
SIMT_INLINE int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return simt_barrier(SIMT_OR, predicate != 0, line);
}
SIMT_INLINE void __threadfence() { simt_fence(); }
SIMT_INLINE void __threadfence_block() { simt_fence(); }
SIMT_INLINE void __threadfence_system() { simt_fence(); }
SIMT_INLINE void __nanosleep(unsigned) { simt_yield(); }
SIMT_INLINE long long clock64() { return simt_clock(); }
#define clock clock64

// ---------------------------------------------------------------------------------------------- a warp's functions

namespace simt {
template <class T>
SIMT_INLINE uint64_t bits(const T& value) {
    static_assert(sizeof(T) <= 8 && sizeof(T) != 3, "a shuffle moves a type of 4 or 8 bytes (or a half or bfloat16)");
    uint64_t out = 0;
    __builtin_memcpy(&out, &value, sizeof(T));
    return out;
}
template <class T>
SIMT_INLINE T from_bits(uint64_t in) {
    T value;
    __builtin_memcpy(&value, &in, sizeof(T));
    return value;
}
template <class T>
SIMT_INLINE T shuffle(unsigned mask, const T& value, int source) {
    uint64_t values[32];
    simt_collective(SIMT_SHUFFLE, mask, bits(value), source, values);
    return from_bits<T>(values[source]);
}
template <class T, class Op>
SIMT_INLINE T reduce(unsigned mask, T value, Op op) {
    uint64_t values[32];
    unsigned lanes = simt_collective(SIMT_REDUCE, mask, bits(value), -1, values);
    int first = __builtin_ctz(lanes);
    T total = from_bits<T>(values[first]);
    for (int lane = first + 1; lane < 32; ++lane)
        if (lanes >> lane & 1) total = op(total, from_bits<T>(values[lane]));
    return total;
}
SIMT_INLINE unsigned ballot(unsigned mask, int predicate, unsigned* lanes) {
    uint64_t values[32];
    *lanes = simt_collective(SIMT_VOTE, mask, predicate != 0, -1, values);
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
    uint64_t values[32];
    simt_collective(SIMT_SYNCWARP, mask, 0, -1, values);
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
    unsigned lanes = simt_collective(SIMT_MATCH, mask, simt::bits(value), -1, values), same = 0;
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

// ---------------------------------------------------------------------------------------------- atomics

namespace simt {
template <class T>
struct identity { using type = T; };
template <class T>
using value_of = typename identity<T>::type;  // the second argument follows the pointer's type, as in CUDA

// Every atomic is a loop of compare-and-swap; returns what was there before.
template <class T, class Next>
SIMT_INLINE T atomic(T* address, Next next) {
    simt_atomic(address, sizeof(T));
    uint64_t seen = 0;
    T desired = next(from_bits<T>(seen));
    while (!simt_exchange_if(address, sizeof(T), &seen, bits(desired))) desired = next(from_bits<T>(seen));
    return from_bits<T>(seen);
}
}  // namespace simt

#define SIMT_ATOMIC(name, expression)                                                             \
    template <class T>                                                                            \
    SIMT_INLINE T name(T* address, simt::value_of<T> value) {                                     \
        return simt::atomic(address, [&](T old) -> T { return expression; });                     \
    }                                                                                             \
    template <class T>                                                                            \
    SIMT_INLINE T name##_block(T* address, simt::value_of<T> value) { return name(address, value); } \
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
    return simt::atomic(address, [&](T old) -> T { return simt::bits(old) == simt::bits(compare) ? value : old; });
}

// ---------------------------------------------------------------------------------------------- loads with a hint

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

// ---------------------------------------------------------------------------------------------- mathematics

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

namespace simt {
template <class A, class B>
using common = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>>;
}
template <class A, class B, class T = simt::common<A, B>>
SIMT_INLINE constexpr T min(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return (T)(std::fmin((T)a, (T)b));
    return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B, class T = simt::common<A, B>>
SIMT_INLINE constexpr T max(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return (T)(std::fmax((T)a, (T)b));
    return (T)a > (T)b ? (T)a : (T)b;
}

// the C library has these names too
#define __expf simt_expf
#define __exp10f simt_exp10f
#define __logf simt_logf
#define __log2f simt_log2f
#define __log10f simt_log10f
#define __powf simt_powf
#define __sinf simt_sinf
#define __cosf simt_cosf
#define __tanf simt_tanf
#define __tanhf simt_tanhf
#define __sincosf simt_sincosf
#define SIMT_MATH(T, name, arguments, expression) SIMT_INLINE T name arguments { return expression; }
SIMT_MATH(float, simt_expf, (float x), std::exp(x))
SIMT_MATH(float, simt_exp10f, (float x), std::pow(10.0f, x))
SIMT_MATH(float, simt_logf, (float x), std::log(x))
SIMT_MATH(float, simt_log2f, (float x), std::log2(x))
SIMT_MATH(float, simt_log10f, (float x), std::log10(x))
SIMT_MATH(float, simt_powf, (float x, float y), std::pow(x, y))
SIMT_MATH(float, simt_sinf, (float x), std::sin(x))
SIMT_MATH(float, simt_cosf, (float x), std::cos(x))
SIMT_MATH(float, simt_tanf, (float x), std::tan(x))
SIMT_MATH(float, simt_tanhf, (float x), std::tanh(x))
SIMT_MATH(float, __fdividef, (float x, float y), x / y)
SIMT_MATH(float, __saturatef, (float x), x > 0 ? (x < 1 ? x : 1.0f) : 0.0f)
SIMT_MATH(float, rsqrtf, (float x), 1.0f / std::sqrt(x))
SIMT_MATH(double, rsqrt, (double x), 1.0 / std::sqrt(x))
SIMT_MATH(float, rcbrtf, (float x), 1.0f / std::cbrt(x))
SIMT_MATH(float, sinpif, (float x), std::sin(x * 3.14159265358979323846f))
SIMT_MATH(float, cospif, (float x), std::cos(x * 3.14159265358979323846f))
SIMT_MATH(float, normcdff, (float x), 0.5f * std::erfc(-x * 0.70710678118654752440f))
SIMT_MATH(float, fdividef, (float x, float y), x / y)
SIMT_INLINE void simt_sincosf(float x, float* s, float* c) { *s = std::sin(x), *c = std::cos(x); }
SIMT_MATH(float, __frcp_rn, (float x), 1.0f / x)
SIMT_MATH(float, __fsqrt_rn, (float x), std::sqrt(x))
SIMT_MATH(float, __frsqrt_rn, (float x), 1.0f / std::sqrt(x))
SIMT_MATH(float, __fadd_rn, (float x, float y), x + y)
SIMT_MATH(float, __fsub_rn, (float x, float y), x - y)
SIMT_MATH(float, __fmul_rn, (float x, float y), x * y)
SIMT_MATH(float, __fdiv_rn, (float x, float y), x / y)
SIMT_MATH(float, __fmaf_rn, (float x, float y, float z), std::fma(x, y, z))
SIMT_MATH(double, __fma_rn, (double x, double y, double z), std::fma(x, y, z))
SIMT_MATH(double, __dadd_rn, (double x, double y), x + y)
SIMT_MATH(double, __dmul_rn, (double x, double y), x * y)

namespace simt {
template <class To, class From>
SIMT_INLINE To to_integer(From x) {  // as the hardware converts: saturating, NaN gives 0
    if (std::isnan(x)) return 0;
    constexpr To lowest = std::numeric_limits<To>::lowest(), highest = std::numeric_limits<To>::max();
    if (x <= (From)lowest) return lowest;
    return x >= (From)highest ? highest : (To)x;
}
}  // namespace simt
#define SIMT_ROUND(name, To, From)                                                                       \
    SIMT_MATH(To, name##_rn, (From x), simt::to_integer<To>(std::nearbyint(x)))                          \
    SIMT_MATH(To, name##_rz, (From x), simt::to_integer<To>(std::trunc(x)))                              \
    SIMT_MATH(To, name##_rd, (From x), simt::to_integer<To>(std::floor(x)))                              \
    SIMT_MATH(To, name##_ru, (From x), simt::to_integer<To>(std::ceil(x)))
SIMT_ROUND(__float2int, int, float)
SIMT_ROUND(__float2uint, unsigned, float)
SIMT_ROUND(__float2ll, long long, float)
SIMT_ROUND(__float2ull, unsigned long long, float)
SIMT_ROUND(__double2int, int, double)
SIMT_ROUND(__double2ll, long long, double)
#undef SIMT_ROUND
SIMT_MATH(float, __int2float_rn, (int x), (float)x)
SIMT_MATH(float, __uint2float_rn, (unsigned x), (float)x)
SIMT_MATH(float, __ll2float_rn, (long long x), (float)x)
SIMT_MATH(double, __int2double_rn, (int x), (double)x)
SIMT_MATH(float, __double2float_rn, (double x), (float)x)
SIMT_MATH(int, __float_as_int, (float x), simt::from_bits<int>(simt::bits(x)))
SIMT_MATH(unsigned, __float_as_uint, (float x), simt::from_bits<unsigned>(simt::bits(x)))
SIMT_MATH(float, __int_as_float, (int x), simt::from_bits<float>(simt::bits(x)))
SIMT_MATH(float, __uint_as_float, (unsigned x), simt::from_bits<float>(simt::bits(x)))
SIMT_MATH(long long, __double_as_longlong, (double x), simt::from_bits<long long>(simt::bits(x)))
SIMT_MATH(double, __longlong_as_double, (long long x), simt::from_bits<double>(simt::bits(x)))
SIMT_MATH(int, __popc, (unsigned x), __builtin_popcount(x))
SIMT_MATH(int, __popcll, (unsigned long long x), __builtin_popcountll(x))
SIMT_MATH(int, __clz, (unsigned x), x ? __builtin_clz(x) : 32)
SIMT_MATH(int, __clzll, (unsigned long long x), x ? __builtin_clzll(x) : 64)
SIMT_MATH(int, __ffs, (unsigned x), __builtin_ffs((int)x))
SIMT_MATH(int, __ffsll, (unsigned long long x), __builtin_ffsll((long long)x))
SIMT_MATH(int, __mul24, (int x, int y), (x << 8 >> 8) * (y << 8 >> 8))
SIMT_MATH(int, __mulhi, (int x, int y), (int)((long long)x * y >> 32))
SIMT_MATH(unsigned, __umulhi, (unsigned x, unsigned y), (unsigned)((unsigned long long)x * y >> 32))
SIMT_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (unsigned)((((uint64_t)high << 32 | low) << (n & 31)) >> 32);
}
SIMT_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (n & 31));
}
SIMT_INLINE unsigned __brev(unsigned x) {
    unsigned out = 0;
    for (int bit = 0; bit < 32; ++bit) out |= (x >> bit & 1) << (31 - bit);
    return out;
}
SIMT_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
SIMT_INLINE int __dp4a(int x, int y, int sum) {
    for (int i = 0; i < 4; ++i) sum += (int8_t)(x >> 8 * i) * (int8_t)(y >> 8 * i);
    return sum;
}

// What NVIDIA's half and bfloat16 have on the device only. Products of two halves are exact in double.
#define SIMT_HALF1(H, name, expression)                                          \
    SIMT_INLINE H h##name(H a) { float x = (float)a; return H(float(expression)); } \
    SIMT_INLINE H##2_ h2##name(H##2_ a) { return H##2_(h##name(a.x), h##name(a.y)); }
#define SIMT_HALF(H)                                                                                              \
    SIMT_HALF1(H, exp, std::exp(x)) SIMT_HALF1(H, exp2, std::exp2(x)) SIMT_HALF1(H, exp10, std::pow(10.0f, x))     \
    SIMT_HALF1(H, log, std::log(x)) SIMT_HALF1(H, log2, std::log2(x)) SIMT_HALF1(H, log10, std::log10(x))          \
    SIMT_HALF1(H, sqrt, std::sqrt(x)) SIMT_HALF1(H, rsqrt, 1 / std::sqrt(x)) SIMT_HALF1(H, rcp, 1 / x)             \
    SIMT_HALF1(H, sin, std::sin(x)) SIMT_HALF1(H, cos, std::cos(x)) SIMT_HALF1(H, tanh, std::tanh(x))              \
    SIMT_HALF1(H, floor, std::floor(x)) SIMT_HALF1(H, ceil, std::ceil(x))                                          \
    SIMT_HALF1(H, trunc, std::trunc(x)) SIMT_HALF1(H, rint, std::nearbyint(x))                                     \
    SIMT_INLINE H __hfma(H a, H b, H c) { return H((double)(float)a * (double)(float)b + (double)(float)c); }      \
    SIMT_INLINE H##2_ __hfma2(H##2_ a, H##2_ b, H##2_ c) { return H##2_(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }
using __half2_ = __half2;
using __nv_bfloat162_ = __nv_bfloat162;
SIMT_HALF(__half)
SIMT_HALF(__nv_bfloat16)
SIMT_MATH(int, __half2int_rn, (__half x), __float2int_rn(__half2float(x)))
SIMT_MATH(int, __bfloat162int_rn, (__nv_bfloat16 x), __float2int_rn(__bfloat162float(x)))
SIMT_MATH(unsigned, __half2uint_rn, (__half x), __float2uint_rn(__half2float(x)))
#undef SIMT_HALF
#undef SIMT_HALF1

// ---------------------------------------------------------------------------------------------- how a launch gets in

#define SIMT_UNSEEN __attribute__((no_sanitize("thread")))  // reading its arguments is no access of the kernel
namespace simt {
template <class... P, size_t... I>
SIMT_UNSEEN void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<P>*)arguments[I]...);
}
template <class... P>
SIMT_UNSEEN void call(void (*kernel)(P...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<P...>{});
}
}  // namespace simt
#define SIMT_ENTRY(symbol, ...) \
    extern "C" SIMT_UNSEEN void symbol(void** arguments) { simt::call(&__VA_ARGS__, arguments); }
