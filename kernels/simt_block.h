// Part of simt_runtime.cpp: what a launch and a thread block are made of, and how one fiber gives way to another.
#pragma once

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#define CALLER __builtin_return_address(0)
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// ------------------------------------------------------------------------- shared with tools/simt.py, field by field

enum Mode : u32 { PLAIN, OBSERVE, CHECK };
enum Space : u8 { GLOBAL, SHARED, OTHER };
enum Access : u8 { READ, WRITE, ATOMIC, BARRIER, SHUFFLE };
enum What : u32 {
    NONE, DEADLOCK, OUTSIDE_GLOBAL, OUTSIDE_SHARED, MISALIGNED, RACE, BARRIER_NOT_REACHED, LANE_GONE, LANE_NOT_IN_MASK,
    UNINITIALISED_SHARED, UNINITIALISED_GLOBAL, FAILED, FAULT, SPINNING, BARRIERS_DIFFER, DIVIDED_BY_ZERO,
    STOPPED,
};  // fmt: skip

struct Dim { u32 x, y, z; };

struct Region {  // a tensor, or overlapping tensors together
    u64 start, bytes;
    u32 granule;  // bytes of an element: races are looked for element by element
    u32 expect_written;  // reading an element before it is written is an error
    u8* written;  // [bytes / granule], in and out; may be null
};

struct SharedArray { int64_t offset; u64 bytes; };  // offset from the module's anchor

struct Waiter { u64 site; u32 kind, mask, count; Dim thread; };

struct Error {
    u32 what, access, space, bytes;
    Dim block, thread, other_block, other_thread;
    u64 site, other_site, address;
    int32_t region;  // index of a Region or SharedArray, -1: none
    u32 other_access;
    int64_t offset;  // bytes from its start
    u32 lane, num_waiters;
    Waiter waiters[8];
    char text[256];
};

struct Count { u64 site; u32 access, space; u64 requests, lanes, bytes, sectors, conflicts; };

struct Event {
    u64 site, order;
    int64_t offset;
    u32 block, execution;
    int32_t region;
    u16 thread;
    u8 bytes, access, space, pad[3];
};

struct Launch {
    void (*entry)(void**);
    void** arguments;
    u32 grid[3], block[3];
    u32 shared_bytes, mode, workers, shuffled;
    u64 seed;
    Region* regions;
    SharedArray* shared;
    void* (*anchor)();
    int64_t dynamic_offset;
    u32 num_regions, num_shared, has_dynamic, num_pointers;
    u32* pointers;  // the arguments that point into a region
    u32* pointer_regions;  // which
    u64 max_events;
    // results
    Error error;
    Count* counts;
    u64 num_counts;
    Event* events;
    u64 num_events, all_events;
    char* output;
    u64 num_output, switches;
};

// ---------------------------------------------------------------------------------------------- fibers

constexpr size_t STACK = 256 << 10, GUARD = 4096;
constexpr int MAX_THREADS = SIMT_MAX_THREADS, MAX_SHARED = SIMT_MAX_SHARED;  // tools/cuda_limits.py

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
struct Context { void* sp; };
extern "C" void simt_switch(void** keep, void* go_on);
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch,.-simt_switch
)");
static void switch_to(Context& from, Context& to) { simt_switch(&from.sp, to.sp); }
static void prepare(Context& context, char* stack, void (*start)()) {
    void** top = (void**)(stack + STACK);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = (void*)start;
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    context.sp = top;
}
#else
struct Context { ucontext_t context; };
static void switch_to(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
static void prepare(Context& context, char* stack, void (*start)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack + GUARD;
    context.context.uc_stack.ss_size = STACK - GUARD;
    context.context.uc_link = nullptr;
    makecontext(&context.context, start, 0);
}
#endif

static void* reserve(u64 bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

// ---------------------------------------------------------------------------------------------- a thread block

enum State : u8 { READY, AT_BARRIER, AT_COLLECTIVE, AT_ACTIVEMASK, GONE };

struct Thread {
    Context context;
    Dim index;
    u16 id;
    u8 lane;
    State state;
    bool fenced;
    u32 clock;  // counts this thread's synchronisations
    void* site;  // where it waits, and for what
    int kind, source, line;
    u32 mask, lanes;
    u64 value;
    u64* values;
    u64 atomics, spins, progress;  // spins: atomics and yields since anybody's progress
};

struct Warp {
    u32 size, ready;  // lanes there are, lanes that can run
    u32 known[32][32];  // known[t][s]: what lane s did before this clock happens before what lane t does now
    u32 bits(State state, const Thread* threads) const {
        u32 set = 0;
        for (u32 lane = 0; lane < size; ++lane) set |= (threads[lane].state == state) << lane;
        return set;
    }
};

struct Stamp { u32 clock, block; u16 thread, site; };  // block 0: nobody; the site's highest bit: an atomic
constexpr u16 ATOMIC_SITE = 0x8000;
struct Cell { Stamp write, read[2]; };  // the last access to an element, as much as a race needs

struct Shadow {
    char* start = nullptr;
    u64 bytes = 0;
    u32 granule = 1;
    Cell* cells = nullptr;
    char *arena = nullptr, *original = nullptr;
    u64 arena_bytes = 0, cell_bytes = 0;
    bool dirty = false;
};

struct Job;
struct Worker {
    Job* job;
    Context scheduler;
    char* stacks = nullptr;
    Thread* current = nullptr;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Thread*> ready, batch;
    Dim block, size, grid;
    u32 rank = 0, block_number = 0, num_threads = 0, live = 0, arrived = 0;
    int barrier_total = 0, barrier_result = 0;
    u64 progress = 0, switches = 0;  // progress: who waited, ended, or changed a value by an atomic
    bool failed = false;
    std::mt19937_64 random;
    std::string output;
    std::vector<u32> barrier_clock;  // of each thread at the last barrier
    std::set<u32> acquired;  // thread blocks whose work happens before this one's
    std::vector<Event> events;  // of this thread block
    std::vector<std::vector<u32>> executions;  // [thread][site]
    sigjmp_buf* fault = nullptr;
    u64 fault_site = 0;
    What fault_what = FAULT;
    Error unwritten_read{};  // a read of shared memory before any write: if a write follows, it is a race
};

static thread_local Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;

// What one launch shares among its workers.
struct Job {
    Launch& launch;
    std::vector<u32> order;  // of the thread blocks
    std::atomic<u32> next{0};
    std::atomic<bool> failed{false};
    std::mutex lock;
    u32 failed_rank = ~0u;
    std::map<u32, std::string> outputs;
    // observed and checked launches, which have one worker:
    std::vector<u64> sites;
    std::unordered_map<u64, u16> site_numbers;
    std::vector<Event> trace;
    u64 all_events = 0;
    std::map<std::tuple<u64, u32, u32>, Count> counts;
    std::vector<Shadow> global;
    Shadow shared;
    char *tls = nullptr, *dynamic = nullptr;
    std::unordered_map<u64, std::set<u32>> releases;
    u64 module_page = ~0ull;  // none yet
    explicit Job(Launch& launch) : launch(launch) {}
};

static void go_to_scheduler(Worker& w) { switch_to(w.current->context, w.scheduler); }

static Error& new_error(Worker& w, What what, void* site) {
    w.failed = true;
    static thread_local Error error;
    error = Error{};
    error.what = what;
    error.block = w.block;
    error.region = -1;
    error.site = (u64)site;
    if (w.current) error.thread = w.current->index;
    return error;
}

// Keep the error of the earliest thread block and give up this one. From a fiber this does not return.
static void raise_error(Worker& w, const Error& new_error) {
    const Error& error = w.unwritten_read.what && new_error.what != RACE ? w.unwritten_read : new_error;
    {
        std::lock_guard<std::mutex> guard(w.job->lock);
        if (w.rank < w.job->failed_rank) w.job->failed_rank = w.rank, w.job->launch.error = error;
        w.job->failed = true;
    }
    if (w.current) go_to_scheduler(w);
}

static void wait(Worker& w, State state, void* site) {
    Thread& me = *w.current;
    me.state = state;
    me.site = site;
    w.progress++;
    go_to_scheduler(w);
}

static void wake(Worker& w, Thread& thread) {
    if (thread.state == READY) return;
    thread.state = READY;
    w.warps[thread.id / 32].ready++;
    if (&thread != w.current) w.ready.push_back(&thread);
}

static void count(Worker& w, void* site, Access access) {
    if (w.job->launch.mode == PLAIN) return;
    Count& c = w.job->counts[{(u64)site, access, OTHER}];
    c.requests++;
}
