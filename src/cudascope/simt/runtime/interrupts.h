// What reaches a launch from outside its code: faults, the clock, Ctrl-C.
#pragma once

#include <errno.h>
#include <link.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"

static u64 now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1'000'000'000 + (u64)t.tv_nsec;
}

static u64 program_counter([[maybe_unused]] void* state) {
#if defined(__x86_64__)
    return (u64)((ucontext_t*)state)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (u64)((ucontext_t*)state)->uc_mcontext.pc;
#else
    return 0;
#endif
}

// The code of the compiled file that holds `entry`: where a fiber may be stopped, for it is in no lock there.
static void find_code(Job& job) {
    auto look = [](dl_phdr_info* info, size_t, void* data) {
        Job& job = *(Job*)data;
        u64 entry = (u64)job.launch.entry;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            u64 start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = start + info->dlpi_phdr[i].p_memsz;
            if (entry >= start && entry < end) job.code_start = start, job.code_end = end;
        }
        return job.code_end ? 1 : 0;
    };
    static std::mutex lock;
    static std::unordered_map<u64, std::pair<u64, u64>> known;
    std::lock_guard<std::mutex> guard(lock);
    auto [found, is_new] = known.try_emplace((u64)job.launch.entry);
    if (is_new) {
        dl_iterate_phdr(look, &job);
        found->second = {job.code_start, job.code_end};
    }
    std::tie(job.code_start, job.code_end) = found->second;
}

// ---------------------------------------------------------------------------------------------- faults

// Of a thread that runs no kernel: it has touched a tensor whose pages a launch has taken, and goes on when they are back.
static bool wait_for_tensor(const char* address) {
    bool taken = false;
    for (bool still = true; still;) {
        std::unique_lock<std::mutex> guard(use_lock);  // whoever holds it touches no tensor
        still = std::any_of(in_use.begin(), in_use.end(), [&](const InUse& u) {
            return address >= u.start && address < u.end && !u.shared;
        });
        guard.unlock();
        taken |= still;
        if (still) usleep(200);
    }
    return taken;
}

// A wild access that no hook announced (a plain run), a division by zero, __builtin_trap or abort: leave the launch with an
// error instead of the process.
static void on_fault(int number, siginfo_t* info, void* state) {
    Worker* w = worker;
    char* address = (char*)info->si_addr;
    if (!w) {
        if (number != SIGSEGV || !wait_for_tensor(address)) signal(number, SIG_DFL);
        return;
    }
    w->fault = number == SIGFPE ? DIVIDED_BY_ZERO : number == SIGILL || number == SIGABRT ? STOPPED : FAULT;
    if (w->fault == FAULT && w->current) {
        char* stack = w->block->stacks.start + w->current->id * STACK;
        if (address >= stack - GUARD && address < stack + GUARD) w->fault = STACK_OVERFLOW;
    }
    bool meets = w->current && w->current->state == AT_COLLECTIVE;  // in what a meeting's last lane does for all
    w->fault_site = w->landing ? (u64)w->landing : meets ? (u64)w->current->site : program_counter(state) + 1;
    siglongjmp(w->escape, 1);
}

// ---------------------------------------------------------------------------------------------- the clock

constexpr u64 FIRST_TICK = 10'000'000, TICK = 2'000'000, BUSY_TICK = 200'000;  // nanoseconds

static int tick_signal() { return SIGRTMAX - 4; }

struct Timer {
    timer_t timer{};
    pid_t process = 0;  // a forked child has none of its parent's

    void set(u64 first, u64 then) {
        if (process != getpid()) {
            sigevent event{};
            event.sigev_notify = SIGEV_THREAD_ID;
            event.sigev_signo = tick_signal();
            event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
            if (timer_create(CLOCK_MONOTONIC, &event, &timer)) return;
            process = getpid();
        }
        auto time = [](u64 ns) { return timespec{(time_t)(ns / 1'000'000'000), (long)(ns % 1'000'000'000)}; };
        itimerspec when{time(then), time(first)};
        timer_settime(timer, 0, &when, nullptr);
    }
    ~Timer() {
        if (process == getpid()) timer_delete(timer);
    }
};
static thread_local Timer timer;

// A fiber of a plain launch that has run through two ticks goes to the end of the queue: it may wait for what another does.
static void on_tick(int, siginfo_t*, void* state) {
    Worker* w = worker;
    if (!w) return;
    int saved = errno;
    Job& job = *w->job;
    u64 time = now();
    if (w->milestones != w->seen_milestones) w->seen_milestones = w->milestones, job.last_milestone = time;
    else if (time > job.last_milestone + job.launch.time_limit && !job.stop) job.stop = HANGING;
    u64 at = program_counter(state);
    bool in_kernel = w->current && at >= job.code_start && at < job.code_end;
    bool long_turn = job.launch.mode == PLAIN && w->switches == w->seen_switches;
    w->seen_switches = w->switches;
    if (in_kernel && (long_turn || job.stop)) {
        if (w->clock_preempted_at == ~0ull) timer.set(BUSY_TICK, BUSY_TICK);
        w->clock_preempted_at = w->switches;
        w->current->site = (void*)(at + 1);
        w->block->ready.push_back(w->current);
        switch_to(w->current->context, w->scheduler);
    }
    errno = saved;
}

// ---------------------------------------------------------------------------------------------- Ctrl-C

static std::atomic<Job*> interruptible{nullptr};  // the launch of the process's first thread
static struct sigaction old_interrupt;

static void on_interrupt(int number, siginfo_t* info, void* state) {
    Job* job = interruptible;
    if (job) job->stop = INTERRUPTED;
    if (old_interrupt.sa_flags & SA_SIGINFO) old_interrupt.sa_sigaction(number, info, state);
    else if (old_interrupt.sa_handler != SIG_DFL && old_interrupt.sa_handler != SIG_IGN) old_interrupt.sa_handler(number);
}

// While it lives, signals are the launch's.
class Signals {
    static constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    static inline std::mutex lock;  // launches from several Python threads share the process's handlers
    static inline int launches = 0;
    static inline struct sigaction old_faults[std::size(FAULTS)], old_tick;
    bool takes_interrupt;

    static struct sigaction action(void (*handler)(int, siginfo_t*, void*), int flags) {
        struct sigaction made{};
        made.sa_sigaction = handler;
        made.sa_flags = SA_SIGINFO | flags;
        return made;
    }

public:
    explicit Signals(Job& job) {
        std::lock_guard<std::mutex> guard(lock);
        if (launches++ == 0) {
            auto fault = action(on_fault, SA_ONSTACK | SA_NODEFER), tick = action(on_tick, SA_RESTART | SA_NODEFER);
            for (size_t i = 0; i < std::size(FAULTS); ++i) sigaction(FAULTS[i], &fault, &old_faults[i]);
            sigaction(tick_signal(), &tick, &old_tick);
        }
        takes_interrupt = (pid_t)syscall(SYS_gettid) == getpid();
        if (!takes_interrupt) return;
        auto interrupt = action(on_interrupt, SA_RESTART | SA_ONSTACK);
        interruptible = &job;
        sigaction(SIGINT, &interrupt, &old_interrupt);
        if (old_interrupt.sa_handler == SIG_IGN) sigaction(SIGINT, &old_interrupt, nullptr);
    }
    ~Signals() {
        std::lock_guard<std::mutex> guard(lock);
        if (takes_interrupt) sigaction(SIGINT, &old_interrupt, nullptr), interruptible = nullptr;
        if (--launches) return;
        for (size_t i = 0; i < std::size(FAULTS); ++i) sigaction(FAULTS[i], &old_faults[i], nullptr);
        sigaction(tick_signal(), &old_tick, nullptr);
    }
};
