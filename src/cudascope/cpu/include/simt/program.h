// What every file of a program gets besides simt.h: the CUDA runtime API, and how `kernel<<<grid, block>>>(…)` is
// launched. translate/program.py writes a call of simt::configure for `<<<…>>>`, and the first lines of each kernel, which
// hand the launch over where the kernel is called by the host.
#pragma once

#include "api.h"
#include "language.h"

#define cudaDeviceProp simt_device_properties
#define __CUDA_RUNTIME_H__  // headers of programs ask whether there is a CUDA runtime API

namespace simt {
template <class P>
constexpr unsigned granule_of() {
    using T = std::remove_cv_t<std::remove_pointer_t<P>>;
    if constexpr (!std::is_pointer_v<P>) return 0;
    else if constexpr (std::is_void_v<T> || std::is_function_v<T>) return 0;
    else if constexpr (std::is_scalar_v<T>) return sizeof(T);
    else return Known<T>::bytes ? Known<T>::alignment : 1;
}

// The type of a parameter in the type of its function: without const and without __restrict__, which g++ keeps there.
template <class P>
struct Unrestricted { using type = P; };
template <class T>
struct Unrestricted<T* __restrict__> { using type = T*; };
template <class P>
using Passed = typename Unrestricted<std::remove_cv_t<P>>::type;

template <auto kernel>
struct Launchable;
template <class... P, void (*kernel)(P...)>
struct Launchable<kernel> {
    static constexpr unsigned all_sizes[] = {sizeof(P)..., 0}, all_granules[] = {granule_of<P>()..., 0};
    static void start(void** arguments) { simt::call(kernel, arguments); }
    struct Registered : KernelRow {
        Registered() : KernelRow{(const void*)kernel, start, __PRETTY_FUNCTION__, sizeof...(P), all_sizes, all_granules} {
            simt_register_kernel(this);
        }
    };
    static inline const Registered row;
};
template <auto kernel>
SIMT_UNSEEN void launch(void** arguments) {
    simt_launch_configured(&Launchable<kernel>::row, arguments);
}

SIMT_INLINE void configure(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr,
    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    simt_configure(grid, block, shared_bytes, stream, file, line);
}
SIMT_INLINE void configure(dim3 grid, dim3 block, size_t shared_bytes, int stream,
    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    simt_configure(grid, block, shared_bytes, (cudaStream_t)(uintptr_t)stream, file, line);
}

template <class T>
SIMT_INLINE cudaError_t allocated(cudaError_t error, T** pointer) {
    if (error == cudaSuccess && pointer) simt_register_granule(*pointer, granule_of<T*>());
    return error;
}
}  // namespace simt

// What cuda_runtime.h has as templates and with default arguments.
#define SIMT_API template <class T> SIMT_INLINE cudaError_t
SIMT_API cudaMalloc(T** p, size_t bytes) { return simt::allocated(cudaMalloc((void**)p, bytes), p); }
SIMT_API cudaMallocAsync(T** p, size_t bytes, cudaStream_t s) {
    return simt::allocated(cudaMallocAsync((void**)p, bytes, s), p);
}
SIMT_API cudaMallocPitch(T** p, size_t* pitch, size_t width, size_t height) {
    return simt::allocated(cudaMallocPitch((void**)p, pitch, width, height), p);
}
SIMT_API cudaMallocManaged(T** p, size_t bytes, unsigned flags = cudaMemAttachGlobal) {
    return simt::allocated(cudaMallocManaged((void**)p, bytes, flags), p);
}
SIMT_API cudaMallocHost(T** p, size_t bytes, unsigned = 0) {
    return simt::allocated(cudaMallocHost((void**)p, bytes), p);
}
SIMT_API cudaHostAlloc(T** p, size_t bytes, unsigned flags) {
    return simt::allocated(cudaHostAlloc((void**)p, bytes, flags), p);
}
SIMT_API cudaHostGetDevicePointer(T** device, void* host, unsigned flags) {
    return cudaHostGetDevicePointer((void**)device, host, flags);
}

#define SIMT_SYMBOL (void*)__builtin_addressof(symbol), sizeof(T)
#define SIMT_COPY_SYMBOL(suffix, ...)                                                                               \
    SIMT_API cudaMemcpyToSymbol##suffix(const T& symbol, const void* from, size_t bytes, size_t offset = 0,         \
        cudaMemcpyKind kind = cudaMemcpyHostToDevice __VA_ARGS__) {                                                 \
        return simt_copy_symbol(SIMT_SYMBOL, (void*)from, bytes, offset, kind, true);                               \
    }                                                                                                               \
    SIMT_API cudaMemcpyFromSymbol##suffix(void* to, const T& symbol, size_t bytes, size_t offset = 0,               \
        cudaMemcpyKind kind = cudaMemcpyDeviceToHost __VA_ARGS__) {                                                 \
        return simt_copy_symbol(SIMT_SYMBOL, to, bytes, offset, kind, false);                                       \
    }
SIMT_COPY_SYMBOL()
SIMT_COPY_SYMBOL(Async, , cudaStream_t = nullptr)
#undef SIMT_COPY_SYMBOL
SIMT_API cudaGetSymbolAddress(void** address, const T& symbol) { return simt_symbol_address(address, SIMT_SYMBOL); }
template <class P, class T>
SIMT_INLINE cudaError_t cudaGetSymbolAddress(P** address, const T& symbol) {
    return simt_symbol_address((void**)address, SIMT_SYMBOL);
}
SIMT_API cudaGetSymbolSize(size_t* bytes, const T&) { return *bytes = sizeof(T), cudaSuccess; }

SIMT_INLINE cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags) {
    return cudaEventCreateWithFlags(event, flags);
}
template <class Place>
SIMT_INLINE cudaError_t cudaMemPrefetchAsync(const void*, size_t, Place, cudaStream_t = nullptr) { return cudaSuccess; }
template <class Place>
SIMT_INLINE cudaError_t cudaMemPrefetchAsync(const void*, size_t, Place, unsigned, cudaStream_t) { return cudaSuccess; }
template <class Place>
SIMT_INLINE cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, Place) { return cudaSuccess; }

template <class... P, class... A>
SIMT_INLINE cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... given) {
    return [&](P... converted) {
        void* arguments[] = {(void*)__builtin_addressof(converted)..., nullptr};
        return cudaLaunchKernelExC(config, kernel, arguments);
    }(static_cast<A&&>(given)...);
}
// Of the block sizes whose thread blocks fill an SM best, the largest.
template <class F, class Shared>
SIMT_INLINE cudaError_t cudaOccupancyMaxPotentialBlockSizeVariableSMem(
    int* grid, int* block, F kernel, Shared shared_bytes_of, int limit = 0) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    int best = 0, sms = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    int most = limit > 0 && limit < attributes.maxThreadsPerBlock ? limit : attributes.maxThreadsPerBlock;
    *grid = *block = 0;
    for (int threads = (most + 31) / 32 * 32; error == cudaSuccess && threads > 0; threads -= 32) {
        int size = threads < most ? threads : most, blocks = 0;
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, size, shared_bytes_of(size));
        if (blocks * size > best) best = blocks * size, *block = size, *grid = blocks * sms;
    }
    return error;
}
template <class F>
SIMT_INLINE cudaError_t cudaOccupancyMaxPotentialBlockSize(
    int* grid, int* block, F kernel, size_t shared_bytes = 0, int limit = 0) {
    return cudaOccupancyMaxPotentialBlockSizeVariableSMem(
        grid, block, kernel, [=](int) { return shared_bytes; }, limit);
}
#undef SIMT_API
#undef SIMT_SYMBOL

SIMT_INLINE cudaExtent make_cudaExtent(size_t width, size_t height, size_t depth) { return {width, height, depth}; }
SIMT_INLINE cudaPos make_cudaPos(size_t x, size_t y, size_t z) { return {x, y, z}; }
SIMT_INLINE cudaPitchedPtr make_cudaPitchedPtr(void* pointer, size_t pitch, size_t width, size_t height) {
    return {pointer, pitch, width, height};
}
