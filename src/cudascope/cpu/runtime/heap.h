// Kernels have a heap of their own for malloc(), so that their stray indices do not meet the heap of the process. The heap
// is empty again when the kernels have freed all of their memory.
#pragma once

#include "pages.h"

constexpr u64 HEAP = 4ull << 30;
#pragma GCC visibility push(hidden)
inline char* heap = nullptr;
inline std::atomic<u64> heap_used{0}, live_allocations{0};
#pragma GCC visibility pop

static void* allocate(u64 bytes) {
    std::lock_guard<std::mutex> guard(process_lock);
    if (!heap && !(heap = reserve(HEAP, PROT_READ | PROT_WRITE))) return nullptr;
    if (!live_allocations && heap_used) madvise(heap, up(heap_used, PAGE), MADV_DONTNEED), heap_used = 0;
    if (bytes > HEAP - heap_used - 32) return nullptr;
    live_allocations++;
    char* p = heap + heap_used.fetch_add(up(bytes, 16) + 16) + 16;
    ((u64*)p)[-1] = (u64)p;  // until it is freed
    return p;
}
static bool is_in_heap(const void* p) { return heap && p >= heap && p < heap + HEAP; }
// False: `p` is not what allocate() gave, or has been freed before.
static bool deallocate(void* p) {
    u64 owner = (u64)p;
    if ((u64)p % 16 || p == heap || !__atomic_compare_exchange_n((u64*)p - 1, &owner, 0, false, 5, 5)) return false;
    live_allocations--;
    return true;
}
