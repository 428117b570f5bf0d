// A launch under way: its threads and warps, the thread block that an OS thread runs, what all of these share.
#pragma once

#include <setjmp.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "fibers.h"
#include "launch.h"

#define CALLER __builtin_return_address(0)

constexpr int MAX_THREADS = SIMT_MAX_THREADS, MAX_SHARED = SIMT_MAX_SHARED;  // cuda/limits.py

enum State : u8 { READY, AT_BARRIER, AT_COLLECTIVE, AT_ACTIVEMASK, GONE };

// An asynchronous copy to shared memory, from its issue to the wait that completes it.
struct Copy {
    char* to;
    const char* from;
    u32 bytes, zeros;  // of the bytes, the last so many are 0 and are not read
    u64 batch;  // how many its thread had committed before
    void* site;
};

struct Thread {
    Context context;
    Dim index;
    u16 id;
    u8 lane;
    State state;
    bool fenced;
    u32 clock;  // counts this thread's synchronisations
    void* site;  // where it waits, and for what
    Collective collective;
    int source, line;
    u32 mask, lanes;
    u64 value;
    u64* values;
    void* payload;  // what it brings to a meeting
    void (*complete)(void** payloads);
    std::vector<Copy> copies;  // under way, in their order
    u64 batches;  // of copies that it has committed
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

struct Flight { const char* start; u32 bytes; Access access; u32 block; u16 thread; void* site; };  // one end of a copy

struct Shadow {  // what is kept of a region, or of all shared arrays together
    char* start = nullptr;  // where its memory lies during the launch
    u64 bytes = 0;
    u32 granule = 1;
    Cell* cells = nullptr;  // [bytes / granule]
    char *arena = nullptr, *original = nullptr;  // the empty space round it; where it lay before (shared: the anchor)
    u64 arena_bytes = 0, cell_bytes = 0;
    bool dirty = false;
};

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
    u64 num_events = 0;  // in the trace or past its limit
    std::map<std::tuple<u64, u32, u32>, Count> counts;
    std::vector<Shadow> tensors;  // by Region
    Shadow shared;
    std::unordered_map<u64, std::set<u32>> releases;
    std::unordered_multimap<u64, Flight> in_flight;  // by the 16 bytes in which it lies
    u64 module_page = ~0ull;  // none yet
    explicit Job(Launch& launch) : launch(launch) {}
};

struct Worker {  // an OS thread, which runs one thread block after another
    Job* job;
    Context scheduler;
    char* stacks = nullptr;
    Thread* current = nullptr;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Thread*> ready, batch;
    Dim block, size, grid;
    u32 rank = 0, block_number = 0, num_threads = 0, live = 0, arrived = 0;
    int barrier_total = 0;
    u64 progress = 0;  // who waited, ended, or changed a value by an atomic
    bool failed = false;
    std::mt19937_64 random;
    std::string output;
    std::vector<u32> barrier_clock;  // of each thread at the last barrier
    std::set<u32> acquired;  // thread blocks whose work happens before this one's
    std::vector<Event> events;  // of this thread block
    std::vector<std::vector<u32>> executions;  // [thread][site]
    sigjmp_buf* escape = nullptr;  // out of a fault
    u64 fault_site = 0;
    Finding fault = FAULT;
    Error unwritten_read{};  // a read of shared memory before any write: if a write follows, it is a race
};

static thread_local Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;

static u16 site_number(Job& job, void* site) {
    auto [found, is_new] = job.site_numbers.try_emplace((u64)site, (u16)job.sites.size());
    if (is_new) job.sites.push_back((u64)site);
    return found->second;
}

static void go_to_scheduler(Worker& w) { switch_to(w.current->context, w.scheduler); }

static Error& new_error(Worker& w, Finding finding, void* site) {
    w.failed = true;
    static thread_local Error error;
    error = Error{};
    error.finding = finding;
    error.block = w.block;
    error.region = -1;
    error.site = (u64)site;
    if (w.current) error.thread = w.current->index;
    return error;
}

// Keep the error of the earliest thread block and give up this one. From a fiber this does not return.
static void raise_error(Worker& w, const Error& new_error) {
    const Error& error = w.unwritten_read.finding && new_error.finding != RACE ? w.unwritten_read : new_error;
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
