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
template <class F>
SIMT_INLINE const void* address(F* kernel) { return (const void*)kernel; }
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
SIMT_INLINE cudaError_t cudaMallocManaged(void** p, size_t bytes) { return cudaMallocManaged(p, bytes, 1u); }

#define SIMT_SYMBOL (void*)__builtin_addressof(symbol), sizeof(T)
SIMT_API cudaMemcpyToSymbol(const T& symbol, const void* from, size_t bytes, size_t offset = 0,
    cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return simt_copy_symbol(SIMT_SYMBOL, (void*)from, bytes, offset, kind, true, false);
}
SIMT_API cudaMemcpyToSymbolAsync(const T& symbol, const void* from, size_t bytes, size_t offset = 0,
    cudaMemcpyKind kind = cudaMemcpyHostToDevice, cudaStream_t = nullptr) {
    return simt_copy_symbol(SIMT_SYMBOL, (void*)from, bytes, offset, kind, true, true);
}
SIMT_API cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
    cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return simt_copy_symbol(SIMT_SYMBOL, to, bytes, offset, kind, false, false);
}
SIMT_API cudaMemcpyFromSymbolAsync(void* to, const T& symbol, size_t bytes, size_t offset = 0,
    cudaMemcpyKind kind = cudaMemcpyDeviceToHost, cudaStream_t = nullptr) {
    return simt_copy_symbol(SIMT_SYMBOL, to, bytes, offset, kind, false, true);
}
SIMT_API cudaGetSymbolAddress(void** address, const T& symbol) { return simt_symbol_address(address, SIMT_SYMBOL); }
template <class P, class T>
SIMT_INLINE cudaError_t cudaGetSymbolAddress(P** address, const T& symbol) {
    return simt_symbol_address((void**)address, SIMT_SYMBOL);
}
SIMT_API cudaGetSymbolSize(size_t* bytes, const T&) { return *bytes = sizeof(T), cudaSuccess; }

SIMT_INLINE cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
SIMT_INLINE cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}
SIMT_INLINE cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
    size_t height, cudaMemcpyKind kind) {
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
}
SIMT_INLINE cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* copy) { return cudaMemcpy3DAsync(copy, nullptr); }
SIMT_INLINE cudaError_t cudaEventRecord(cudaEvent_t event) { return cudaEventRecord(event, nullptr); }
SIMT_INLINE cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags) {
    return cudaEventCreateWithFlags(event, flags);
}
SIMT_INLINE cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event) {
    return cudaStreamWaitEvent(stream, event, 0);
}
SIMT_INLINE cudaError_t cudaStreamAttachMemAsync(cudaStream_t stream, void* pointer) {
    return cudaStreamAttachMemAsync(stream, pointer, 0, cudaMemAttachSingle);
}
template <class Place>
SIMT_INLINE cudaError_t cudaMemPrefetchAsync(const void*, size_t, Place, cudaStream_t = nullptr) { return cudaSuccess; }
template <class Place>
SIMT_INLINE cudaError_t cudaMemPrefetchAsync(const void*, size_t, Place, unsigned, cudaStream_t) { return cudaSuccess; }
template <class Place>
SIMT_INLINE cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, Place) { return cudaSuccess; }

// A kernel is a function or its address as `void*`.
template <class... P>
SIMT_INLINE cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments,
    size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
    return cudaLaunchKernel((const void*)kernel, grid, block, arguments, shared_bytes, stream);
}
template <class... P>
SIMT_INLINE cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments,
    size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
    return cudaLaunchCooperativeKernel((const void*)kernel, grid, block, arguments, shared_bytes, stream);
}
SIMT_INLINE cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments) {
    return cudaLaunchKernel(kernel, grid, block, arguments, 0, nullptr);
}
SIMT_INLINE cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** arguments) {
    return cudaLaunchCooperativeKernel(kernel, grid, block, arguments, 0, nullptr);
}
template <class... P, class... A>
SIMT_INLINE cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... given) {
    return [&](P... converted) {
        void* arguments[] = {(void*)__builtin_addressof(converted)..., nullptr};
        return cudaLaunchKernelExC(config, (const void*)kernel, arguments);
    }(static_cast<A&&>(given)...);
}
template <class... P>
SIMT_INLINE cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void*)kernel, attribute, value);
}
template <class... P>
SIMT_INLINE cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(P...)) {
    return cudaFuncGetAttributes(attributes, (const void*)kernel);
}
template <class... P>
SIMT_INLINE cudaError_t cudaFuncSetCacheConfig(void (*kernel)(P...), cudaFuncCache config) {
    return cudaFuncSetCacheConfig((const void*)kernel, config);
}
template <class... P>
SIMT_INLINE cudaError_t cudaFuncSetSharedMemConfig(void (*kernel)(P...), cudaSharedMemConfig config) {
    return cudaFuncSetSharedMemConfig((const void*)kernel, config);
}
template <class... P>
SIMT_INLINE cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, void (*kernel)(P...), int threads, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void*)kernel, threads, shared_bytes);
}
// Of the block sizes whose thread blocks fill an SM best, the largest.
template <class F, class Shared>
SIMT_INLINE cudaError_t cudaOccupancyMaxPotentialBlockSizeVariableSMem(
    int* grid, int* block, F kernel, Shared shared_bytes_of, int limit = 0) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, (const void*)kernel);
    int best = 0, sms = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    int most = limit > 0 && limit < attributes.maxThreadsPerBlock ? limit : attributes.maxThreadsPerBlock;
    *grid = *block = 0;
    for (int threads = (most + 31) / 32 * 32; error == cudaSuccess && threads > 0; threads -= 32) {
        int size = threads < most ? threads : most, blocks = 0;
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (const void*)kernel, size, shared_bytes_of(size));
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
