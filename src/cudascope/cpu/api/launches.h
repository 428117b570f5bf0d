// Kernels and their launches. A launch is executed at once, whatever its stream: Python (kernels/program.py) calls the
// runtime for it.
#pragma once

#include <unordered_map>

#include "copies.h"

struct KernelState { const simt::KernelRow* row; u64 most_shared; };

static std::unordered_map<const void*, KernelState>& kernels() {
    static std::unordered_map<const void*, KernelState> known;  // kernels register before main
    return known;
}
constexpr u64 FREE_SHARED = 48 << 10, MOST_SHARED = SIMT_MAX_SHARED;

struct Configuration { dim3 grid, block; u64 shared_bytes; const char* file; int line; };
static thread_local std::vector<Configuration> configured;
static u32 num_launches = 0;

static cudaError_t launched(const simt::KernelRow* kernel, const Configuration& c, void** arguments, bool is_cooperative, u64 site) {
    if (sticky != cudaSuccess) return returned(sticky);
    ++num_launches;
    LaunchRow row{kernel, arguments, {c.grid.x, c.grid.y, c.grid.z}, {c.block.x, c.block.y, c.block.z}, c.shared_bytes,
        kernels()[kernel->function].most_shared, is_cooperative, num_launches, c.file, (u64)c.line, site,
        nullptr, 0, nullptr, 0};
    rows.clear();
    for (auto& [start, a] : allocations) rows.push_back(a);
    row.allocations = rows.data(), row.num_allocations = rows.size();
    row.marks = marks.data(), row.num_marks = marks.size();
    int error = cudaErrorInitializationError;  // a launch by the constructor of a global object
    if (callbacks.launch) {
        fflush(stdout);  // a launch that does not end leaves what was printed before it
        Open open;
        if (progress) progress[1]++;
        error = callbacks.launch(&row);
        if (progress) progress[0]++, progress[1]--;
        marks.clear();
    }
    bool is_fatal = error >= cudaErrorIllegalAddress && error <= cudaErrorLaunchFailure && error != cudaErrorLaunchOutOfResources;
    if (is_fatal) sticky = (cudaError_t)error;
    if (error) last_error = (cudaError_t)error;
    return is_fatal ? cudaSuccess : (cudaError_t)error;  // a launch itself returns before its kernel fails
}

static const simt::KernelRow* kernel_of(const void* function) {
    auto found = kernels().find(function);
    return found == kernels().end() ? nullptr : found->second.row;
}

static cudaError_t launched(const void* function, const Configuration& c, void** arguments, bool is_cooperative, u64 site) {
    const simt::KernelRow* kernel = kernel_of(function);
    if (!kernel) {
        find(site, "launch failed", (u64)function, "the first argument is no kernel");
        return returned(cudaErrorInvalidDeviceFunction);
    }
    return launched(kernel, c, arguments, is_cooperative, site);
}

extern "C" {
void simt_register_kernel(const simt::KernelRow* row) { kernels()[row->function] = {row, 0}; }

void simt_configure(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, const char* file, int line) {
    configured.push_back({grid, block, shared_bytes, file, line});
}
void simt_launch_configured(const simt::KernelRow* row, void** arguments) {
    Call call;
    if (configured.empty()) {
        find(CALLER, "launch failed", 0, "a kernel is called without <<<…>>>");
        returned(cudaErrorMissingConfiguration);
        return;
    }
    Configuration c = configured.back();
    configured.pop_back();
    launched(row, c, arguments, false, CALLER);
}
API(cudaLaunchKernel, (simt::Function kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes, cudaStream_t),
    launched(kernel.address, {grid, block, shared_bytes, nullptr, 0}, arguments, false, CALLER))
API(cudaLaunchCooperativeKernel,
    (simt::Function kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes, cudaStream_t),
    launched(kernel.address, {grid, block, shared_bytes, nullptr, 0}, arguments, true, CALLER))
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, simt::Function kernel, void** arguments) {
    Call call;
    if (!config) return returned(cudaErrorInvalidValue);
    bool is_cooperative = false;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& each = config->attrs[i];
        if (each.id == cudaLaunchAttributeCooperative) is_cooperative |= each.val.cooperative;
        if (each.id == cudaLaunchAttributeClusterDimension) return returned(cudaErrorNotSupported);
    }
    Configuration c{config->gridDim, config->blockDim, config->dynamicSmemBytes, nullptr, 0};
    return launched(kernel.address, c, arguments, is_cooperative, CALLER);
}
cudaError_t cudaFuncSetAttribute(simt::Function function, cudaFuncAttribute attribute, int value) {
    Call call;
    if (!kernel_of(function.address)) return returned(cudaErrorInvalidDeviceFunction);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return returned(cudaSuccess);
    if (value < 0 || (u64)value > MOST_SHARED) return returned(cudaErrorInvalidValue);
    kernels()[function.address].most_shared = (u64)value;
    return returned(cudaSuccess);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, simt::Function function) {
    Call call;
    const simt::KernelRow* kernel = kernel_of(function.address);
    if (!attributes || !kernel) return returned(cudaErrorInvalidDeviceFunction);
    memset((void*)attributes, 0, sizeof(*attributes));
    int shared_bytes = 0, most_threads = 1024;
    callbacks.kernel_attributes(kernel, &shared_bytes, &most_threads);
    attributes->sharedSizeBytes = (size_t)shared_bytes, attributes->maxThreadsPerBlock = most_threads;
    attributes->numRegs = 32, attributes->ptxVersion = attributes->binaryVersion = 90;
    u64 most = kernels()[function.address].most_shared;
    attributes->maxDynamicSharedSizeBytes = (int)(most ? most : FREE_SHARED - attributes->sharedSizeBytes);
    return returned(cudaSuccess);
}
cudaError_t cudaFuncSetCacheConfig(simt::Function, cudaFuncCache) { return returned(cudaSuccess); }
cudaError_t cudaFuncSetSharedMemConfig(simt::Function, cudaSharedMemConfig) { return returned(cudaSuccess); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, simt::Function function, int threads, size_t shared_bytes) {
    Call call;
    cudaFuncAttributes attributes;
    if (!blocks || threads < 1) return returned(cudaErrorInvalidValue);
    if (cudaError_t error = cudaFuncGetAttributes(&attributes, function)) return error;
    u64 warps = ((u64)threads + 31) / 32, shared = attributes.sharedSizeBytes + shared_bytes;
    u64 fits = std::min<u64>(32, 64 / warps);  // an H100's SM: 32 thread blocks, 64 warps, 228 KB of shared memory
    fits = std::min<u64>(fits, (228 << 10) / (shared + 1024));
    *blocks = threads > attributes.maxThreadsPerBlock || shared > MOST_SHARED ? 0 : (int)fits;
    return returned(cudaSuccess);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, simt::Function function, int threads, size_t shared_bytes, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared_bytes);
}
}
