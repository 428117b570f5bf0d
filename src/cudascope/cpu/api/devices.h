// The one device that a program sees. Its figures are an H100's, because the limits of a launch are.
#pragma once

#include "streams.h"

constexpr int CLOCK_KHZ = 1980000, MEMORY_CLOCK_KHZ = 2619000, VERSION = 12080;

static std::map<cudaDeviceAttr, int> attributes_of_device() {
    return {
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrTotalConstantMemory, 64 << 10}, {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxPitch, 2147483647},
        {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrClockRate, CLOCK_KHZ}, {cudaDevAttrGpuOverlap, 1},
        {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrKernelExecTimeout, 0}, {cudaDevAttrIntegrated, 0},
        {cudaDevAttrCanMapHostMemory, 1}, {cudaDevAttrComputeMode, 0}, {cudaDevAttrConcurrentKernels, 1},
        {cudaDevAttrEccEnabled, 1}, {cudaDevAttrMemoryClockRate, MEMORY_CLOCK_KHZ},
        {cudaDevAttrGlobalMemoryBusWidth, 5120}, {cudaDevAttrL2CacheSize, 50 << 20},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrAsyncEngineCount, 3},
        {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrStreamPrioritiesSupported, 1}, {cudaDevAttrGlobalL1CacheSupported, 1},
        {cudaDevAttrLocalL1CacheSupported, 1}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrManagedMemory, 1},
        {cudaDevAttrIsMultiGpuBoard, 0}, {cudaDevAttrHostNativeAtomicSupported, 0},
        {cudaDevAttrSingleToDoublePrecisionPerfRatio, 2}, {cudaDevAttrPageableMemoryAccess, 0},
        {cudaDevAttrConcurrentManagedAccess, 1}, {cudaDevAttrComputePreemptionSupported, 1},
        {cudaDevAttrCooperativeLaunch, 1}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)MOST_SHARED},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32}, {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
        {cudaDevAttrMemoryPoolsSupported, 1}, {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
    };
}
static cudaError_t of_device(int device) { return returned(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

extern "C" {
API(cudaGetDeviceCount, (int* count), stored(count, 1))
API(cudaGetDevice, (int* device), stored(device, 0))
API(cudaSetDevice, (int device), of_device(device))
cudaError_t cudaChooseDevice(int* device, const simt_device_properties*) { return cudaGetDevice(device); }
cudaError_t cudaGetDeviceProperties(simt_device_properties* p, int device) {
    Call call;
    if (!p || device != 0) return returned(p ? cudaErrorInvalidDevice : cudaErrorInvalidValue);
    memset((void*)p, 0, sizeof(*p));
    snprintf(p->name, sizeof(p->name), "cudascope on a CPU, with the limits of an H100");
    p->totalGlobalMem = TOTAL_BYTES, p->sharedMemPerBlock = 48 << 10, p->regsPerBlock = 65536, p->warpSize = 32;
    p->memPitch = 2147483647, p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 64 << 10, p->major = 9, p->minor = 0, p->textureAlignment = 512, p->texturePitchAlignment = 32;
    p->multiProcessorCount = 132, p->canMapHostMemory = 1, p->concurrentKernels = 1, p->ECCEnabled = 1;
    p->asyncEngineCount = 3, p->unifiedAddressing = 1, p->memoryBusWidth = 5120, p->l2CacheSize = 50 << 20;
    p->maxThreadsPerMultiProcessor = 2048, p->streamPrioritiesSupported = 1, p->globalL1CacheSupported = 1;
    p->localL1CacheSupported = 1, p->sharedMemPerMultiprocessor = 228 << 10, p->regsPerMultiprocessor = 65536;
    p->managedMemory = 1, p->concurrentManagedAccess = 1, p->computePreemptionSupported = 1, p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = MOST_SHARED, p->maxBlocksPerMultiProcessor = 32, p->reservedSharedMemPerBlock = 1024;
    p->memoryPoolsSupported = 1, p->canUseHostPointerForRegisteredMem = 1;
    p->clockRate = CLOCK_KHZ, p->memoryClockRate = MEMORY_CLOCK_KHZ, p->deviceOverlap = 1;
    p->singleToDoublePrecisionPerfRatio = 2;
    return returned(cudaSuccess);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    Call call;
    static const auto known = attributes_of_device();
    if (!value) return returned(cudaErrorInvalidValue);
    auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return of_device(device);
}
API(cudaDeviceSynchronize, (), returned(cudaSuccess))
cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
// It frees all memory of the device, as the end of the program does.
cudaError_t cudaDeviceReset() {
    Call call;
    for (auto& [start, a] : allocations)
        if (!a.freed && a.kind != REGISTERED) a.freed = CALLER, protect(a, PROT_NONE);
    device_bytes = 0;
    sticky = last_error = cudaSuccess;
    return cudaSuccess;
}
cudaError_t cudaThreadExit() { return cudaDeviceReset(); }
cudaError_t cudaSetDeviceFlags(unsigned) { return returned(cudaSuccess); }
API(cudaGetDeviceFlags, (unsigned* flags), stored(flags, (unsigned)cudaDeviceMapHost))
cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return returned(cudaSuccess); }
API(cudaDeviceGetCacheConfig, (cudaFuncCache* config), stored(config, cudaFuncCachePreferNone))
cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) { return returned(cudaSuccess); }
API(cudaDeviceGetSharedMemConfig, (cudaSharedMemConfig* config), stored(config, cudaSharedMemBankSizeFourByte))
static std::map<cudaLimit, size_t> limits{{cudaLimitStackSize, 1024}, {cudaLimitPrintfFifoSize, 1 << 20},
    {cudaLimitMallocHeapSize, 8 << 20}};
cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t value) {
    Call call;
    limits[limit] = value;
    return returned(cudaSuccess);
}
cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit limit) {
    Call call;
    if (value && !limits.count(limit)) return returned(cudaErrorUnsupportedLimit);
    return stored(value, limits[limit]);
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int) {
    Call call;
    if (can) *can = 0;
    return of_device(device);
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return returned(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceDisablePeerAccess(int) { return returned(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    Call call;
    if (id && length > 0) snprintf(id, (size_t)length, "0000:00:00.0");
    return of_device(device);
}
API(cudaRuntimeGetVersion, (int* version), stored(version, VERSION))
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaProfilerStart() { return returned(cudaSuccess); }
cudaError_t cudaProfilerStop() { return returned(cudaSuccess); }
}
