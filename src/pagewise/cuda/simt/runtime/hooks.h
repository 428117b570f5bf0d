// What an instrumented kernel calls: before every access to memory, and where an address is misaligned for its type.
#pragma once

#include <cstring>

#include "check.h"
#include "observe.h"

// A guard says whether the constructor of a __shared__ array has run, which is no access of the kernel.
static bool is_guard(const Job& job, const char* p) {
    for (u32 i = 0; i < job.launch.num_guards; ++i) {
        const SharedArray& guard = job.launch.guards[i];
        if (p >= job.shared.original + guard.offset && p < job.shared.original + guard.offset + guard.bytes) return true;
    }
    return false;
}

static void accessed(const volatile void* address, u32 bytes, Access access, void* site, u32 alignment) {
    Worker* w = worker;
    if (!w || !w->current || !bytes) return;
    const char* p = (const char*)address;
    if (p >= w->stacks && p < w->stacks + STACK * MAX_THREADS) return;  // registers and local memory
    if (is_guard(*w->job, p)) return;
    Mode mode = (Mode)w->job->launch.mode;
    if (mode == CHECK) check(*w, p, bytes, access, site, alignment);
    else if (mode == OBSERVE) observe(*w, p, bytes, access, site);
}

static void range_accessed(const void* address, size_t bytes, Access access, void* site) {
    for (size_t done = 0; done < bytes; done += 16)
        accessed((const char*)address + done, (u32)std::min<size_t>(16, bytes - done), access, site, 1);
}

extern "C" {
#define HOOKS(n)                                                                           \
    void __tsan_read##n(void* p) { accessed(p, n, READ, CALLER, n); }                      \
    void __tsan_write##n(void* p) { accessed(p, n, WRITE, CALLER, n); }                    \
    void __tsan_unaligned_read##n(void* p) { accessed(p, n, READ, CALLER, 1); }            \
    void __tsan_unaligned_write##n(void* p) { accessed(p, n, WRITE, CALLER, 1); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8)
// There is one hook for 16 bytes, whether their type is aligned to 16 or to 8: the alignment sanitizer tells which.
void __tsan_read16(void* p) { accessed(p, 16, READ, CALLER, 8); }
void __tsan_write16(void* p) { accessed(p, 16, WRITE, CALLER, 8); }
void __tsan_unaligned_read16(void* p) { accessed(p, 16, READ, CALLER, 1); }
void __tsan_unaligned_write16(void* p) { accessed(p, 16, WRITE, CALLER, 1); }
void __tsan_read_range(void* p, size_t bytes) { range_accessed(p, bytes, READ, CALLER); }
void __tsan_write_range(void* p, size_t bytes) { range_accessed(p, bytes, WRITE, CALLER); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// -fsanitize=alignment calls it before an access to `p` that is no multiple of what its type asks for.
struct Mismatch { const char* file; u32 line, column; void* type; u8 log_alignment, kind; };
void __ubsan_handle_type_mismatch_v1(const Mismatch* mismatch, void* p) {
    enum { LOAD, STORE };  // the other kinds only form a reference, or choose a member: its own access tells
    if (mismatch->kind > STORE || !worker || worker->job->launch.mode != CHECK) return;
    u32 alignment = 1u << mismatch->log_alignment;
    accessed(p, alignment, mismatch->kind == STORE ? WRITE : READ, CALLER, alignment);
}

void* simt_memcpy(void* to, const void* from, size_t bytes) {
    range_accessed(from, bytes, READ, CALLER);
    range_accessed(to, bytes, WRITE, CALLER);
    return memcpy(to, from, bytes);
}
void* simt_memset(void* to, int value, size_t bytes) {
    range_accessed(to, bytes, WRITE, CALLER);
    return memset(to, value, bytes);
}
}
