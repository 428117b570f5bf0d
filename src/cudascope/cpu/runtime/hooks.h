// An instrumented kernel calls these functions before every access, and where an address is misaligned for its type.
#pragma once

#include <cstring>

#include "check.h"
#include "observe.h"

#pragma GCC push_options
#pragma GCC optimize("O3")
// A guard says whether the constructor of a __shared__ array has run. The kernel itself does not access guards.
static bool is_guard(const Job& job, const Block& b, const char* p) {
    for (u32 i = 0; i < job.launch.num_guards; ++i) {
        const SharedArray& guard = job.launch.guards[i];
        if (p >= b.shared.start + guard.offset && p < b.shared.start + guard.offset + guard.bytes) return true;
    }
    return false;
}

// A thread may wait for a store of another thread if it has made many accesses and stored nothing.
static void take_turns(Worker& w, Access access, void* site) {
    Thread& me = *w.current;
    if (w.wanted.load(std::memory_order_relaxed) || w.job->failed.load(std::memory_order_relaxed))
        return me.site = site, let_others_run(w);
    if (access == WRITE) me.accesses = 0;
    else if (++me.accesses > me.budget) {
        me.accesses = 0;
        me.budget = std::max<u32>(me.budget / 4, LEAST_BUDGET);
        me.site = site;
        let_others_run(w);
        if (me.progress != w.progress) me.progress = w.progress, me.budget = BUDGET;
    }
}

// Local memory is a thread's own, and lasts as long as the function that declares it. What is below `stack`
// belongs to functions that have returned.
[[gnu::noinline]] static void check_local(Worker& w, const Announced& a, u32 alignment, const char* stack) {
    Thread& me = *w.current;
    if (me.state != READY) return;  // the last lane of a meeting works with what the others have brought
    const char* own = w.block->stacks.start + me.id * STACK;
    FindingKind finding = a.p < own || a.p >= own + STACK ? LOCAL_OF_ANOTHER_THREAD : a.p < stack ? LOCAL_GONE : NOTHING;
    // The compiler puts variables of 16 bytes at multiples of 16, and smaller ones anywhere, which tells nothing of a GPU.
    if (!finding && alignment == 16 && (u64)a.p % 16 && a.p != me.reported) finding = MISALIGNED;
    if (finding) raise_error(w, access_error(w, finding, a.site, a.p, a.bytes, a.access, {OTHER, -1, 0}));
}

// The hooks of most accesses contain the code of this function. The other hooks call it: each copy takes time to compile.
[[gnu::always_inline]] static inline void announce_at_once(const Announced& a, u32 alignment) {
    Worker* w = worker;
    if (!w || !w->current || !a.bytes) return;
    Block& b = *w->block;
    if (is_local(b, a.p)) {
        if (w->job->launch.mode == CHECK) check_local(*w, a, alignment, (const char*)__builtin_dwarf_cfa());
        return;
    }
    Mode mode = (Mode)w->job->launch.mode;
    if (mode == PLAIN) return;
    if (mode == CHECK && w->pending.bytes) settle(*w);
    if (w->job->launch.num_guards && is_guard(*w->job, b, a.p)) return;
    Thread& me = *w->current;
    if (a.is_volatile && a.access == READ) note_poll(*w, a.p, a.bytes, true, a.site);
    else if (a.access != ATOMIC) me.only_polls = false;
    take_turns(*w, a.access, a.site);
    if (mode == CHECK) check(*w, a, alignment);
    else observe(*w, a);
}

[[gnu::noinline]] static void announce(const Announced& a, u32 alignment) { announce_at_once(a, alignment); }

static void accessed(const volatile void* p, u32 bytes, Access access, void* site, u32 alignment, bool is_volatile = false) {
    announce({(const char*)p, bytes, access, is_volatile, false, site}, alignment);
}

// An observed access is in pieces of the alignment of its type, as a GPU reads a struct.
static void range_accessed(const void* address, size_t bytes, Access access, void* site, u32 alignment = 16) {
    u32 largest = worker && worker->job->launch.mode == OBSERVE ? std::min(alignment, 16u) : 16;
    for (size_t done = 0; done < bytes; done += largest) {
        u32 piece = (u32)std::min<size_t>(largest, bytes - done);
        announce({(const char*)address + done, piece, access, false, true, site}, 1);
    }
}

extern "C" {
// There is one hook for 16 bytes, whether their type is aligned to 16 or to 8: the alignment sanitizer tells which.
static u32 alignment_of_16(const void* p) {
    return worker && worker->current && worker->current->misaligned == p && p ? 16 : 8;
}
#define HOOKS(n, alignment)                                                                                            \
    void __tsan_read##n(void* p) { announce_at_once({(const char*)p, n, READ, false, false, CALLER}, alignment); }     \
    void __tsan_write##n(void* p) { announce_at_once({(const char*)p, n, WRITE, false, false, CALLER}, alignment); }   \
    void __tsan_volatile_read##n(void* p) { accessed(p, n, READ, CALLER, alignment, true); }                           \
    void __tsan_volatile_write##n(void* p) { accessed(p, n, WRITE, CALLER, alignment, true); }                         \
    void __tsan_unaligned_read##n(void* p) { accessed(p, n, READ, CALLER, 1); }                                        \
    void __tsan_unaligned_write##n(void* p) { accessed(p, n, WRITE, CALLER, 1); }                                      \
    void __tsan_unaligned_volatile_read##n(void* p) { accessed(p, n, READ, CALLER, 1, true); }                         \
    void __tsan_unaligned_volatile_write##n(void* p) { accessed(p, n, WRITE, CALLER, 1, true); }
HOOKS(1, 1) HOOKS(2, 2) HOOKS(4, 4) HOOKS(8, 8) HOOKS(16, alignment_of_16(p))
void __tsan_read_range(void* p, size_t bytes) { range_accessed(p, bytes, READ, CALLER); }
void __tsan_write_range(void* p, size_t bytes) { range_accessed(p, bytes, WRITE, CALLER); }
// translate/assembly.py calls these functions where it knows the alignment of a struct.
void simt_read_range(void* p, size_t bytes, u32 alignment) { range_accessed(p, bytes, READ, CALLER, alignment); }
void simt_write_range(void* p, size_t bytes, u32 alignment) { range_accessed(p, bytes, WRITE, CALLER, alignment); }
void simt_read16(void* p, u32 alignment) {
    if (worker && worker->job->launch.mode == OBSERVE) return range_accessed(p, 16, READ, CALLER, alignment);
    announce_at_once({(const char*)p, 16, READ, false, false, CALLER}, alignment_of_16(p));
}
void simt_write16(void* p, u32 alignment) {
    if (worker && worker->job->launch.mode == OBSERVE) return range_accessed(p, 16, WRITE, CALLER, alignment);
    announce_at_once({(const char*)p, 16, WRITE, false, false, CALLER}, alignment_of_16(p));
}
void __tsan_vptr_update(void** p, void*) { accessed(p, 8, WRITE, CALLER, 8); }
void __tsan_vptr_read(void** p) { accessed(p, 8, READ, CALLER, 8); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

}
#pragma GCC pop_options
extern "C" {
// -fsanitize=alignment calls this function before an access to `p` that is misaligned for its type. With an alignment of
// 1, -fsanitize=object-size calls it before an access past the ends of a variable that the compiler knows.
struct Mismatch { const char* file; u32 line, column; void* type; u8 log_alignment, kind; };
void __ubsan_handle_type_mismatch_v1(const Mismatch* mismatch, void* p) {
    enum { LOAD, STORE, REFERENCE };  // the other kinds choose a member: its own access tells
    if (mismatch->kind > REFERENCE || !worker || !worker->current || worker->job->launch.mode != CHECK) return;
    Worker& w = *worker;
    u32 alignment = 1u << mismatch->log_alignment;
    w.current->reported = nullptr;
    if (mismatch->kind == REFERENCE) {  // no access yet; g++ leaves out the check of the access that follows
        if (alignment == 16) w.current->misaligned = p;
        return;
    }
    Access access = mismatch->kind == STORE ? WRITE : READ;
    if (alignment > 1) {
        accessed(p, alignment, access, CALLER, alignment);
        w.current->reported = p;
        return;
    }
    if (is_local(*w.block, p))
        return raise_error(w, access_error(w, OUT_OF_LOCAL_BOUNDS, CALLER, (char*)p, 1, access, {OTHER, -1, 0}));
    if (access == WRITE || is_shared(*w.block, p) || !in_module(*w.job, (char*)p)) return;  // its own hook follows
    Announced a{(char*)p, 1, READ, false, false, CALLER};  // g++ gives constants no hook
    Place place{GLOBAL, -1, (int64_t)p};
    if (!is_outside_of_objects(*w.job, a, place)) return;
    w.current->reported = p;
    raise_error(w, access_error(w, OUT_OF_BOUNDS, CALLER, (char*)p, a.bytes, READ, place));
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
