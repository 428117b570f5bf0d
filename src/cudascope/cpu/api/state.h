// What a program and its process share: the last error, what was found, and the functions of Python that a launch calls.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "../include/simt/api.h"

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

// cpu/abi.py reads these structures, so the declarations stay plain.
struct AllocationRow {
    u64 start, bytes, site, freed;  // site: of the call that made it; freed: of the call that freed it, 0: it is live
    u32 kind, granule, number, is_pending;
};
struct Mark { u64 start, bytes; };  // memory that the host has filled
struct LaunchRow {
    const simt::KernelRow* kernel;
    void** arguments;
    u32 grid[3], block[3];
    u64 shared_bytes, most_shared;  // dynamic shared memory, and how much the program has asked for
    u32 is_cooperative, number;
    const char* file;  // of `<<<`, null: `site` tells
    u64 line, site;
    const AllocationRow* allocations;
    u64 num_allocations;
    const Mark* marks;
    u64 num_marks;
};
struct Callbacks {
    int (*launch)(const LaunchRow*);  // returns a cudaError_t
    void (*find)(const char* rule, const char* text, u64 site, u64 address);
    int (*kernel_attributes)(const simt::KernelRow*, int* shared_bytes, int* most_threads);
};

static Callbacks callbacks{};
static volatile u64* progress = nullptr;  // two numbers that the process which waits for this one reads
static std::recursive_mutex api_lock;     // a host function of a stream calls the API again

#define CALLER ((u64)__builtin_return_address(0))

static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t sticky = cudaSuccess;  // a kernel has failed: nothing works any more, as on a GPU

static cudaError_t returned(cudaError_t error) {
    if (error == cudaSuccess) error = sticky;
    if (error != cudaSuccess) last_error = error;
    return error;
}

template <class... T>
static void find(u64 site, const char* rule, u64 address, const char* format, T... values) {
    char text[512];
    snprintf(text, sizeof(text), format, values...);
    if (callbacks.find) callbacks.find(rule, text, site, address);
}

// Every function of the API begins with one.
struct Call {
    std::lock_guard<std::recursive_mutex> guard{api_lock};
    Call() {
        if (progress) progress[0]++;
    }
};
// A function of the API that returns one expression.
#define API(name, parameters, ...)                                                                       \
    cudaError_t name parameters {                                                                        \
        Call call;                                                                                       \
        return __VA_ARGS__;                                                                              \
    }
// With its asynchronous twin, which does the same: all is done when a call returns.
#define WITH_STREAM(...) (__VA_ARGS__, cudaStream_t)
#define API_ASYNC(name, parameters, ...) \
    API(name, parameters, __VA_ARGS__) API(name##Async, WITH_STREAM parameters, __VA_ARGS__)

// Store what the caller asks for.
template <class T>
static cudaError_t stored(T* place, T value) {
    if (place) *place = value;
    return returned(place ? cudaSuccess : cudaErrorInvalidValue);
}

struct ErrorText { int code; const char *name, *text; };
#define ERROR(name, text) {name, #name, text}
static const ErrorText ERROR_TEXTS[] = {
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInitializationError, "initialization error"),
    ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    ERROR(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    ERROR(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    ERROR(cudaErrorAssert, "device-side assert triggered"),
    ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorUnknown, "unknown error"),
};
#undef ERROR
static const ErrorText* text_of(int code) {
    for (const ErrorText& each : ERROR_TEXTS)
        if (each.code == code) return &each;
    return nullptr;
}

extern "C" {
cudaError_t cudaGetLastError() {
    Call call;
    cudaError_t error = last_error;
    last_error = sticky;
    return error;
}
API(cudaPeekAtLastError, (), last_error)
const char* cudaGetErrorName(cudaError_t error) {
    const ErrorText* found = text_of(error);
    return found ? found->name : "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
    const ErrorText* found = text_of(error);
    return found ? found->text : "unrecognized error code";
}
}
