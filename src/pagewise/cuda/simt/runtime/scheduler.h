// Who runs next: the threads of a thread block as fibers that take turns, thread blocks one after another.
#pragma once

#include <signal.h>

#include "async_copies.h"
#include "collectives.h"

static void leave_kernel(Worker& w) {
    Thread& me = *w.current;
    check_nothing_pending(w);
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
        if (t.state == AT_COLLECTIVE && t.mask >> me.lane & 1) complete_collective(w, warp, t.mask, t.collective);
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

static void report_deadlock(Worker& w) {
    Error e = new_error(w, DEADLOCK, nullptr);
    for (u32 i = 0; i < w.num_threads; ++i) {
        Thread& t = w.threads[i];
        if (t.state == GONE) continue;
        u32 k = 0;
        auto same = [&](const Waiter& w) {
            return w.site == (u64)t.site && w.collective == t.collective && w.mask == t.mask;
        };
        while (k < e.num_waiters && !same(e.waiters[k])) ++k;
        if (k == 8) continue;
        if (k == e.num_waiters) e.waiters[e.num_waiters++] = Waiter{(u64)t.site, t.collective, t.mask, 0, t.index};
        e.waiters[k].count++;
    }
    e.site = e.waiters[0].site;
    e.thread = e.waiters[0].thread;
    raise_error(w, e);
}

static void run_block(Worker& w, u32 number) {
    Launch& launch = w.job->launch;
    u32 x = number % w.grid.x, y = number / w.grid.x % w.grid.y, z = number / w.grid.x / w.grid.y;
    w.block = {x, y, z};
    w.block_number = number;
    w.live = w.num_threads;
    w.arrived = w.barrier_total = 0;
    w.failed = false;
    w.unwritten_read.finding = NOTHING;
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
        t.atomics = t.spins = t.progress = t.batches = 0;
        for (const Copy& copy : t.copies) touch_down(w, t, copy);
        t.copies.clear();
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
            switch_to(w.scheduler, t->context);
            w.current = nullptr;
            if (w.failed) break;
        }
    }
    w.current = nullptr;
    if (!w.failed && w.live) report_deadlock(w);
    if (!w.failed && w.unwritten_read.finding) raise_error(w, w.unwritten_read);
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
    if (!worker || !worker->escape) {
        signal(number, SIG_DFL);
        return;
    }
    worker->fault = number == SIGFPE ? DIVIDED_BY_ZERO : number == SIGILL || number == SIGABRT ? STOPPED : FAULT;
#ifdef __x86_64__
    worker->fault_site = (u64)((ucontext_t*)state)->uc_mcontext.gregs[REG_RIP] + 1;
#endif
    siglongjmp(*worker->escape, 1);
}

// ---------------------------------------------------------------------------------------------- an OS thread

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
    sigjmp_buf escape;
    while (!job.failed) {
        u32 rank = job.next++;
        if (rank >= job.order.size()) break;
        if (sigsetjmp(escape, 1) == 0) {
            w.escape = &escape;
            w.rank = rank;
            run_block(w, job.order[rank]);
        } else {
            Error e{};
            e.finding = w.fault, e.block = w.block, e.region = -1, e.site = w.fault_site;
            if (w.current) e.thread = w.current->index;
            w.current = nullptr;
            raise_error(w, e);
        }
        w.escape = nullptr;
    }
    sigaltstack(&old_stack, nullptr);
    worker = nullptr;
    std::lock_guard<std::mutex> guard(spare_lock);
    spare_stacks.push_back(stacks);
}
