// Events from outside a kernel's code: faults, the clock, Python's signals.
#pragma once

#include <errno.h>
#include <fenv.h>
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

// Find the code of the compiled file that holds `entry`. A fiber in that code holds no lock, so it may lose its turn.
static void find_code(Job& job) {
    auto look = [](dl_phdr_info* info, size_t, void* data) {
        Job& job = *(Job*)data;
        u64 entry = (u64)job.launch.entry;
        Code code{};
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& part = info->dlpi_phdr[i];
            u64 start = info->dlpi_addr + part.p_vaddr, end = start + part.p_memsz;
            if (entry >= start && entry < end) code.start = start, code.end = end;
            if (part.p_type == PT_LOAD && part.p_flags & PF_W) code.variables = start, code.variables_end = end;
        }
        if (code.end) job.code = code;
        return code.end ? 1 : 0;
    };
    static std::unordered_map<u64, Code> known;
    std::lock_guard<std::mutex> guard(process_lock);
    auto [found, is_new] = known.try_emplace((u64)job.launch.entry);
    if (is_new) {
        dl_iterate_phdr(look, &job);
        found->second = job.code;
    }
    job.code = found->second;
}

// ---------------------------------------------------------------------------------------------- faults

static int tick_signal() { return SIGRTMAX - 4; }

static struct sigaction handlers_before[_NSIG];  // of the signals that launches take, while there is a launch

// Handle a signal that does not concern the launch as the process would without a launch.
static void pass_on(int number, siginfo_t* info, void* state) {
    static thread_local bool passing = false;  // the other handler has this one for its own earlier one
    const struct sigaction& before = handlers_before[number];
    bool by_default = passing || before.sa_handler == SIG_DFL || (before.sa_handler == SIG_IGN && info->si_code > 0);
    if (by_default) {
        signal(number, SIG_DFL);
        if (info->si_code <= 0) raise(number);  // else the faulty instruction is executed again
        return;
    }
    if (before.sa_handler == SIG_IGN) return;
    passing = true;
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, state);
    else before.sa_handler(number);
    passing = false;
}

// End the launch, not the process, after a wild access that no hook announced (a plain run), a division by zero,
// __builtin_trap or abort.
static void on_fault(int number, siginfo_t* info, void* state) {
    Worker* w = worker;
    char* address = (char*)info->si_addr;
    bool is_sent = info->si_code == SI_USER;  // by somebody else
    if (copying && !is_sent) siglongjmp(*copying, 1);
    if (!w || is_sent) return pass_on(number, info, state);
    w->fault = is_division(number, state) ? DIVISION_BY_ZERO : is_trap(number) || number == SIGABRT ? TRAP : FAULT;
    if (w->fault == FAULT && w->current) {
        char* stack = w->block->stacks.start + w->current->id * STACK;
        if (address >= stack - GUARD && address < stack + GUARD) w->fault = STACK_OVERFLOW;
    }
    bool meets = w->current && w->current->state == AT_COLLECTIVE;  // the last lane of a meeting works for all lanes
    w->fault_site = w->landing ? (u64)w->landing : meets ? (u64)w->current->site : program_counter(state) + 1;
    fesetround(FE_TONEAREST);  // on aarch64, a handler starts in the mode of what it interrupts
    siglongjmp(w->escape, 1);
}

// ---------------------------------------------------------------------------------------------- the clock

// Nanoseconds. A tick that comes LATE says that the machine was busy with other processes: the time limit leaves that out.
constexpr u64 FIRST_TICK = 8'000'000, TICK = 2'000'000, BUSY_TICK = 200'000, ASK = 100'000'000, LATE = 10'000'000;
// Barriers are progress, but a loop through one may have no end: a thread must end within so many times the time limit.
constexpr u64 BARRIERS_ALONE = 10;

struct Timer {
    timer_t timer{};
    pid_t process = 0;  // a forked child does not inherit timers

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

// A fiber of a plain launch that has run through two ticks goes to the end of the queue. No other part of the runtime can
// end the turn of a loop without calls. A loop may poll a volatile or plain variable until another thread of the grid
// stores to it, or may have no end. Ctrl-C and the time limit must end such a loop as well.
static void on_tick(int number, siginfo_t* info, void* state) {
    if (info->si_code != SI_TIMER) return pass_on(number, info, state);
    Worker* w = worker;
    if (!w) return;
    int saved = errno;
    Job& job = *w->job;
    u64 time = now();
    if (w->milestones != w->seen_milestones) w->seen_milestones = w->milestones, job.last_milestone = time;
    if (w->ends != w->seen_ends) w->seen_ends = w->ends, job.last_end = time;
    u64 since = time - w->ticked;
    w->ticked = time;
    if (since > LATE) job.last_milestone += since, job.last_end += since;
    u64 limit = job.launch.time_limit;
    bool hangs = time > job.last_milestone + limit || time > job.last_end + BARRIERS_ALONE * limit;
    if (hangs && !job.stop) job.stop = HANG;
    bool ask = time > w->asked_at + ASK;
    if (ask) w->asked_at = time;
    if (ask || job.stop) w->wanted = true;
    u64 at = program_counter(state);
    bool in_kernel = w->current && at >= job.code.start && at < job.code.end;
    bool long_turn = job.launch.mode == PLAIN && w->switches == w->seen_switches;
    w->seen_switches = w->switches;
    if (in_kernel && (long_turn || w->wanted)) {
        if (w->clock_preempted_at == ~0ull) timer.set(BUSY_TICK, BUSY_TICK);
        w->clock_preempted_at = w->switches;
        w->current->site = (void*)(at + 1);
        w->block->ready.push_back(w->current);
        fesetround(FE_TONEAREST);
        switch_to(w->current->context, w->scheduler);
    }
    errno = saved;
}

// ---------------------------------------------------------------------------------------------- Python's signals

extern "C" {
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
int PyErr_CheckSignals();
}

// Python's handlers of signals run in the process's first thread, between turns of the kernel's threads. One that raises
// (KeyboardInterrupt, by default) ends the launch, and simt_launch returns with its exception.
static void ask_python(Job& job) {
    if (job.stop || (pid_t)syscall(SYS_gettid) != getpid()) return;
    Worker* w = worker;  // a handler may launch a kernel
    worker = nullptr;
    timer.set(0, 0);
    PyEval_RestoreThread(job.python);
    if (PyErr_CheckSignals()) job.stop = INTERRUPTED;
    job.python = PyEval_SaveThread();
    worker = w;
    if (w) timer.set(TICK, TICK);
}

// Faults and ticks of the clock belong to the launches while at least one runs. The last launch restores the handlers.
class Signals {
    static inline int launches = 0;  // launches from several Python threads share the process's handlers

    static void take(int number, void (*handler)(int, siginfo_t*, void*), int flags) {
        struct sigaction action{};
        action.sa_sigaction = handler;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | flags;
        sigaction(number, &action, &handlers_before[number]);
    }
    static void give_back(int number, void (*handler)(int, siginfo_t*, void*)) {
        struct sigaction action{};
        sigaction(number, nullptr, &action);  // a handler that was installed meanwhile stays
        if (action.sa_sigaction == handler) sigaction(number, &handlers_before[number], nullptr);
    }
    static void give_back() {
        for (int number : FAULTS) give_back(number, on_fault);
        give_back(tick_signal(), on_tick);
    }
    static void before_fork() { process_lock.lock(); }
    static void in_parent() { process_lock.unlock(); }
    static void in_child() {  // without the threads that launch, or wait for their turn
        new (&use_ended) std::condition_variable;
        in_use.clear();
        if (launches) give_back();
        launches = 0;
        process_lock.unlock();
    }

public:
    Signals() {
        static int registered = pthread_atfork(before_fork, in_parent, in_child);
        (void)registered;
        std::lock_guard<std::mutex> guard(process_lock);
        if (launches++) return;
        for (int number : FAULTS) take(number, on_fault, SA_ONSTACK);
        take(tick_signal(), on_tick, SA_RESTART);
    }
    ~Signals() {
        std::lock_guard<std::mutex> guard(process_lock);
        if (launches && --launches == 0) give_back();
    }
};
