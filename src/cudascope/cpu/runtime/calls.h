// The functions that a kernel calls by name: for the address of its shared memory, for atomics, printf and assert.
#pragma once

#include <chrono>
#include <cstdarg>
#include <cstdio>

#include "heap.h"
#include "hooks.h"

extern "C" {
u32 simt_lane() { return worker->current->lane; }
bool simt_in_kernel() { return worker; }
u64 simt_seed() { return worker->job->launch.shuffled ? worker->job->launch.seed + 1 : 0; }
long long simt_clock() {
    worker->current->clock_reads++;
    return std::chrono::steady_clock::now().time_since_epoch().count();
}
void simt_yield() {
    void*& polls = worker->current->poll_site;  // a loop that polls and sleeps: two sleeps in a row poll nothing
    polls = polls && polls != CALLER ? CALLER : nullptr;
    worker->polls++;
    worker->current->site = CALLER;
    let_others_run(*worker);
}
void simt_fence() {
    order_memory();
    if (worker->job->launch.mode == CHECK) fence(*worker->current);
}
void simt_acquire() {
    order_memory();
    if (worker->job->launch.mode == CHECK) confirm_seen(*worker->current);
}
void simt_block_scope(bool begins) { worker->current->in_block = begins; }

void simt_loads(u32 number) { worker->current->loads = (u8)number; }
void simt_stores(u64 bits) {
    if (worker->job->launch.mode == CHECK) use(*worker, bits);
}

// Kernels call it where a compiler would ask for the address of a thread-local variable: translate/assembly.py sees to that.
struct ThreadLocal { u64 module, offset; };
void* simt_shared_at(const ThreadLocal* variable) { return worker->block->shared.start + variable->offset; }
void* simt_shared_base() { return worker->block->shared.start; }
bool simt_is_shared(const void* address) { return is_shared(*worker->block, address); }
bool simt_is_local(const void* address) { return is_local(*worker->block, address); }
bool simt_carry() { return worker->current->carry; }
void simt_keep_carry(bool carry) { worker->current->carry = carry; }

constexpr size_t MAX_OUTPUT = 1 << 20;  // bytes that a thread block may print; CUDA has as much for all of them
int simt_printf(const char* format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    std::string& output = worker->block->output;
    if (output.size() < MAX_OUTPUT) output += line;
    return length;
}

// Memory is read that other threads may change: let them run now and then.
static void poll(const char* p, u32 bytes, bool is_volatile, void* site) {
    Worker& w = *worker;
    note_poll(w, p, bytes, is_volatile, site);
    w.current->site = site;
    if (++w.current->reads % 256 == 0) let_others_run(w);
}
void simt_poll(const volatile void* p, u32 bytes) { poll((const char*)p, bytes, true, CALLER); }

// The atomic is checked after everything that other threads do in their turns.
static void begin_atomic(const Announced& a) {
    poll(a.p, a.bytes, false, a.site);
    announce_at_once(a, a.bytes);
}

static void stop(FindingKind finding, const char* message, void* site) {
    Error e = new_error(*worker, finding, site);
    snprintf(e.text, sizeof(e.text), "%s", message);
    raise_error(*worker, e);
    __builtin_unreachable();
}
void simt_fail(const char* message) { stop(ASSERTION, message, CALLER); }
void simt_lacks(const char* message) { stop(NOT_SUPPORTED, message, CALLER); }

// -fsanitize=shift-exponent calls it where an amount is too large, in the few shifts that translate/shifts.py cannot change.
struct ShiftType { u16 kind, width; };  // 2 × log2 of the width, and 1 of a signed type
struct WideShift { const char* file; u32 line, column; const ShiftType* type; };
void __ubsan_handle_shift_out_of_bounds(const WideShift* shift, u64, u64) {
    char text[256];
    snprintf(text, sizeof(text),
        "shifts a number of %u bits by as many bits or more, in a macro or a header: C++ leaves the result open, and a "
        "GPU gives 0 or the sign. Test the amount first: n < %u ? x << n : 0",
        1u << (shift->type->width >> 1), 1u << (shift->type->width >> 1));
    stop(NOT_SUPPORTED, text, CALLER);
}

void simt_refuse(u32 lane, const char* message) {
    Worker& w = *worker;
    const Thread& me = *w.current;
    Error e = new_error(w, ARGUMENT, me.state == AT_COLLECTIVE ? me.site : CALLER);
    e.thread = w.block->threads[me.id / 32 * 32 + lane].index;
    snprintf(e.text, sizeof(e.text), "%s", message);
    raise_error(w, e);
    __builtin_unreachable();
}

void simt_touch(const volatile void* address, u32 bytes, Access access, bool is_volatile) {
    announce_at_once({(const char*)address, bytes, access, is_volatile, false, CALLER}, bytes);
}
void simt_access(const volatile void* address, u32 bytes, Access access) {
    announce_at_once({(const char*)address, bytes, access, false, true, CALLER}, 1);
}

// Kernels call it in place of exit and its like: translate/assembly.py sees to that.
void simt_host_exit(int) { simt_fail("a kernel cannot call exit()"); }
void simt_throw() { simt_fail("a kernel cannot throw an exception"); }

// Memory that a kernel allocates itself: it may touch it, and so may later thread blocks, until it is freed.
void* simt_malloc(size_t bytes) {
    if (!worker) return malloc(bytes);
    void* p = allocate(bytes);
    if (p && worker->job->launch.mode != PLAIN) worker->job->heap[(u64)p] = bytes;
    return p;
}
void simt_free_memory(void* p) {
    if (!is_in_heap(p) && (!worker || !p)) return free(p);
    if ((!is_in_heap(p) || !deallocate(p)) && worker)
        stop(ASSERTION, "free() of memory that malloc() has not returned, or that was freed before", CALLER);
    if (!worker || worker->job->launch.mode == PLAIN) return;
    if (auto node = worker->job->heap.extract((u64)p)) worker->job->freed[node.key()] = node.mapped();
}

void simt_atomic(const volatile void* address, int bytes) {
    begin_atomic({(const char*)address, (u32)bytes, ATOMIC, false, false, CALLER});
}

// An atomicCAS of an instrumented kernel begins: it replaces `compare`.
void simt_atomic_if(const volatile void* address, int bytes, u64 compare) {
    Worker& w = *worker;
    if (w.job->launch.mode == CHECK) confirm_first_read(w, address, (u32)bytes, compare);
    begin_atomic({(const char*)address, (u32)bytes, ATOMIC, false, false, CALLER, true});
}

bool simt_exchange_if(volatile void* address, int bytes, u64* expected, u64 desired) {
    void* outer = worker->landing;
    auto swap = [&](auto* p) {
        auto seen = (std::remove_reference_t<decltype(*p)>)*expected;
        auto value = (decltype(seen))desired;
        bool done = __atomic_compare_exchange_n(p, &seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (done && desired != *expected) worker->progress++;
        *expected = seen;
        worker->landing = outer;
        return done;
    };
    if (!outer) worker->landing = CALLER;  // a fault is that of the atomic
    if (bytes == 8) return swap((u64*)address);
    if (bytes == 4) return swap((u32*)address);
    return bytes == 2 ? swap((u16*)address) : swap((u8*)address);
}
}
