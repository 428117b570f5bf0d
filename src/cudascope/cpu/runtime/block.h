// A launch under way: its threads and warps, the thread blocks in flight, the OS threads that run them.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
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

constexpr int MAX_THREADS = SIMT_MAX_THREADS;  // arguments/launch_shape.py
constexpr u32 BUDGET = 4096, LEAST_BUDGET = 256;  // accesses of a thread that stores nothing, until others have a turn

enum State : u8 { READY, AT_BARRIER, AT_NUMBERED, AT_PHASE, AT_GRID, AT_COLLECTIVE, AT_ACTIVEMASK, GONE };

// A thread learns from flags how far each thread of a thread block had come.
using Clocks = std::shared_ptr<const std::vector<u32>>;
using Acquired = std::map<u32, Clocks>;

// An asynchronous copy to shared memory, from its issue to the wait that completes it.
struct Copy {
    char* to;
    const char* from;
    u32 bytes, zeros;  // of the bytes, the last so many are 0 and are not read
    u64 batch;  // how many its thread had committed before
    void* site;
};

// A bulk copy under way.
struct Bulk : simt::BulkCopy { void* site; u16 thread; u64 batch; };

struct MatrixPiece { const char* address; u64 batch; void* site; };  // 16 bytes that a product of this batch reads

// The bulk copies and the products of matrices of a thread.
struct Asynchronous {
    std::vector<Bulk> bulk_stores;  // under way, in their order
    u64 bulk_batches = 0;  // that it has committed
    Clocks covered;  // how far each thread had come, as far as it knew at its proxy fence
    std::vector<simt::Product> products;  // under way, in their order
    std::deque<MatrixPiece> operands;  // of a checked launch
    u64 product_batches = 0;
    bool products_fenced = false;
};

struct Thread {
    Context context;
    Dim index;
    u16 id;
    u8 lane;
    State state;
    bool carry;
    u32 clock, fenced;  // counts this thread's synchronisations; its value at the last fence, 0: no fence yet
    u32 fenced_in_block;  // the same, with fences of block scope
    bool in_block;  // its atomics and fences have block scope
    void* site;  // of the call in which the thread waits
    Collective collective;
    int line;
    u32 mask, lanes, source;
    u64 value, result;  // of a warp function
    void* payload;  // of this lane, for a meeting of lanes
    void (*complete)(void** payloads);
    std::vector<Copy> copies;  // under way, in their order
    u64 batches;  // of copies that it has committed
    std::unique_ptr<Asynchronous> asynchronous;  // of a thread that has begun anything of the kind
    u32 proxy_fenced;  // its clock at its last fence.proxy.async
    u64 reads, progress, clock_reads;  // reads: atomics, and volatile reads that no hook sees
    const char* polled;  // the address of its last atomic or volatile read
    void* poll_site;  // and the line
    u32 polled_bytes;
    bool polls_volatile, only_polls;  // only_polls: it has made no other access since
    bool gives_up;  // it waits for a phase until the thread block can do nothing else
    const void* reported;  // where the sanitizer has just told of a misaligned access: the access's own hook follows
    const void* misaligned;  // a reference that it has formed to a type whose alignment the address lacks
    u32 budget, accesses;  // of a watched launch: accesses until others have their turn
    const char* read_at;  // of a checked launch: its last access, if it was a plain read; and the line of that read
    void* read_site;
    std::shared_ptr<const Acquired> acquired, seen;  // seen: by flags read with no fence since, if check() asks for fences
    u8 loads;  // the number of the load under way, if its value is used by stores only
    u64 stored;  // the bits of such loads whose values it has stored
    u64 path;  // of an observed launch: on which it has called the last function of the PTX
    u32 body, returned;  // where a `return` that it has executed stands (collectives.h); 0: none
    void* passed;  // the place of its last __syncthreads() or numbered barrier
};

// A barrier that the kernel has made itself: as many arrivals as are expected end a phase of it.
struct Phases {
    u32 expected, pending;
    u64 number;  // phases that have ended
    std::shared_ptr<const Acquired> arriving, arrived;  // what happened before the arrivals; before those of ended phases
    std::vector<std::pair<const Thread*, Copy>> copies;  // that the phase waits for
    std::vector<Bulk> bulk;
    int64_t bytes = 0;  // that shall land in bulk
};

struct Met { void* site; Collective collective; u32 mask, lanes; };  // where lanes have met others

// How far the lanes of a warp have been together, in a checked launch (collectives.h).
struct Steps {
    u32 without[32];  // the lanes that have met others since they last met this lane
    Met last[32];  // of each lane that has met others
    Met apart[2];  // the first meeting whose lanes came from two places, since all were in one
    bool explained;  // a finding says why lanes are missing
    void begin() { memset(without, 0, sizeof(without)), apart[0] = apart[1] = {}, explained = false; }
};

struct Warp {
    u32 size, live, ready;  // lanes there are, that have not left, that can run
    u32 known[32][32];  // known[t][s]: what lane s did before this clock happens before what lane t does now
    Steps steps;
    u32 bits(State state, const Thread* threads) const {
        u32 set = 0;
        for (u32 lane = 0; lane < size; ++lane) set |= (threads[lane].state == state) << lane;
        return set;
    }
};

// The last field is one word that `mark` puts together in a register. Written bit by bit, the word was a tenth of the time
// of a checked launch, because a processor waits when it reads a word just after writing parts of the word.
struct Stamp {  // block 0: no access yet
    u32 clock, block;
    union {
        u64 mark;
        struct {
            u64 thread : 16, site : 16, wrote : 1, atomic : 1, is_volatile : 1;
            u64 swaps : 1, is_flag : 1;  // an atomicCAS; a volatile store that need not be ordered
            u64 is_async : 1;  // of the async proxy
            u64 in_block : 1;  // an atomic of block scope
        };
    };
    static u64 marked(u16 thread, u16 site, bool wrote, bool atomic, bool is_volatile, bool swaps, bool is_async,
                      bool in_block) {
        return thread | (u64)site << 16 | (u64)wrote << 32 | (u64)atomic << 33 | (u64)is_volatile << 34 | (u64)swaps << 35 |
               (u64)is_async << 37 | (u64)in_block << 38;
    }
};
struct Cell { Stamp write, read[2]; };  // the last access to an element, as much as a race needs

struct Flight {  // one end of a copy
    const char* start;
    u32 bytes;
    Access access;
    u32 block;
    u16 thread;
    void* site;
    const char* source;  // as in `Announced`
};

struct Shadow {  // what is kept of a region, or of a thread block's shared arrays together
    char* start = nullptr;  // where its memory lies during the launch
    u64 bytes = 0;
    u32 granule = 1;
    Cell* cells = nullptr;  // [bytes / granule]
    char *arena = nullptr, *original = nullptr;  // the copy with the empty space round it; the caller's memory
    u64 arena_bytes = 0, cell_bytes = 0;
    char* pages = nullptr;  // what of the arena is memory
    u64 page_bytes = 0;
    bool constant = false, stays = false, spoiled = false;  // spoiled: the empty space became memory
    bool is_kept = false, is_viewed = false;  // there is a snapshot; an argument leads to a later element than the first
    u64 cell_at(u64 offset) const {  // a shift is faster than a division
        return granule & (granule - 1) ? offset / granule : offset >> __builtin_ctz(granule);
    }
    char* snapshot() const { return arena + (start - pages); }  // what the kernel found there
    void keep() { memcpy(snapshot(), start, bytes), is_kept = true; }
};

struct Stacks { char* start; u32 threads, guarded; };  // below each of the first is a page without access

struct NumberedBarrier {
    u32 arrived = 0;
    std::vector<Thread*> waiting;
    std::shared_ptr<const Acquired> known;  // what happens before those that it frees
};

struct Block {  // a thread block in flight
    Dim index;
    u32 number = 0, rank = 0, live = 0, arrived = 0, at_grid = 0;
    u32 yields = 0, turn = 0;  // turns.h
    u64 rounds = 0, rounds_since = 0, repeats_since = 0;
    std::vector<u64> seen;
    int barrier_total = 0;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Thread*> ready, batch;
    std::vector<u32> barrier_clock;  // of each thread at the last barrier
    Clocks covered;  // how far the stores of each thread may be read through the async proxy, by the last barrier
    std::map<u32, NumberedBarrier> numbered_barriers;  // at which threads have arrived
    std::unordered_map<u64, Phases> phases;  // by address
    std::unordered_map<u64, std::shared_ptr<const Acquired>> releases;  // as in `Job`, to threads of this thread block
    std::vector<Event> events;
    std::vector<std::vector<u32>> executions;  // [thread][site]
    std::vector<u32> executed;  // [thread][counted part of the kernel]
    std::vector<std::unordered_map<u64, u8>> issues;  // [warp]: how many lanes have come to a part on a path
    bool stores_volatile = false;  // to global memory
    std::string output;
    std::mt19937_64 random;
    std::map<std::pair<u16, u8>, Error> unused;  // races with loads: the first of each thread and number, until it stores
    Error unwritten_read{};  // a read of shared memory before any write: if a write follows, it is a race
    Stacks stacks{};
    Shadow shared;
    bool gives_up() const {
        return std::any_of(threads.begin(), threads.end(), [](const Thread& t) { return t.gives_up; });
    }
};

enum Touched : u8 { TOUCHED_READ = 1, TOUCHED_READ_FIRST = 2, TOUCHED_WRITTEN = 4 };
struct Found { u32 rank; Error error; };
struct Site { void* site; u16 number; };

struct Pending {  // an access that was announced: what becomes of it is settled when its thread goes on
    char* address;
    u32 bytes = 0;
    u8 before[16];
    bool drop;  // it shall not have happened
    char* empty;  // then: the pages of the empty space that it makes memory of, if it does
    u64 empty_bytes;
    bool first_read;  // not a store, but a read that met an atomicCAS: no finding if its value is compared and swapped
    Error race;  // else: with another store, which is the weaker finding if both store the same
};

struct Code { u64 start, end, variables, variables_end; };  // a compiled file in memory: its instructions, and its variables

struct Worker;

// The part of a launch that its workers share.
struct Job {
    Launch& launch;
    Dim grid, size;
    u32 num_blocks, num_threads;
    std::vector<u32> order;  // of the thread blocks, if it is not their own
    std::atomic<u64> next{0};
    u32 at(u64 rank) const { return order.empty() ? (u32)rank : order[rank]; }
    std::atomic<bool> failed{false};
    std::atomic<u32> stop{NOTHING};  // HANG or INTERRUPTED: end as soon as can be
    std::atomic<u64> last_milestone{0};  // when a thread last started, ended or passed a barrier, in nanoseconds
    std::atomic<u64> last_end{0};  // when a thread last started or ended
    void* python = nullptr;  // the caller's state of Python, while the launch has let go of its lock
    std::mutex lock;
    std::vector<Found> found;
    std::map<u32, std::string> outputs;
    Code code{};
    std::vector<Shadow> tensors;  // by Region
    u64 first_copy = ~0ull, last_copy = 0;  // the least and the greatest address in copies of tensors
    // launches with several workers:
    u32 running = 0;  // workers that have not ended
    std::set<const Worker*> in_vain;  // those that have found that nothing changes any more
    u64 memory_in_vain = 0, rounds_in_vain = 0;  // the state of memory then, and how often all of them have found it
    // launches with one worker:
    std::atomic<u32> ended_blocks{0};
    u32 at_grid = 0;
    std::unordered_map<u32, std::vector<u32>> grid_clocks;  // by thread block, at the last grid barrier
    std::vector<u64> sites;
    std::unordered_map<u64, u16> site_numbers;
    Site recent_sites[256]{};  // some of them, found at once
    std::vector<Event> trace;
    std::vector<u64> executed, issued;  // [counted part of the kernel], by warps: translate/ptx/counters.py
    u64 num_issues = 0;  // in `Block::issues` of all thread blocks
    bool too_many_issues = false;  // then `issued` is not complete
    std::vector<std::vector<u8>> touched;  // [tensor][sector], in bits of Touched
    u64 num_events = 0;  // in the trace or past its limit
    std::map<std::tuple<u64, u32, u32>, Count> counts;
    std::unordered_map<u64, std::shared_ptr<const Acquired>> releases;  // by the address of a flag
    Clocks no_clocks;  // of a thread block that was seen, and of which nothing is ordered
    std::vector<u8> loads;  // by site: the number of a load whose value is used by stores only
    std::set<u64> first_reads;  // the sites of plain reads whose values an atomicCAS then compared
    std::unordered_multimap<u64, Flight> in_flight;  // by the 16 bytes in which it lies
    u64 module_page = ~0ull;  // none yet
    std::map<u64, u64> heap, freed;  // what the kernel has allocated, and what it has freed: start and bytes

    explicit Job(Launch& l)
        : launch(l), grid{l.grid[0], l.grid[1], l.grid[2]}, size{l.block[0], l.block[1], l.block[2]},
          num_blocks(l.grid[0] * l.grid[1] * l.grid[2]), num_threads(l.block[0] * l.block[1] * l.block[2]) {}
};

struct Worker {  // an OS thread. It runs thread blocks one after another, or in turns if they wait for each other.
    Job* job;
    Context scheduler;
    Thread* current = nullptr;
    Block* block = nullptr;
    std::vector<std::unique_ptr<Block>> blocks;  // all that were made
    std::vector<Block*> idle;
    std::deque<Block*> waiting;  // in flight, and stepped aside
    u64 progress = 0;  // counts threads that ended, atomics that changed a value, and barriers of the grid
    u64 waits = 0, polls = 0;  // waits: of threads for each other. polls: atomics, volatile reads, sleeps
    u64 memory = 0, memory_since = ~0ull;  // the state of memory, and the progress when it was taken
    u64 milestones = 0, seen_milestones = 0, switches = 0, seen_switches = 0;
    u64 ends = 0, seen_ends = 0;  // of thread blocks that have started, and of threads that have ended
    std::atomic<bool> wanted{false};  // the scheduler wants to go on soon: a signal may have come, or the launch stops
    u64 asked_at = 0, ticked = 0;  // when Python was last asked for signals; the last tick of the clock
    u64 clock_preempted_at = ~0ull;
    void* landing = nullptr;  // the site of the copy that is landing, or of the atomic under way
    Pending pending{};
    sigjmp_buf escape;  // out of a fault
    u64 fault_site = 0;
    FindingKind fault = FAULT;
};

// runtime.cpp starts and ends launches and thread blocks, and has the memory of a launch. calls.cpp has all that a kernel
// calls while it runs. They are compiled at the same time, and share these:
extern "C" {  // of the current thread, as kernels read them
extern __thread __attribute__((tls_model("initial-exec"))) Dim threadIdx, blockIdx, blockDim, gridDim;
}
#pragma GCC visibility push(hidden)
extern __thread Worker* worker __attribute__((tls_model("initial-exec")));
extern std::mutex process_lock;  // of the data that all launches of the process share
void leave_ready(Worker& w, Block& b, Thread& t);
void complete_barrier(Worker& w, Block& b);
bool complete_meeting(Worker& w, Block& b, const Thread& one);
void arrive_at_grid(Worker& w, Block& b);
void complete_grid(Worker& w);
void abandon_copies(Worker& w);
void abandon_bulk_stores(Worker& w);
void release_operands(Worker& w, u64 batch);
void check_landed(Worker& w, const Block& b);
void finish_block_events(Worker& w, Block& b);
Error waiting_error(Worker& w, FindingKind finding, const std::vector<Block*>& blocks);
#pragma GCC visibility pop

static u16 site_number(Job& job, void* site) {
    Site& recent = job.recent_sites[(u64)site % std::size(job.recent_sites)];
    if (recent.site == site) return recent.number;
    auto [found, is_new] = job.site_numbers.try_emplace((u64)site, (u16)std::min<size_t>(job.sites.size(), 0xffff));
    if (is_new && job.sites.size() <= 0xffff) job.sites.push_back((u64)site);
    recent = {site, found->second};
    return found->second;
}

// The index of the block, or thread, with this number in a grid, or block, of this size.
static Dim index_at(Dim size, u32 number) {
    return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

static void settle(Worker& w);

static void go_to_scheduler(Worker& w) {
    settle(w);
    switch_to(w.current->context, w.scheduler);
}

static Error new_error(Worker& w, FindingKind finding, void* site) {
    Error error{};
    error.finding = finding;
    if (w.block) error.block = w.block->index;
    error.region = -1;
    error.site = (u64)site;
    error.count = 1;
    if (w.current) error.thread = w.current->index;
    return error;
}

static bool ends_launch(const Job& job, u32 finding) { return SIMT_ENDINGS >> finding & 1 || !job.launch.keep_going; }

// Keep what was found. If it ends the launch, a fiber does not return from here.
static void raise_error(Worker& w, Error error) {
    Job& job = *w.job;
    Block* b = w.block;
    bool ignored = job.launch.ignored >> error.finding & 1, ends = !ignored && ends_launch(job, error.finding);
    if (b && b->unwritten_read.finding) {
        Error earlier = b->unwritten_read;
        bool is_a_race = error.finding == RACE && (!job.launch.keep_going || earlier.site == error.other_site);
        if (is_a_race || ends) b->unwritten_read.finding = NOTHING;
        if (!is_a_race && ends) raise_error(w, earlier);
    }
    if (ignored) return;
    {
        std::lock_guard<std::mutex> guard(job.lock);
        Found* same = nullptr;
        for (Found& f : job.found)
            if (f.error.finding == error.finding && f.error.site == error.site && f.error.other_site == error.other_site)
                same = &f;
        if (same) same->error.count++, same->error.apart = std::max(same->error.apart, error.apart);
        else job.found.push_back({b ? b->rank : 0, error});
    }
    if (!ends) return;
    job.failed = true;
    if (w.current) go_to_scheduler(w);
}

static void raise_argument(Worker& w, void* site, const char* format, ...) {
    Error e = new_error(w, ARGUMENT, site);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(e.text, sizeof(e.text), format, arguments);
    va_end(arguments);
    raise_error(w, e);
}

static void settle(Worker& w) {
    Pending& p = w.pending;
    if (!p.bytes) return;
    u32 bytes = p.bytes;
    p.bytes = 0;
    if (p.drop) {
        memcpy(p.address, p.before, bytes);
        if (p.empty) madvise(p.empty, p.empty_bytes, MADV_DONTNEED);
        return;
    }
    if (p.first_read) {
        if (!w.job->first_reads.count(p.race.site)) raise_error(w, p.race);
        return;
    }
    if (memcmp(p.address, p.before, bytes) == 0) p.race.finding = SAME_VALUE;
    raise_error(w, p.race);
}

static void wait(Worker& w, State state, void* site) {
    Thread& me = *w.current;
    me.state = state;
    me.site = site;
    me.accesses = 0;
    w.waits++;
    go_to_scheduler(w);
}

// This thread comes in `state` to where it may have to wait.
static Thread& arrive(Worker& w, State state, Collective collective, int line, void* site) {
    Thread& me = *w.current;
    me.collective = collective, me.mask = 0, me.line = line;
    me.state = state, me.site = site;
    leave_ready(w, *w.block, me);
    return me;
}

// Wait in `state`, at a barrier that a kernel makes itself or that has a number.
static void wait_apart(Worker& w, State state, Collective collective, void* site) {
    arrive(w, state, collective, 0, site);
    wait(w, state, site);
}

static void wake(Worker& w, Block& b, Thread& thread) {
    if (thread.state == READY) return;
    thread.state = READY;
    b.warps[thread.id / 32].ready++;
    if (&thread != w.current) b.ready.push_back(&thread);
}

static void count(Worker& w, void* site, Access access) {
    if (w.job->launch.mode == PLAIN) return;
    Count& c = w.job->counts[{(u64)site, access, OTHER}];
    c.requests++;
}

static void let_others_run(Worker& w) {
    w.block->ready.push_back(w.current);
    go_to_scheduler(w);
}

// This thread has freed those that waited with it, and goes on before them. While the states of a thread block are compared
// (turns.h), it goes on when its turn comes: the state shall not depend on which thread a shuffled order has put last.
[[gnu::noinline]] static void go_on_in_order(Worker& w) {
    if (w.job->launch.shuffled && !w.block->seen.empty()) let_others_run(w);
}

// A barrier has been passed. That is no step forward in a loop that waits for another thread block (turns.h).
static void pass_barrier(Worker& w) {
    if (w.block->repeats_since != w.progress) w.milestones++;
}

static void note_poll(Worker& w, const char* p, u32 bytes, bool is_volatile, void* site) {
    Thread& me = *w.current;
    me.polled = p, me.polled_bytes = bytes, me.polls_volatile = is_volatile, me.poll_site = site, me.only_polls = true;
    w.polls++;
}
