// The functions of the CUDA runtime API that a program on the CPU has (cpu/api defines them). A function that is not here
// is not declared for a program, so the compiler names it.
#pragma once

#include <cstddef>

#include "driver_types.h"

#define CUDARTAPI
#define CUDART_CB

// CUDA 13 has taken these fields out of its own structure, and programs print them.
struct simt_device_properties : cudaDeviceProp {
    int clockRate, deviceOverlap, kernelExecTimeoutEnabled, computeMode, memoryClockRate, singleToDoublePrecisionPerfRatio;
    int cooperativeMultiDeviceLaunch, maxTexture1DLinear;
};

using cudaStreamCallback_t = void (*)(cudaStream_t, cudaError_t, void*);

namespace simt {
struct Function {  // a kernel: a function, or its address as `void*`
    const void* address;
    template <class T>
    Function(T* address) : address((const void*)address) {}
};
}  // namespace simt

// A function and its asynchronous twin.
#define SIMT_WITH_STREAM(...) (__VA_ARGS__, cudaStream_t stream = nullptr)
#define SIMT_ASYNC(name, parameters) \
    cudaError_t name parameters;     \
    cudaError_t name##Async SIMT_WITH_STREAM parameters;

extern "C" {
SIMT_ASYNC(cudaMalloc, (void** pointer, size_t bytes))
cudaError_t cudaMallocPitch(void** pointer, size_t* pitch, size_t width, size_t height);
cudaError_t cudaMalloc3D(cudaPitchedPtr* pointer, cudaExtent extent);
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned flags = cudaMemAttachGlobal);
cudaError_t cudaMallocHost(void** pointer, size_t bytes);
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags);
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* pointer);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaHostGetFlags(unsigned* flags, void* host);
SIMT_ASYNC(cudaFree, (void* pointer))
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);

SIMT_ASYNC(cudaMemcpy, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind))
SIMT_ASYNC(cudaMemcpy2D, (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind kind))
SIMT_ASYNC(cudaMemcpy3D, (const cudaMemcpy3DParms* copy))
SIMT_ASYNC(cudaMemcpyPeer, (void* to, int to_device, const void* from, int from_device, size_t bytes))
SIMT_ASYNC(cudaMemset, (void* to, int value, size_t bytes))
SIMT_ASYNC(cudaMemset2D, (void* to, size_t pitch, int value, size_t width, size_t height))
cudaError_t cudaMemset3D(cudaPitchedPtr to, int value, cudaExtent extent);
// A variable of the program, by its address and its size.
cudaError_t simt_copy_symbol(
    void* symbol, size_t size, void* memory, size_t bytes, size_t offset, cudaMemcpyKind kind, bool to_symbol);
cudaError_t simt_symbol_address(void** address, void* symbol, size_t size);

cudaError_t cudaLaunchKernel(simt::Function kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes = 0,
    cudaStream_t stream = nullptr);
cudaError_t cudaLaunchCooperativeKernel(simt::Function kernel, dim3 grid, dim3 block, void** arguments,
    size_t shared_bytes = 0, cudaStream_t stream = nullptr);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, simt::Function kernel, void** arguments);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);
cudaError_t cudaFuncSetAttribute(simt::Function kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, simt::Function kernel);
cudaError_t cudaFuncSetCacheConfig(simt::Function kernel, cudaFuncCache config);
cudaError_t cudaFuncSetSharedMemConfig(simt::Function kernel, cudaSharedMemConfig config);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, simt::Function kernel, int threads, size_t shared_bytes);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, simt::Function kernel, int threads, size_t shared_bytes, unsigned flags);

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned flags);
cudaError_t cudaStreamAttachMemAsync(
    cudaStream_t stream, void* pointer, size_t bytes = 0, unsigned flags = cudaMemAttachSingle);
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);
cudaError_t cudaEventDestroy(cudaEvent_t event);

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaChooseDevice(int* device, const simt_device_properties* wanted);
cudaError_t cudaGetDeviceProperties(simt_device_properties* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();
cudaError_t cudaThreadSynchronize();
cudaError_t cudaThreadExit();
cudaError_t cudaSetDeviceFlags(unsigned flags);
cudaError_t cudaGetDeviceFlags(unsigned* flags);
cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache config);
cudaError_t cudaDeviceGetCacheConfig(cudaFuncCache* config);
cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig config);
cudaError_t cudaDeviceGetSharedMemConfig(cudaSharedMemConfig* config);
cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t value);
cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit limit);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceDisablePeerAccess(int peer);
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaProfilerStart();
cudaError_t cudaProfilerStop();

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
}
#undef SIMT_ASYNC
#undef SIMT_WITH_STREAM

namespace simt {
// What a launch needs to know of a kernel: `call` passes it the arguments.
struct KernelRow {
    const void* function;
    void (*call)(void** arguments);
    const char* name;
    unsigned num_parameters;
    const unsigned *sizes, *granules;  // of the parameters; of what a pointer points to, 0: no pointer
};
}  // namespace simt

extern "C" {
bool simt_on_host();
void simt_register_kernel(const simt::KernelRow* row);
void simt_register_granule(void* pointer, unsigned granule);  // of an allocation, from the type of its pointer
void simt_configure(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const char* file, int line);
void simt_launch_configured(const simt::KernelRow* row, void** arguments);  // as the last simt_configure asks for it
}
