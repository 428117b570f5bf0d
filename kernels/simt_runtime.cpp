// Runs a CUDA kernel on the CPU: threads as fibers, a thread block on one OS thread, thread blocks spread over cores.
//
//   scheduling  a fiber runs until it waits (barrier, warp function) or ends; whoever arrives last frees the others.
//               When nobody can run and somebody waits, that is a deadlock, and it is reported with what each waits for.
//   observing   the compiler's hooks (__tsan_*) tell every access before it happens; the lanes of a warp are matched
//               into one request by (instruction, how many times this lane has executed it).
//   checking    every access is held against the launch's tensors and shared arrays, and against the last accesses to
//               the same bytes: two of them race unless one happens before the other.
//               Happens before: program order; __syncthreads within a thread block; __syncwarp within a warp;
//               between thread blocks a __threadfence followed by an atomic that the other block's atomic sees.
//
// Observed and checked launches run on one OS thread. tools/simt.py compiles this file once and calls simt_launch.
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
    UNINITIALISED_SHARED, UNINITIALISED_GLOBAL, FAILED, FAULT, SPINNING, BARRIERS_DIFFER,
};  // fmt: skip

struct Dim { u32 x, y, z; };

struct Region {  // a tensor, or overlapping tensors together
    u64 start, bytes;
    u32 granule;  // bytes of an element: races are looked for element by element
    u32 expect_written;  // reading an element before it is written is an error
    u8* written;  // [bytes / granule], in and out; may be null
};

struct SharedArray { u64 offset, bytes; };  // offset from the module's anchor

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
constexpr int MAX_THREADS = 1024, MAX_SHARED = 227 << 10;

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
    u64 spins = 0, switches = 0;
    bool failed = false;
    std::mt19937_64 random;
    std::string output;
    std::vector<u32> barrier_clock;  // of each thread at the last barrier
    std::set<u32> acquired;  // thread blocks whose work happens before this one's
    std::vector<Event> events;  // of this thread block
    std::vector<std::vector<u32>> executions;  // [thread][site]
    sigjmp_buf* fault = nullptr;
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
    u64 module_page = 0;
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
    w.spins = 0;
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

// ---------------------------------------------------------------------------------------------- barrier

static bool barriers_differ(Worker& w) {
    const Thread& first = w.threads[0];
    for (const Thread& t : w.threads) {
        if (t.line == first.line) continue;
        Error& e = new_error(w, BARRIERS_DIFFER, t.site);
        e.thread = t.index, e.other_thread = first.index, e.other_site = (u64)first.site, e.other_block = w.block;
        raise_error(w, e);
        return true;
    }
    return false;
}

static void complete_barrier(Worker& w) {
    if (w.job->launch.mode == CHECK) {
        if (w.live < w.num_threads) {
            const Thread *gone = nullptr, *waiting = nullptr;
            for (u32 i = w.num_threads; i--;) (w.threads[i].state == GONE ? gone : waiting) = &w.threads[i];
            Error& e = new_error(w, BARRIER_NOT_REACHED, waiting->site);
            e.thread = gone->index, e.other_thread = waiting->index;
            e.num_waiters = w.live;
            return raise_error(w, e);
        }
        if (barriers_differ(w)) return;
        for (u32 i = 0; i < w.num_threads; ++i) w.barrier_clock[i] = ++w.threads[i].clock;
        for (u32 i = 0; i < w.num_threads; ++i)
            for (u32 lane = 0; lane < w.warps[i / 32].size; ++lane)
                w.warps[i / 32].known[i % 32][lane] = w.barrier_clock[i / 32 * 32 + lane];
    }
    w.barrier_result = w.barrier_total;
    w.barrier_total = 0;
    w.arrived = 0;
    for (u32 i = 0; i < w.num_threads; ++i)
        if (w.threads[i].state == AT_BARRIER) {
            if (w.threads[i].kind == 2 /* and */) w.threads[i].value = (u32)w.barrier_result == w.live;
            else w.threads[i].value = w.threads[i].kind == 1 ? w.barrier_result : w.barrier_result != 0;
            wake(w, w.threads[i]);
        }
}

static void resolve_activemask(Worker& w, u32 warp);

static void leave_ready(Worker& w, Thread& t) {
    u32 warp = t.id / 32;
    if (--w.warps[warp].ready == 0) resolve_activemask(w, warp);
}

extern "C" int simt_barrier(int kind, int predicate, int line) {
    Worker& w = *worker;
    Thread& me = *w.current;
    me.kind = kind, me.line = line;
    w.barrier_total += predicate;
    me.state = AT_BARRIER;
    me.site = CALLER;
    leave_ready(w, me);
    if (++w.arrived == w.live) {
        count(w, me.site, BARRIER);
        complete_barrier(w);
        w.spins = 0;
    } else {
        wait(w, AT_BARRIER, CALLER);
    }
    return (int)me.value;
}

// ---------------------------------------------------------------------------------------------- warp functions

enum { SHUFFLE_KIND, VOTE_KIND, MATCH_KIND, REDUCE_KIND, SYNCWARP_KIND };

// If every lane of `mask` that has not left waits with this mask at this kind of function, give out the results.
static bool complete_collective(Worker& w, u32 warp, u32 mask, int kind) {
    Thread* lanes = &w.threads[warp * 32];
    Warp& own = w.warps[warp];
    u32 present = 0;
    for (u32 lane = 0; lane < own.size; ++lane) {
        Thread& t = lanes[lane];
        if (!(mask >> lane & 1) || t.state == GONE) continue;
        if (t.state != AT_COLLECTIVE || t.mask != mask || t.kind != kind) return false;
        present |= 1u << lane;
    }
    if (!present) return false;
    Thread& first = lanes[__builtin_ctz(present)];
    count(w, first.site, kind == SYNCWARP_KIND ? BARRIER : SHUFFLE);
    for (u32 lane = 0; lane < own.size; ++lane) {
        Thread& t = lanes[lane];
        if (!(present >> lane & 1)) continue;
        t.lanes = present;
        if (kind == SHUFFLE_KIND) {
            bool there = present >> t.source & 1;
            if (!there && w.job->launch.mode == CHECK) {
                Error& e = new_error(w, mask >> t.source & 1 ? LANE_GONE : LANE_NOT_IN_MASK, t.site);
                e.thread = t.index;
                e.lane = t.source;
                raise_error(w, e);
                return false;
            }
            t.values[t.source] = there ? lanes[t.source].value : t.value;
        } else if (kind != SYNCWARP_KIND) {
            for (u32 other = 0; other < own.size; ++other) t.values[other] = lanes[other].value;
        }
    }
    if (kind == SYNCWARP_KIND && w.job->launch.mode == CHECK) {
        u32 joined[32] = {};
        for (u32 lane = 0; lane < own.size; ++lane)
            if (present >> lane & 1) {
                own.known[lane][lane] = ++lanes[lane].clock;
                for (u32 s = 0; s < own.size; ++s) joined[s] = std::max(joined[s], own.known[lane][s]);
            }
        for (u32 lane = 0; lane < own.size; ++lane)
            if (present >> lane & 1) memcpy(own.known[lane], joined, sizeof(joined));
    }
    for (u32 lane = 0; lane < own.size; ++lane)
        if (present >> lane & 1) wake(w, lanes[lane]);
    return true;
}

extern "C" u32 simt_collective(int kind, u32 mask, u64 value, int source, u64* values) {
    Worker& w = *worker;
    Thread& me = *w.current;
    if (!(mask >> me.lane & 1)) {
        Error& e = new_error(w, LANE_NOT_IN_MASK, CALLER);
        e.lane = me.lane;
        raise_error(w, e);
    }
    me.kind = kind, me.mask = mask, me.value = value, me.source = source & 31, me.values = values;
    me.state = AT_COLLECTIVE;
    me.site = CALLER;
    leave_ready(w, me);
    if (me.state == AT_COLLECTIVE && !complete_collective(w, me.id / 32, mask, kind)) wait(w, AT_COLLECTIVE, CALLER);
    w.spins = 0;
    return me.lanes;
}

// __activemask is answered when no lane of the warp can run: the lanes that wait for it at one place are together.
static void resolve_activemask(Worker& w, u32 warp) {
    Thread* lanes = &w.threads[warp * 32];
    u32 waiting = w.warps[warp].bits(AT_ACTIVEMASK, lanes);
    if (!waiting) return;
    void* site = lanes[__builtin_ctz(waiting)].site;
    u32 together = 0;
    for (u32 lane = 0; lane < w.warps[warp].size; ++lane)
        together |= (u32)((waiting >> lane & 1) && lanes[lane].site == site) << lane;
    for (u32 lane = 0; lane < w.warps[warp].size; ++lane)
        if (together >> lane & 1) lanes[lane].lanes = together, wake(w, lanes[lane]);
}

extern "C" u32 simt_activemask() {
    Worker& w = *worker;
    Thread& me = *w.current;
    me.state = AT_ACTIVEMASK;
    me.site = CALLER;
    leave_ready(w, me);
    if (me.state == AT_ACTIVEMASK) wait(w, AT_ACTIVEMASK, CALLER);
    return me.lanes;
}

// ---------------------------------------------------------------------------------------------- the scheduler

static void leave_kernel(Worker& w) {
    Thread& me = *w.current;
    me.state = GONE;
    w.live--;
    w.spins = 0;
    leave_ready(w, me);
    if (w.live && w.arrived == w.live) {
        w.current = nullptr;
        complete_barrier(w);
    }
    w.current = nullptr;
    u32 warp = me.id / 32;
    for (u32 lane = 0; lane < w.warps[warp].size && !w.failed; ++lane) {
        Thread& t = w.threads[warp * 32 + lane];
        if (t.state == AT_COLLECTIVE && t.mask >> me.lane & 1) complete_collective(w, warp, t.mask, t.kind);
    }
    w.current = &me;
}

static void start_thread() {
    Worker& w = *worker;
    w.job->launch.entry(w.job->launch.arguments);
    leave_kernel(w);
    go_to_scheduler(w);
    __builtin_unreachable();
}

extern "C" void simt_yield() {  // others may run; a thread that only ever yields waits for what never comes
    Worker& w = *worker;
    if (++w.spins > 1000000) raise_error(w, new_error(w, SPINNING, CALLER));
    w.ready.push_back(w.current);
    go_to_scheduler(w);
}

static void report_deadlock(Worker& w) {
    Error e = new_error(w, DEADLOCK, nullptr);
    for (u32 i = 0; i < w.num_threads; ++i) {
        Thread& t = w.threads[i];
        if (t.state == GONE) continue;
        u32 kind = t.state == AT_BARRIER ? 100 : t.kind, mask = t.state == AT_BARRIER ? 0 : t.mask, k = 0;
        while (k < e.num_waiters && (e.waiters[k].site != (u64)t.site || e.waiters[k].kind != kind || e.waiters[k].mask != mask)) ++k;
        if (k == 8) continue;
        if (k == e.num_waiters) e.waiters[e.num_waiters++] = Waiter{(u64)t.site, kind, mask, 0, t.index};
        e.waiters[k].count++;
    }
    e.site = e.waiters[0].site;
    e.thread = e.waiters[0].thread;
    raise_error(w, e);
}

static void finish_block_events(Worker& w);

static void run_block(Worker& w, u32 number) {
    Launch& launch = w.job->launch;
    u32 x = number % w.grid.x, y = number / w.grid.x % w.grid.y, z = number / w.grid.x / w.grid.y;
    w.block = {x, y, z};
    w.block_number = number;
    w.live = w.num_threads;
    w.arrived = w.barrier_total = 0;
    w.spins = 0;
    w.failed = false;
    w.unwritten_read.what = NONE;
    w.ready.clear();
    if (launch.mode == CHECK) {
        std::fill(w.barrier_clock.begin(), w.barrier_clock.end(), 0);
        w.acquired.clear();
    }
    for (u32 i = 0; i < w.warps.size(); ++i) {
        w.warps[i].size = w.warps[i].ready = std::min(32u, w.num_threads - 32 * i);
        if (launch.mode == CHECK) memset(w.warps[i].known, 0, sizeof(w.warps[i].known));
    }
    for (u32 i = 0; i < w.num_threads; ++i) {
        Thread& t = w.threads[i];
        t.index = {i % w.size.x, i / w.size.x % w.size.y, i / w.size.x / w.size.y};
        t.id = (u16)i, t.lane = i % 32, t.state = READY, t.clock = 0, t.fenced = false;
        prepare(t.context, w.stacks + i * STACK, start_thread);
        w.ready.push_back(&t);
    }
    w.random.seed(launch.seed * 0x9e3779b97f4a7c15u + number);
    while (!w.ready.empty() && !w.failed) {
        w.batch.swap(w.ready);
        w.ready.clear();
        if (launch.shuffled) std::shuffle(w.batch.begin(), w.batch.end(), w.random);
        for (Thread* t : w.batch) {
            w.current = t;
            w.switches++;
            switch_to(w.scheduler, t->context);
            w.current = nullptr;
            if (w.failed) break;
        }
    }
    w.current = nullptr;
    if (!w.failed && w.live) report_deadlock(w);
    if (!w.failed && w.unwritten_read.what) raise_error(w, w.unwritten_read);
    if (launch.mode == OBSERVE) finish_block_events(w);
    if (!w.output.empty()) {
        std::lock_guard<std::mutex> guard(w.job->lock);
        w.job->outputs[number] = std::move(w.output);
        w.output.clear();
    }
}

// A wild access that no hook announced (a plain run): leave the thread block with an error instead of the process.
static void on_fault(int, siginfo_t* info, void*) {
    if (!worker || !worker->fault) {
        signal(SIGSEGV, SIG_DFL), signal(SIGBUS, SIG_DFL);
        return;
    }
    worker->failed = true;
    Error& e = new_error(*worker, FAULT, nullptr);
    e.address = (u64)info->si_addr;
    siglongjmp(*worker->fault, 1);
}

struct Stacks { char* start; u32 guarded; };  // below each of the first stacks lies a page that nobody may touch
static std::vector<Stacks> spare_stacks;
static std::mutex spare_lock;

static Stacks take_stacks(u32 needed) {
    Stacks stacks{};
    {
        std::lock_guard<std::mutex> guard(spare_lock);
        if (!spare_stacks.empty()) stacks = spare_stacks.back(), spare_stacks.pop_back();
    }
    if (!stacks.start) stacks.start = (char*)reserve(STACK * MAX_THREADS, PROT_READ | PROT_WRITE);
    for (; stacks.guarded < needed; ++stacks.guarded) mprotect(stacks.start + stacks.guarded * STACK, GUARD, PROT_NONE);
    return stacks;
}

static void map_shared(Job& job);

static void work(Job& job) {
    Worker w{};
    Launch& launch = job.launch;
    w.job = &job;
    w.grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
    w.size = {launch.block[0], launch.block[1], launch.block[2]};
    w.num_threads = w.size.x * w.size.y * w.size.z;
    w.threads.resize(w.num_threads);
    w.warps.resize((w.num_threads + 31) / 32);
    w.barrier_clock.resize(w.num_threads);
    w.executions.resize(launch.mode == OBSERVE ? w.num_threads : 0);
    Stacks stacks = take_stacks(w.num_threads);
    w.stacks = stacks.start;
    worker = &w;
    std::vector<char> alternate(64 << 10);  // a fault may be an overflow of the fiber's own stack
    stack_t signal_stack{}, old_stack{};
    signal_stack.ss_sp = alternate.data(), signal_stack.ss_size = alternate.size();
    sigaltstack(&signal_stack, &old_stack);
    if (launch.mode != PLAIN) map_shared(job);
    sigjmp_buf fault;
    while (!job.failed) {
        u32 rank = job.next++;
        if (rank >= job.order.size()) break;
        if (sigsetjmp(fault, 1) == 0) {
            w.fault = &fault;
            w.rank = rank;
            run_block(w, job.order[rank]);
        } else {
            Error e{};
            e.what = FAULT, e.block = w.block, e.region = -1;
            if (w.current) e.thread = w.current->index;
            w.current = nullptr;
            raise_error(w, e);
        }
        w.fault = nullptr;
    }
    sigaltstack(&old_stack, nullptr);
    worker = nullptr;
    std::lock_guard<std::mutex> guard(spare_lock);
    spare_stacks.push_back(stacks);
    launch.switches += w.switches;
}

// ---------------------------------------------------------------------------------------------- what threads ask for

extern "C" {
Dim simt_thread_idx() { return worker->current->index; }
Dim simt_block_idx() { return worker->block; }
Dim simt_block_dim() { return worker->size; }
Dim simt_grid_dim() { return worker->grid; }
u32 simt_lane() { return worker->current->lane; }
long long simt_clock() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
void simt_fence() { worker->current->fenced = true; }

int simt_printf(const char* format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    worker->output += line;
    return length;
}

void simt_fail(const char* message, const char* file, int line) {
    Error& e = new_error(*worker, FAILED, CALLER);
    snprintf(e.text, sizeof(e.text), "%s", message);
    (void)file, (void)line;
    raise_error(*worker, e);
    __builtin_unreachable();
}

bool simt_exchange_if(volatile void* address, int bytes, u64* expected, u64 desired) {
    auto swap = [&](auto* p) {
        auto seen = (std::remove_reference_t<decltype(*p)>)*expected;
        bool done = __atomic_compare_exchange_n(p, &seen, (decltype(seen))desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (done && desired != *expected) worker->spins = 0;
        *expected = seen;
        return done;
    };
    return bytes == 8 ? swap((u64*)address) : bytes == 4 ? swap((u32*)address) : bytes == 2 ? swap((u16*)address) : swap((u8*)address);
}
}

// ---------------------------------------------------------------------------------------------- observing

static u16 site_number(Job& job, void* site) {
    auto [found, is_new] = job.site_numbers.try_emplace((u64)site, (u16)job.sites.size());
    if (is_new) job.sites.push_back((u64)site);
    return found->second;
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
    if (p + near >= job.tls && p < job.tls + job.shared.bytes + near) {
        for (u32 i = 0; i < job.launch.num_shared; ++i) {
            const SharedArray& a = job.launch.shared[i];
            if (p >= job.shared.original + a.offset && p < job.shared.original + a.offset + a.bytes)
                return {SHARED, (int32_t)i, p - (job.shared.original + a.offset)};
        }
        return {SHARED, -1, p - job.tls};
    }
    for (u32 i = 0; i < job.global.size(); ++i)
        if (p >= job.global[i].start && p < job.global[i].start + job.global[i].bytes)
            return {GLOBAL, (int32_t)i, p - job.global[i].start};
    return {GLOBAL, -1, (int64_t)p};
}

// A thread block's accesses, matched into warp requests and counted.
static void finish_block_events(Worker& w) {
    Job& job = *w.job;
    std::vector<u32> order(w.events.size());
    for (u32 i = 0; i < order.size(); ++i) order[i] = i;
    auto key = [&](u32 i) {
        const Event& e = w.events[i];
        return std::make_tuple(e.thread / 32, e.site, e.execution, e.access, e.space, e.thread);
    };
    std::sort(order.begin(), order.end(), [&](u32 a, u32 b) { return key(a) < key(b); });
    std::vector<u64> sectors, words;
    for (size_t first = 0, last; first < order.size(); first = last) {
        const Event& head = w.events[order[first]];
        auto same = [&](const Event& e) {
            return e.thread / 32 == head.thread / 32 && e.site == head.site && e.execution == head.execution &&
                   e.access == head.access && e.space == head.space;
        };
        for (last = first; last < order.size() && same(w.events[order[last]]); ++last) {}
        Count& c = job.counts[{job.sites[head.site], head.access, head.space}];
        c.requests++;
        c.lanes += last - first;
        for (size_t i = first; i < last; ++i) c.bytes += w.events[order[i]].bytes;
        if (head.space == GLOBAL) {  // 32-byte sectors that the request touches
            sectors.clear();
            for (size_t i = first; i < last; ++i) {
                const Event& e = w.events[order[i]];
                u64 address = e.order;
                for (u64 s = address / 32; s <= (address + e.bytes - 1) / 32; ++s) sectors.push_back(s);
            }
            std::sort(sectors.begin(), sectors.end());
            c.sectors += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
        } else if (head.space == SHARED) {  // 8 bytes a lane go in halves of a warp, 16 bytes in quarters
            u32 lanes_per_phase = head.bytes > 8 ? 8 : head.bytes > 4 ? 16 : 32;
            for (u32 phase = 0; phase < 32; phase += lanes_per_phase) {
                words.clear();
                for (size_t i = first; i < last; ++i) {
                    const Event& e = w.events[order[i]];
                    if (e.thread % 32 / lanes_per_phase * lanes_per_phase != phase) continue;
                    for (u64 word = e.order / 4; word <= (e.order + e.bytes - 1) / 4; ++word) words.push_back(word);
                }
                std::sort(words.begin(), words.end());
                words.erase(std::unique(words.begin(), words.end()), words.end());  // one word for many lanes: broadcast
                u32 per_bank[32] = {}, most = 0;
                for (u64 word : words) most = std::max(most, ++per_bank[word % 32]);
                c.conflicts += most ? most - 1 : 0;
            }
        }
    }
    for (Event e : w.events) {
        e.order = job.all_events++;
        e.site = job.sites[e.site];
        if (job.trace.size() < job.launch.max_events) job.trace.push_back(e);
    }
    w.events.clear();
    for (auto& of_thread : w.executions) std::fill(of_thread.begin(), of_thread.end(), 0);
}

static void observe(Worker& w, const char* p, u32 bytes, Access access, void* site) {
    Thread& me = *w.current;
    Place place = place_of(*w.job, p);
    if (place.region < 0 && (place.space == SHARED || in_module(*w.job, p))) place.space = OTHER;
    Event e{};
    e.site = site_number(*w.job, site);
    auto& executed = w.executions[me.id];
    if (executed.size() <= e.site) executed.resize(w.job->sites.size() + 16);
    e.execution = executed[e.site]++;
    e.order = (u64)p;  // the address, until the thread block has ended
    e.offset = place.offset, e.region = place.region, e.space = place.space;
    e.block = w.block_number, e.thread = me.id, e.bytes = (u8)bytes, e.access = access;
    w.events.push_back(e);
}

// ---------------------------------------------------------------------------------------------- checking

static bool happened_before(Worker& w, const Stamp& s, const Thread& me) {
    if (!s.block) return true;
    if (s.block != w.block_number + 1) return w.acquired.count(s.block - 1);
    if (s.thread == me.id) return true;
    return s.clock < (s.thread / 32 == me.id / 32 ? w.warps[me.id / 32].known[me.lane][s.thread % 32] : w.barrier_clock[s.thread]);
}

static Error& access_error(Worker& w, What what, void* site, const char* p, u32 bytes, Access access, Place place) {
    Error& e = new_error(w, what, site);
    e.access = access, e.bytes = bytes, e.space = place.space, e.region = place.region, e.offset = place.offset;
    e.address = (u64)p;
    return e;
}

static Dim thread_at(Dim size, u32 id) { return {id % size.x, id / size.x % size.y, id / size.x / size.y}; }

[[gnu::noinline]] static void raise_race(Worker& w, const Stamp& s, void* site, const char* p, u32 bytes, Access access, Place place, Access other) {
    Error e = access_error(w, RACE, site, p, bytes, access, place);
    u32 b = s.block - 1;
    e.other_block = {b % w.grid.x, b / w.grid.x % w.grid.y, b / w.grid.x / w.grid.y};
    e.other_thread = thread_at(w.size, s.thread);
    e.other_site = w.job->sites[s.site & ~ATOMIC_SITE];
    e.other_access = s.site & ATOMIC_SITE ? ATOMIC : other;
    raise_error(w, e);
}

static void check_cells(Worker& w, Shadow& shadow, Place place, const char* p, u32 bytes, Access access, void* site, bool expect_written, u8* written) {
    Thread& me = *w.current;
    bool is_shared = place.space == SHARED;
    u16 number = site_number(*w.job, site);
    Stamp mine{me.clock, w.block_number + 1, me.id, (u16)(number | (access == ATOMIC ? ATOMIC_SITE : 0))};
    u64 first = (u64)(p - shadow.start) / shadow.granule, last = (u64)(p - shadow.start + bytes - 1) / shadow.granule;
    for (u64 i = first; i <= last; ++i) {
        Cell& cell = shadow.cells[i];
        Place at = place;
        at.offset += (int64_t)((i - first) * shadow.granule);
        if (is_shared) {
            for (Stamp* stamp : {&cell.write, &cell.read[0], &cell.read[1]})
                if (stamp->block != mine.block) *stamp = Stamp{};  // what another thread block left
            if (!cell.write.block && access != WRITE && !w.unwritten_read.what) {
                w.unwritten_read = access_error(w, UNINITIALISED_SHARED, site, p, bytes, access, at);
                w.failed = false;
            }
        }
        if (expect_written && access != WRITE && !written[i])
            return raise_error(w, access_error(w, UNINITIALISED_GLOBAL, site, p, bytes, access, at));
        bool after_write = happened_before(w, cell.write, me), atomic_write = cell.write.site & ATOMIC_SITE;
        if (!after_write && !(access == ATOMIC && atomic_write))
            return raise_race(w, cell.write, site, p, bytes, access, at, WRITE);
        for (Stamp& read : cell.read)
            if (!happened_before(w, read, me) && (read.site & ATOMIC_SITE ? access != ATOMIC : access != READ))
                return raise_race(w, read, site, p, bytes, access, at, READ);
        if (access == READ) {
            Stamp* slot = nullptr;
            for (Stamp& read : cell.read)
                if (read.block == mine.block && read.thread == me.id && !(read.site & ATOMIC_SITE)) slot = &read;
            for (Stamp& read : cell.read)
                if (!slot && happened_before(w, read, me)) slot = &read;
            if (!slot && cell.read[1].thread / 32 == cell.read[0].thread / 32) slot = &cell.read[1];
            if (slot) *slot = mine;
        } else {
            Stamp earlier = cell.write;
            cell.write = mine;
            cell.read[0] = cell.read[1] = Stamp{};
            if (access == ATOMIC && !after_write) cell.read[0] = earlier;  // it may still race with a plain access
            if (written) written[i] = 1;
        }
    }
}

static void check(Worker& w, const char* p, u32 bytes, Access access, void* site, u32 alignment) {
    Job& job = *w.job;
    Place place = place_of(job, p);
    if (place.space == SHARED) {
        bool outside = place.region < 0 || (u64)place.offset + bytes > job.launch.shared[place.region].bytes;
        if (outside) {
            if (place.region < 0) {  // the array before it is the one that was overrun
                int64_t nearest = -1;
                for (u32 i = 0; i < job.launch.num_shared; ++i) {
                    const char* end = job.shared.original + job.launch.shared[i].offset + job.launch.shared[i].bytes;
                    if (end <= p && (nearest < 0 || (int64_t)job.launch.shared[i].offset > (int64_t)job.launch.shared[nearest].offset)) nearest = i;
                }
                place.region = (int32_t)nearest;
                if (nearest >= 0) place.offset = p - (job.shared.original + job.launch.shared[nearest].offset);
            }
            return raise_error(w, access_error(w, OUTSIDE_SHARED, site, p, bytes, access, place));
        }
        if ((u64)p % alignment) return raise_error(w, access_error(w, MISALIGNED, site, p, bytes, access, place));
        return check_cells(w, job.shared, place, p, bytes, access, site, false, nullptr);
    }
    if (place.region >= 0 && (u64)place.offset + bytes <= job.global[place.region].bytes) {
        const Region& region = job.launch.regions[place.region];
        if ((u64)p % alignment) return raise_error(w, access_error(w, MISALIGNED, site, p, bytes, access, place));
        if (access != READ) job.global[place.region].dirty = true;
        if (bytes < region.granule) return;
        return check_cells(w, job.global[place.region], place, p, bytes, access, site, region.expect_written, region.written);
    }
    if (place.region < 0) {
        for (u32 i = 0; i < job.global.size(); ++i)  // in the empty space round a tensor?
            if (p >= job.global[i].arena && p < job.global[i].arena + job.global[i].arena_bytes)
                place.region = (int32_t)i, place.offset = p - job.global[i].start;
        if (place.region < 0 && in_module(job, p)) return;
    }
    raise_error(w, access_error(w, OUTSIDE_GLOBAL, site, p, bytes, access, place));
}

static void accessed(const volatile void* address, u32 bytes, Access access, void* site, u32 alignment) {
    Worker* w = worker;
    if (!w || !w->current || !bytes) return;
    const char* p = (const char*)address;
    if (p >= w->stacks && p < w->stacks + STACK * MAX_THREADS) return;  // registers and local memory
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
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { range_accessed(p, bytes, READ, CALLER); }
void __tsan_write_range(void* p, size_t bytes) { range_accessed(p, bytes, WRITE, CALLER); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

void* simt_memcpy(void* to, const void* from, size_t bytes) {
    range_accessed(from, bytes, READ, CALLER);
    range_accessed(to, bytes, WRITE, CALLER);
    return memcpy(to, from, bytes);
}
void* simt_memset(void* to, int value, size_t bytes) {
    range_accessed(to, bytes, WRITE, CALLER);
    return memset(to, value, bytes);
}

void simt_atomic(const volatile void* address, int bytes) {
    Worker& w = *worker;
    accessed(address, (u32)bytes, ATOMIC, CALLER, (u32)bytes);
    if (w.job->launch.mode == CHECK && place_of(*w.job, (const char*)address).space == GLOBAL) {
        auto& released = w.job->releases;
        auto found = released.find((u64)address);
        if (found != released.end()) w.acquired.insert(found->second.begin(), found->second.end());
        if (w.current->fenced) {
            std::set<u32>& all = released[(u64)address];
            all.insert(w.acquired.begin(), w.acquired.end());
            all.insert(w.block_number);
        }
    }
    if (++w.spins % 256 == 0) simt_yield();
}
}

// ---------------------------------------------------------------------------------------------- a launch

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
    job.tls = job.shared.start = low;
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
        job.global.push_back(s);
    }
    if (launch.mode != CHECK) return;
    for (u32 i = 0; i < launch.num_pointers; ++i) {
        const Shadow& s = job.global[launch.pointer_regions[i]];
        *(u64*)launch.arguments[launch.pointers[i]] += (u64)s.start - (u64)s.original;
    }
}

static void unmap(Job& job) {
    for (Shadow& s : job.global) {
        if (!s.arena) continue;
        if (s.dirty) memcpy(s.original, s.start, s.bytes);
        munmap(s.arena, s.arena_bytes);
        munmap(s.cells, s.cell_bytes);
    }
    if (job.shared.cells) munmap(job.shared.cells, job.shared.cell_bytes);
}

template <class T>
static T* hand_over(const std::vector<T>& values) {
    T* out = (T*)malloc(std::max<size_t>(1, values.size() * sizeof(T)));
    if (!values.empty()) memcpy(out, values.data(), values.size() * sizeof(T));
    return out;
}

extern "C" void simt_launch(Launch* launch) {
    Job job(*launch);
    u64 blocks = (u64)launch->grid[0] * launch->grid[1] * launch->grid[2];
    job.order.resize(blocks);
    for (u32 i = 0; i < blocks; ++i) job.order[i] = i;
    if (launch->shuffled) std::shuffle(job.order.begin(), job.order.end(), std::mt19937_64(launch->seed));
    if (launch->mode != PLAIN) map_tensors(job);

    static std::mutex signals;  // launches from several Python threads share the process's signal handlers
    static int launches = 0;
    static struct sigaction old_segv, old_bus;
    {
        std::lock_guard<std::mutex> guard(signals);
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        if (launches++ == 0) sigaction(SIGSEGV, &action, &old_segv), sigaction(SIGBUS, &action, &old_bus);
    }
    std::vector<std::thread> helpers;
    u32 workers = launch->mode == PLAIN ? std::min<u64>(launch->workers, blocks) : 1;
    for (u32 i = 1; i < workers; ++i) helpers.emplace_back([&] { work(job); });
    work(job);
    for (std::thread& helper : helpers) helper.join();
    {
        std::lock_guard<std::mutex> guard(signals);
        if (--launches == 0) sigaction(SIGSEGV, &old_segv, nullptr), sigaction(SIGBUS, &old_bus, nullptr);
    }

    if (launch->mode != PLAIN) unmap(job);
    std::vector<Count> counts;
    for (auto& [key, c] : job.counts) {
        std::tie(c.site, c.access, c.space) = key;
        counts.push_back(c);
    }
    launch->counts = hand_over(counts), launch->num_counts = counts.size();
    launch->events = hand_over(job.trace), launch->num_events = job.trace.size(), launch->all_events = job.all_events;
    std::string output;
    for (u32 number : job.order) {
        auto found = job.outputs.find(number);
        if (found != job.outputs.end()) output += found->second;
    }
    launch->output = hand_over(std::vector<char>(output.begin(), output.end()));
    launch->num_output = output.size();
}

extern "C" void simt_free(Launch* launch) { free(launch->counts), free(launch->events), free(launch->output); }

extern "C" u64 simt_sizeof_launch() { return sizeof(Launch); }
