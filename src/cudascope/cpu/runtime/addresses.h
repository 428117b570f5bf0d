// The owner of an address: shared memory, the stack of a thread, a tensor, a variable, or an allocation of the kernel.
#pragma once

#include <dlfcn.h>

#include "block.h"

struct Place { Space space; int32_t region; int64_t offset; };

static bool is_shared(const Block& b, const void* p) {
    return p >= b.shared.arena && p < b.shared.arena + b.shared.arena_bytes;
}
// Registers and local memory, of any of its threads.
static bool is_local(const Block& b, const void* p) {
    return p >= b.stacks.start && p < b.stacks.start + STACK * b.stacks.threads;
}

// Part of threadIdx, blockIdx, blockDim or gridDim: a kernel may pass a reference to them.
static bool is_index(const char* p) {
    for (const Dim* each : {&threadIdx, &blockIdx, &blockDim, &gridDim})
        if (p >= (const char*)each && p < (const char*)(each + 1)) return true;
    return false;
}

// __constant__ and __device__ variables are in the compiled file.
static bool in_module(Job& job, const char* p) {
    if ((u64)p >> 12 == job.module_page) return true;
    Dl_info info;
    if (!dladdr(p, &info)) return false;
    job.module_page = (u64)p >> 12;
    return true;
}

// The constant or variable of the compiled file that an address is in, or beside; -1: none. translate/assembly.py puts GAP
// unused bytes before and after each of them, so what is between two gaps (a string, for example) has no name.
constexpr int64_t GAP = 256;
static int32_t object_at(const Launch& launch, const char* p) {
    const SharedArray *first = launch.objects, *last = first + launch.num_objects;
    const SharedArray* after = std::upper_bound(first, last, (int64_t)p, [](int64_t at, const SharedArray& o) { return at < o.offset; });
    int64_t to_next = after < last ? after->offset - (int64_t)p : GAP;
    int64_t past_end = after > first ? (int64_t)p - (after[-1].offset + (int64_t)after[-1].bytes) : GAP;
    if (past_end < GAP) return (int32_t)(after - first) - 1;
    return to_next < GAP ? (int32_t)(after - first) : -1;
}

static bool is_allocated(const Job& job, const char* p, u32 bytes) {
    auto after = job.heap.upper_bound((u64)p);
    if (after == job.heap.begin()) return false;
    auto [start, size] = *--after;
    return (u64)p + bytes <= start + size;
}

static Place place_of(const Job& job, const Block& b, const char* p) {
    if (is_shared(b, p)) {
        int64_t offset = p - b.shared.start;
        for (u32 i = 0; i < job.launch.num_shared; ++i) {
            const SharedArray& a = job.launch.shared[i];
            if (offset >= a.offset && offset < a.offset + (int64_t)a.bytes) return {SHARED, (int32_t)i, offset - a.offset};
        }
        return {SHARED, -1, offset};
    }
    for (u32 i = 0; i < job.tensors.size(); ++i)
        if (p >= job.tensors[i].start && p < job.tensors[i].start + job.tensors[i].bytes)
            return {GLOBAL, (int32_t)i, p - job.tensors[i].start};
    return {GLOBAL, -1, (int64_t)p};
}
