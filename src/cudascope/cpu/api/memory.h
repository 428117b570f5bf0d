// The memory that a program allocates. Device memory cannot be touched by host code: its pages have no access except while
// a kernel or a copy uses them. Empty space surrounds each allocation, and no address is used a second time, so an access
// past the ends and one after cudaFree meet nothing else.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "state.h"

enum Kind : u32 { DEVICE, MANAGED, PINNED, REGISTERED };

constexpr u64 ALIGNMENT = 256, GAP = 1 << 20, APART = 64 << 20;
static const u64 PAGE_BYTES = (u64)sysconf(_SC_PAGESIZE);
static bool is_checked = false;  // stray accesses of a checked kernel end in the empty space, and the launch goes on

static std::map<u64, AllocationRow> allocations;  // by their start, freed ones among them
static std::vector<AllocationRow> rows;           // a copy for Python, made before each launch
static std::vector<Mark> marks;
static u64 device_bytes = 0;
static u32 num_allocated = 0;
constexpr u64 TOTAL_BYTES = 80ull << 30;  // an H100's, of which the program has what the machine gives

static u64 rounded(u64 bytes, u64 unit) { return (bytes + unit - 1) / unit * unit; }

static u64 begin_of(const AllocationRow& a) { return a.start / PAGE_BYTES * PAGE_BYTES; }
static u64 length_of(const AllocationRow& a) { return rounded(a.start + a.bytes, PAGE_BYTES) - begin_of(a); }

static void protect(const AllocationRow& a, int protection) { mprotect((void*)begin_of(a), length_of(a), protection); }

// The allocation to which an address belongs, or in whose empty space it is; null: neither.
static AllocationRow* near(const void* p) {
    auto after = allocations.upper_bound((u64)p);
    AllocationRow* found = nullptr;
    if (after != allocations.end() && after->second.kind != REGISTERED && after->first - (u64)p <= GAP) found = &after->second;
    if (after == allocations.begin()) return found;
    AllocationRow& before = std::prev(after)->second;
    u64 space = before.kind == REGISTERED ? 0 : GAP;
    return (u64)p < before.start + std::max<u64>(before.bytes, 1) + space ? &before : found;
}
static bool is_inside(const AllocationRow* a, const void* p, u64 bytes) {
    return a && (u64)p >= a->start && (u64)p + bytes <= a->start + a->bytes;
}

static void mark(const void* p, u64 bytes) { marks.push_back({(u64)p, bytes}); }

static cudaError_t allocate(void** pointer, u64 bytes, Kind kind, u64 site) {
    if (!pointer) return returned(cudaErrorInvalidValue);
    if (sticky != cudaSuccess) return returned(sticky);
    *pointer = nullptr;
    if (!bytes) return cudaSuccess;
    u64 length = rounded(bytes, PAGE_BYTES), space = length + 2 * GAP + APART;
    if (bytes > TOTAL_BYTES - device_bytes) return returned(cudaErrorMemoryAllocation);
    char* memory = (char*)mmap(nullptr, space, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return returned(cudaErrorMemoryAllocation);
    u64 start = (u64)memory + GAP + (length - bytes) / ALIGNMENT * ALIGNMENT;  // its end is as near to the space as can be
    AllocationRow row{start, bytes, site, 0, kind, 0, ++num_allocated, 0};
    if (kind == DEVICE) device_bytes += bytes;
    else protect(row, PROT_READ | PROT_WRITE), mark((void*)start, bytes);
    allocations[start] = row;
    *pointer = (void*)start;
    return cudaSuccess;
}

static cudaError_t free_memory(void* pointer, bool of_host, u64 site) {
    if (!pointer) return returned(cudaSuccess);
    AllocationRow* a = near(pointer);
    const char* function = of_host ? "cudaFreeHost" : "cudaFree";
    if (!a || a->start != (u64)pointer || a->kind == REGISTERED || (a->kind == PINNED) != of_host) {
        const char* why = !a                            ? "was not allocated by CUDA"
                          : a->start != (u64)pointer    ? "does not begin an allocation"
                          : a->kind == REGISTERED       ? "is memory of the host that was registered only"
                          : of_host                     ? "is memory of the device"
                                                        : "is memory of cudaMallocHost or cudaHostAlloc";
        find(site, "invalid free", (u64)pointer, "%s of an address that %s", function, why);
        return returned(cudaErrorInvalidValue);
    }
    if (a->freed) {
        find(site, "double free", (u64)pointer, "%s of memory that was freed before", function);
        return returned(cudaErrorInvalidValue);
    }
    a->freed = site;
    if (a->kind == DEVICE) device_bytes -= a->bytes;
    madvise((void*)begin_of(*a), length_of(*a), MADV_DONTNEED);
    protect(*a, PROT_NONE);
    return returned(cudaSuccess);
}

// While a kernel or a copy of the API runs, device memory can be touched.
static int num_open = 0;
static void open_memory(bool open) {
    num_open += open ? 1 : -1;
    if (num_open != (open ? 1 : 0)) return;
    for (auto& [start, a] : allocations)
        if (a.kind == DEVICE && !a.freed) {
            int protection = open ? PROT_READ | PROT_WRITE : PROT_NONE;
            protect(a, protection);
            if (!is_checked) continue;
            mprotect((void*)(begin_of(a) - GAP), GAP, protection);
            mprotect((void*)(begin_of(a) + length_of(a)), GAP, protection);
        }
}
struct Open {
    Open() { open_memory(true); }
    ~Open() { open_memory(false); }
};

extern "C" {
API_ASYNC(cudaMalloc, (void** pointer, size_t bytes), allocate(pointer, bytes, DEVICE, CALLER))
cudaError_t cudaMallocPitch(void** pointer, size_t* pitch, size_t width, size_t height) {
    Call call;
    if (!pitch) return returned(cudaErrorInvalidValue);
    *pitch = rounded(width, 512);
    return allocate(pointer, *pitch * height, DEVICE, CALLER);
}
cudaError_t cudaMalloc3D(cudaPitchedPtr* pointer, cudaExtent extent) {
    Call call;
    if (!pointer) return returned(cudaErrorInvalidValue);
    pointer->pitch = rounded(extent.width, 512), pointer->xsize = extent.width, pointer->ysize = extent.height;
    return allocate(&pointer->ptr, pointer->pitch * extent.height * extent.depth, DEVICE, CALLER);
}
API(cudaMallocManaged, (void** pointer, size_t bytes, unsigned),
    bytes ? allocate(pointer, bytes, MANAGED, CALLER) : returned(cudaErrorInvalidValue))
API(cudaMallocHost, (void** pointer, size_t bytes), allocate(pointer, bytes, PINNED, CALLER))
API(cudaHostAlloc, (void** pointer, size_t bytes, unsigned), allocate(pointer, bytes, PINNED, CALLER))
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    Call call;
    if (!pointer || !bytes) return returned(cudaErrorInvalidValue);
    AllocationRow* a = near(pointer);
    if (a && !a->freed && is_inside(a, pointer, 1)) return returned(cudaErrorHostMemoryAlreadyRegistered);
    allocations[(u64)pointer] = {(u64)pointer, bytes, CALLER, 0, REGISTERED, 0, ++num_allocated, 0};
    mark(pointer, bytes);
    return returned(cudaSuccess);
}
cudaError_t cudaHostUnregister(void* pointer) {
    Call call;
    auto found = allocations.find((u64)pointer);
    if (found == allocations.end() || found->second.kind != REGISTERED) return returned(cudaErrorHostMemoryNotRegistered);
    allocations.erase(found);
    return returned(cudaSuccess);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    Call call;
    AllocationRow* a = near(host);
    if (!device || !a || a->kind == DEVICE || a->freed) return returned(cudaErrorInvalidValue);
    *device = host;
    return returned(cudaSuccess);
}
cudaError_t cudaHostGetFlags(unsigned* flags, void* host) {
    Call call;
    AllocationRow* a = near(host);
    if (!flags || !a || a->kind != PINNED) return returned(cudaErrorInvalidValue);
    *flags = cudaHostAllocMapped;
    return returned(cudaSuccess);
}
API_ASYNC(cudaFree, (void* pointer), free_memory(pointer, false, CALLER))
API(cudaFreeHost, (void* pointer), free_memory(pointer, true, CALLER))
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    Call call;
    if (free) *free = TOTAL_BYTES - device_bytes;
    if (total) *total = TOTAL_BYTES;
    return returned(cudaSuccess);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    Call call;
    if (!attributes) return returned(cudaErrorInvalidValue);
    memset((void*)attributes, 0, sizeof(*attributes));
    AllocationRow* a = near(pointer);
    bool known = is_inside(a, pointer, 1) && !a->freed;
    attributes->type = !known             ? cudaMemoryTypeUnregistered
                       : a->kind == DEVICE  ? cudaMemoryTypeDevice
                       : a->kind == MANAGED ? cudaMemoryTypeManaged
                                            : cudaMemoryTypeHost;
    if (known) attributes->devicePointer = (void*)pointer;
    if (!known || a->kind != DEVICE) attributes->hostPointer = (void*)pointer;
    return returned(cudaSuccess);
}
void simt_register_granule(void* pointer, unsigned granule) {
    Call call;
    if (AllocationRow* a = near(pointer)) a->granule = granule;
}
}
