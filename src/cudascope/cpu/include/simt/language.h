// The words of CUDA C++ that C++ lacks, NVIDIA's own types, and the refusal of what only a GPU has.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <limits>
#include <type_traits>
#include <utility>
#ifndef SIMT_WITHOUT_STD  // the source may use them, and the macros below would break them
#include <chrono>
#include <iostream>
#include <string>
#endif

#ifdef SIMT_PREPROCESS  // the words stay in a text that is going to be cut (translate/preprocess.py), and #ifdef knows them
#define __global__ __global__
#define __device__ __device__
#define __host__ __host__
#define __constant__ __constant__
#define __managed__ __managed__
#define __shared__ __shared__
#define __grid_constant__ __grid_constant__
#define __launch_bounds__ __launch_bounds__
#define __cluster_dims__ __cluster_dims__
#define __noinline__ __noinline__
#else
#include "specifiers.h"
#define __noinline__ SIMT_NOINLINE
#define alignas SIMT_ALIGNAS
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __device_builtin__
#define __cudart_builtin__

// NVIDIA's own types: float4, half, bfloat16, fp8, with the conversions and the arithmetic they have for the host.
#define __CUDA_RUNTIME_API_H__  // their host API is not wanted
#define __HOST_DEFINES_H__  // nor their own words: nvidia-cuda-crt, where it is installed, has crt/host_defines.h
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"
#include "driver_types.h"

#define __builtin_assume(condition) ((void)0)
#define __assume(condition) ((void)0)
#define __brkpt() ((void)0)
#define __CUDACC__ 1
#define __NVCC__ 1
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 8
#ifndef CUDART_VERSION
#define CUDART_VERSION 12080
#endif
#define CUDASCOPE 1

#define SIMT_REFUSE(what) _Pragma(what)
#ifndef SIMT_PREPROCESS
#define asm SIMT_REFUSE("GCC error \"inline PTX (asm) runs on a GPU only: give the kernel a plain C++ path\"")
#define __asm__ asm
#endif

#define SIMT_INLINE static inline __attribute__((always_inline, unused))
#define SIMT_UNSEEN __attribute__((no_sanitize("thread", "alignment")))  // what it touches is no memory of the kernel
#define SIMT_METHOD inline __attribute__((always_inline))

namespace simt {
template <class T>
SIMT_INLINE uint64_t bits(const T& value) {
    static_assert(sizeof(T) <= 8 && sizeof(T) != 3, "a function of a warp and an atomic take a value of 4 or 8 bytes, a half or a bfloat16");
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
}  // namespace simt
