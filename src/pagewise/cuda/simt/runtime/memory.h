// The memory of a watched launch: where its tensors and shared arrays lie while it runs, and what an address belongs to.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstring>

#include "block.h"

static void* reserve(u64 bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

static void map_shared(Job& job) {
    Launch& launch = job.launch;
    char* anchor = (char*)launch.anchor();
    job.shared.original = anchor;
    char *low = anchor, *high = anchor + 1;
    for (u32 i = 0; i < launch.num_shared; ++i) {
        low = std::min(low, anchor + (int64_t)launch.shared[i].offset);
        high = std::max(high, anchor + (int64_t)launch.shared[i].offset + launch.shared[i].bytes);
    }
    if (launch.has_dynamic) {
        low = std::min(low, anchor + launch.dynamic_offset);
        high = std::max(high, anchor + launch.dynamic_offset + MAX_SHARED);
    }
    job.shared.start = low;
    job.shared.bytes = (u64)(high - low);
    if (launch.mode == CHECK) {
        job.shared.cell_bytes = job.shared.bytes * sizeof(Cell);
        job.shared.cells = (Cell*)reserve(job.shared.cell_bytes, PROT_READ | PROT_WRITE);
    }
}

// Checked launches work on copies of the tensors with empty space round each, so that no stray index meets another.
static void map_tensors(Job& job) {
    Launch& launch = job.launch;
    for (u32 i = 0; i < launch.num_regions; ++i) {
        const Region& region = launch.regions[i];
        Shadow s;
        s.start = s.original = (char*)region.start;
        s.bytes = region.bytes, s.granule = region.granule;
        if (launch.mode == CHECK) {
            for (u64 space = 64ull << 30; space >= 1 << 20 && !s.arena; space /= 4) {
                s.arena_bytes = 2 * space + ((region.bytes + 8191) & ~4095ull);
                if ((s.arena = (char*)reserve(s.arena_bytes, PROT_NONE))) s.start = s.arena + space;
            }
            mprotect(s.start, (region.bytes + 8191) & ~4095ull, PROT_READ | PROT_WRITE);
            s.start += region.start % 4096;
            memcpy(s.start, s.original, region.bytes);
            s.cell_bytes = (region.bytes / region.granule + 1) * sizeof(Cell);
            s.cells = (Cell*)reserve(s.cell_bytes, PROT_READ | PROT_WRITE);
        }
        job.tensors.push_back(s);
    }
    if (launch.mode != CHECK) return;
    for (u32 i = 0; i < launch.num_pointers; ++i) {
        const Shadow& s = job.tensors[launch.pointer_regions[i]];
        *(u64*)launch.arguments[launch.pointers[i]] += (u64)s.start - (u64)s.original;
    }
}

static void unmap(Job& job) {
    for (Shadow& s : job.tensors) {
        if (!s.arena) continue;
        if (s.dirty) memcpy(s.original, s.start, s.bytes);
        munmap(s.arena, s.arena_bytes);
        munmap(s.cells, s.cell_bytes);
    }
    if (job.shared.cells) munmap(job.shared.cells, job.shared.cell_bytes);
}

struct Place { Space space; int32_t region; int64_t offset; };

// __constant__ and __device__ variables lie in the compiled file.
static bool in_module(Job& job, const char* p) {
    if ((u64)p >> 12 == job.module_page) return true;
    Dl_info info;
    if (!dladdr(p, &info)) return false;
    job.module_page = (u64)p >> 12;
    return true;
}

static Place place_of(Job& job, const char* p) {
    // a checked launch has its tensors elsewhere: what is near the shared arrays strayed from them
    u64 near = job.launch.mode == CHECK && job.launch.num_shared ? 256 << 10 : 0;
    if (p + near >= job.shared.start && p < job.shared.start + job.shared.bytes + near) {
        for (u32 i = 0; i < job.launch.num_shared; ++i) {
            const SharedArray& a = job.launch.shared[i];
            if (p >= job.shared.original + a.offset && p < job.shared.original + a.offset + a.bytes)
                return {SHARED, (int32_t)i, p - (job.shared.original + a.offset)};
        }
        return {SHARED, -1, p - job.shared.start};
    }
    for (u32 i = 0; i < job.tensors.size(); ++i)
        if (p >= job.tensors[i].start && p < job.tensors[i].start + job.tensors[i].bytes)
            return {GLOBAL, (int32_t)i, p - job.tensors[i].start};
    return {GLOBAL, -1, (int64_t)p};
}
