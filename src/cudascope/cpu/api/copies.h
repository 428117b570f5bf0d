// cudaMemcpy and its like. Each copy is made at once, whatever its stream.
#pragma once

#include "memory.h"

struct Variable { const char* name; void* address; u64 bytes; };
static std::vector<Variable> variables;  // __device__, __constant__ and __managed__

// A piece of memory that a copy reads or writes, `rows` of `width` bytes that are `pitch` apart.
struct Side {
    const char* p;
    u64 pitch, width, rows;
    u64 bytes() const { return rows && width ? (rows - 1) * pitch + width : 0; }
};
enum Where { HOST_ONLY, DEVICE_ONLY, BOTH };

static bool is_variable(const void* p) {
    for (const Variable& each : variables)
        if ((u64)p >= (u64)each.address && (u64)p < (u64)each.address + each.bytes) return true;
    return false;
}
static Where where_is(const void* p) {
    if (is_variable(p)) return BOTH;
    AllocationRow* a = near(p);
    return !a ? HOST_ONLY : a->kind == DEVICE ? DEVICE_ONLY : BOTH;
}

// What a copy or a fill may do to this memory; an error was found otherwise.
static bool is_allowed(const Side& side, bool on_device, const char* function, const char* what, u64 site) {
    AllocationRow* a = near(side.p);
    if (!side.p) return find(site, "invalid copy", 0, "%s %s a null pointer", function, what), false;
    Where where = where_is(side.p);
    if (on_device && where == HOST_ONLY)
        return find(site, "invalid copy", (u64)side.p, "%s %s memory of the host as if it were the device's", function, what),
               false;
    if (!on_device && where == DEVICE_ONLY)
        return find(site, "invalid copy", (u64)side.p, "%s %s memory of the device as if it were the host's", function, what),
               false;
    if (!a) return true;
    if (a->freed) return find(site, "use after free", (u64)side.p, "%s %s memory that was freed", function, what), false;
    if (is_inside(a, side.p, side.bytes())) return true;
    find(site, "invalid copy", (u64)side.p, "%s %s %llu bytes from byte %lld of an allocation of %llu bytes", function, what,
        (unsigned long long)side.bytes(), (long long)((u64)side.p - a->start), (unsigned long long)a->bytes);
    return false;
}

static cudaError_t copied(Side to, Side from, cudaMemcpyKind kind, const char* function, u64 site) {
    if (sticky != cudaSuccess) return returned(sticky);
    if (!to.bytes()) return returned(cudaSuccess);
    if ((unsigned)kind > cudaMemcpyDefault) return returned(cudaErrorInvalidMemcpyDirection);
    if (to.width > to.pitch || from.width > from.pitch) return returned(cudaErrorInvalidPitchValue);
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault)
        to_device = where_is(to.p) != HOST_ONLY, from_device = where_is(from.p) != HOST_ONLY;
    if (!is_allowed(to, to_device, function, "writes", site) || !is_allowed(from, from_device, function, "reads", site))
        return returned(cudaErrorInvalidValue);
    Open open;
    for (u64 row = 0; row < to.rows; ++row)
        memmove((void*)(to.p + row * to.pitch), from.p + row * from.pitch, to.width);
    for (u64 row = 0; row < to.rows && near(to.p); ++row) mark(to.p + row * to.pitch, to.width);
    return returned(cudaSuccess);
}

static cudaError_t filled(Side to, int value, const char* function, u64 site) {
    if (sticky != cudaSuccess) return returned(sticky);
    if (!to.bytes()) return returned(cudaSuccess);
    if (!is_allowed(to, true, function, "fills", site)) return returned(cudaErrorInvalidValue);
    Open open;
    for (u64 row = 0; row < to.rows; ++row) {
        memset((void*)(to.p + row * to.pitch), value, to.width);
        mark(to.p + row * to.pitch, to.width);
    }
    return returned(cudaSuccess);
}

static cudaError_t copied_3d(const cudaMemcpy3DParms* copy, const char* function, u64 site) {
    if (!copy || copy->srcArray || copy->dstArray) return returned(cudaErrorNotSupported);
    const cudaPitchedPtr &to = copy->dstPtr, &from = copy->srcPtr;
    auto start = [](const cudaPitchedPtr& p, const cudaPos& at) {
        return (const char*)p.ptr + (at.z * p.ysize + at.y) * p.pitch + at.x;
    };
    const cudaExtent& size = copy->extent;
    for (u64 z = 0; z < size.depth; ++z) {
        Side target{start(to, copy->dstPos) + z * to.ysize * to.pitch, to.pitch, size.width, size.height};
        Side source{start(from, copy->srcPos) + z * from.ysize * from.pitch, from.pitch, size.width, size.height};
        if (cudaError_t error = copied(target, source, copy->kind, function, site)) return error;
    }
    return returned(cudaSuccess);
}

static Side line(const void* p, u64 bytes) { return {(const char*)p, bytes, bytes, 1}; }

extern "C" {
API_ASYNC(cudaMemcpy, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind),
    copied(line(to, bytes), line(from, bytes), kind, __func__, CALLER))
API_ASYNC(cudaMemcpy2D, (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind kind),
    copied({(char*)to, to_pitch, width, height}, {(char*)from, from_pitch, width, height}, kind, __func__, CALLER))
API_ASYNC(cudaMemcpy3D, (const cudaMemcpy3DParms* copy), copied_3d(copy, __func__, CALLER))
API_ASYNC(cudaMemcpyPeer, (void* to, int, const void* from, int, size_t bytes),
    copied(line(to, bytes), line(from, bytes), cudaMemcpyDeviceToDevice, __func__, CALLER))
API_ASYNC(cudaMemset, (void* to, int value, size_t bytes), filled(line(to, bytes), value, __func__, CALLER))
API_ASYNC(cudaMemset2D, (void* to, size_t pitch, int value, size_t width, size_t height),
    filled({(char*)to, pitch, width, height}, value, __func__, CALLER))
cudaError_t cudaMemset3D(cudaPitchedPtr to, int value, cudaExtent extent) {
    Call call;
    for (u64 z = 0; z < extent.depth; ++z) {
        Side slice{(char*)to.ptr + z * to.ysize * to.pitch, to.pitch, extent.width, extent.height};
        if (cudaError_t error = filled(slice, value, __func__, CALLER)) return error;
    }
    return returned(cudaSuccess);
}
cudaError_t simt_copy_symbol(void* symbol, size_t size, void* memory, size_t bytes, size_t offset, cudaMemcpyKind kind,
    bool to_symbol) {
    Call call;
    const char* function = to_symbol ? "cudaMemcpyToSymbol" : "cudaMemcpyFromSymbol";
    if (!variables.empty() && !is_variable(symbol)) {
        find(CALLER, "invalid copy", (u64)symbol, "%s of what is no variable of the device", function);
        return returned(cudaErrorInvalidSymbol);
    }
    if (bytes > size || offset > size - bytes) {
        find(CALLER, "invalid copy", (u64)symbol, "%s of %zu bytes from byte %zu of a variable of %zu bytes", function, bytes,
            offset, size);
        return returned(cudaErrorInvalidValue);
    }
    Side variable = line((char*)symbol + offset, bytes), other = line(memory, bytes);
    return copied(to_symbol ? variable : other, to_symbol ? other : variable, kind, function, CALLER);
}
cudaError_t simt_symbol_address(void** address, void* symbol, size_t) {
    Call call;
    if (!variables.empty() && !is_variable(symbol)) return returned(cudaErrorInvalidSymbol);
    return stored(address, symbol);
}
}
