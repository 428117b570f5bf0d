// Part of simt_runtime.cpp: barriers, the functions of a warp, and who runs next.
#pragma once

#include "simt_block.h"

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
        w.progress++;
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
    w.progress++;
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
    w.progress++;
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

// A thread that does nothing but atomics and yields while nobody makes progress waits for what never comes.
static void spin(Worker& w, void* site) {
    Thread& me = *w.current;
    if (me.progress != w.progress) me.progress = w.progress, me.spins = 0;
    if (++me.spins > std::max<u64>(100'000, 10'000'000 / w.live)) raise_error(w, new_error(w, SPINNING, site));
}

static void let_others_run(Worker& w) {
    w.ready.push_back(w.current);
    go_to_scheduler(w);
}

extern "C" void simt_yield() {
    spin(*worker, CALLER);
    let_others_run(*worker);
}

static void report_deadlock(Worker& w) {
    Error e = new_error(w, DEADLOCK, nullptr);
    for (u32 i = 0; i < w.num_threads; ++i) {
        Thread& t = w.threads[i];
        if (t.state == GONE) continue;
        u32 kind = t.state == AT_BARRIER ? 100 : t.kind, mask = t.state == AT_BARRIER ? 0 : t.mask, k = 0;
        auto same = [&](const Waiter& w) { return w.site == (u64)t.site && w.kind == kind && w.mask == mask; };
        while (k < e.num_waiters && !same(e.waiters[k])) ++k;
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
        t.atomics = t.spins = t.progress = 0;
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

// A wild access that no hook announced (a plain run), a division by zero, __builtin_trap or abort: leave the thread block
// with an error instead of the process.
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
static void on_fault(int number, siginfo_t*, [[maybe_unused]] void* state) {
    if (!worker || !worker->fault) {
        signal(number, SIG_DFL);
        return;
    }
    worker->fault_what = number == SIGFPE ? DIVIDED_BY_ZERO : number == SIGILL || number == SIGABRT ? STOPPED : FAULT;
#ifdef __x86_64__
    worker->fault_site = (u64)((ucontext_t*)state)->uc_mcontext.gregs[REG_RIP] + 1;
#endif
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
            e.what = w.fault_what, e.block = w.block, e.region = -1, e.site = w.fault_site;
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
        auto value = (decltype(seen))desired;
        bool done = __atomic_compare_exchange_n(p, &seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (done && desired != *expected) worker->progress++;
        *expected = seen;
        return done;
    };
    if (bytes == 8) return swap((u64*)address);
    if (bytes == 4) return swap((u32*)address);
    return bytes == 2 ? swap((u16*)address) : swap((u8*)address);
}
}
