// One access happens before another by program order, by a barrier of the thread block or the grid, by __syncwarp within a
// warp, or by a flag. A flag is an address that a thread writes, by an atomic or a volatile store, after __threadfence().
// Another thread reads the flag by an atomic or a volatile load. The accesses of the first thread before its fence then
// happen before the later accesses of the second.
#pragma once

#include "block.h"

static bool has_acquired(const std::shared_ptr<const Acquired>& known, const Stamp& s, u32 clock) {
    if (!known) return false;
    auto found = known->find(s.block - 1);
    return found != known->end() && clock < (*found->second)[s.thread];
}

[[gnu::always_inline]] static inline bool happened_before(const Job& job, const Block& b, const Stamp& s, const Thread& me) {
    if (!s.block) return true;
    if (s.block == b.number + 1) {
        if (s.thread == me.id) return true;
        bool own_warp = s.thread / 32 == me.id / 32;
        if (s.clock < (own_warp ? b.warps[me.id / 32].known[me.lane][s.thread % 32] : b.barrier_clock[s.thread]))
            return true;
    } else if (!job.grid_clocks.empty()) {
        auto found = job.grid_clocks.find(s.block - 1);
        if (found != job.grid_clocks.end() && s.clock < found->second[s.thread]) return true;
    }
    return has_acquired(me.acquired, s, s.clock);
}

// Whether `me` has acquired `s`, an atomic that follows a fence: a thread that reads a flag comes after its writer.
static bool handed_over(const Stamp& s, const Thread& me) {
    return s.atomic && (has_acquired(me.acquired, s, s.clock - 1) || has_acquired(me.seen, s, s.clock - 1));
}

// The later of both clocks of each thread. It is mostly `a` or `b`, and then no copy is made.
static Clocks later(const Clocks& a, const Clocks& b) {
    auto covers = [](const Clocks& one, const Clocks& other) {
        return !other || one == other || (one && std::equal(one->begin(), one->end(), other->begin(), std::greater_equal<u32>()));
    };
    if (covers(a, b)) return a;
    if (covers(b, a)) return b;
    auto joined = std::make_shared<std::vector<u32>>(*a);
    for (size_t i = 0; i < joined->size(); ++i) (*joined)[i] = std::max((*joined)[i], (*b)[i]);
    return joined;
}

static void acquire(std::shared_ptr<const Acquired>& known, const std::shared_ptr<const Acquired>& more) {
    if (!more || known == more) return;
    if (!known) {
        known = more;
        return;
    }
    std::shared_ptr<Acquired> joined;  // made if `more` has anything new
    for (const auto& [block, clocks] : *more) {
        auto own = known->find(block);
        Clocks latest = own == known->end() ? clocks : later(own->second, clocks);
        if (own != known->end() && own->second == latest) continue;
        if (!joined) joined = std::make_shared<Acquired>(*known);
        (*joined)[block] = latest;
    }
    if (joined) known = joined;
}

// After a barrier, each of `threads` has acquired all flags that any of them had acquired before.
static void share_acquired(Thread* const* threads, u32 number) {
    for (auto knowledge : {&Thread::acquired, &Thread::seen}) {
        std::shared_ptr<const Acquired> all, last;  // neighbours mostly know the same
        for (u32 i = 0; i < number; ++i)
            if (threads[i]->*knowledge != last) acquire(all, last = threads[i]->*knowledge);
        for (u32 i = 0; i < number; ++i) threads[i]->*knowledge = all;
    }
}

// What happened before the flags that `me` has read happens before what follows.
static void confirm_seen(Thread& me) { acquire(me.acquired, me.seen); }

static void fence(Thread& me) {
    me.fenced_in_block = ++me.clock;
    if (!me.in_block) me.fenced = me.clock;
    confirm_seen(me);
}

// The accesses of `me` before its clock was `fenced`, and all accesses that `me` knows to have happened before.
static std::shared_ptr<const Acquired> known_to(const Block& b, const Thread& me, u32 fenced) {
    auto clocks = std::make_shared<std::vector<u32>>(b.barrier_clock);
    const Warp& warp = b.warps[me.id / 32];
    for (u32 lane = 0; lane < warp.size; ++lane)
        (*clocks)[me.id / 32 * 32 + lane] = std::max((*clocks)[me.id / 32 * 32 + lane], warp.known[me.lane][lane]);
    (*clocks)[me.id] = fenced;
    std::shared_ptr<const Acquired> known = std::make_shared<Acquired>(Acquired{{b.number, clocks}});
    acquire(known, me.acquired);
    return known;
}

// All accesses of `me` until now become known, as if by a fence. Flags that follow still need a fence of their own.
static void release_all(std::shared_ptr<const Acquired>& known, const Block& b, Thread& me) {
    acquire(known, known_to(b, me, ++me.clock));
}

// Whether a flag orders what follows only if a fence or an acquire follows its read.
static bool asks_for_acquire(const Job& job) { return !(job.launch.ignored >> NO_ACQUIRE & 1); }

// A flag at `address` is read.
static void read_flag(Worker& w, const void* address) {
    Thread& me = *w.current;
    for (auto* releases : {&w.job->releases, &w.block->releases}) {
        if (releases->empty() || (me.in_block && releases == &w.job->releases)) continue;
        auto found = releases->find((u64)address);
        if (found != releases->end()) acquire(asks_for_acquire(*w.job) ? me.seen : me.acquired, found->second);
    }
}

// A flag at `address` is written.
static void write_flag(Worker& w, const void* address) {
    Thread& me = *w.current;
    Block& b = *w.block;
    if (me.fenced && !me.in_block) acquire(w.job->releases[(u64)address], known_to(b, me, me.fenced));
    if (me.fenced_in_block && w.job->launch.has_scopes)
        acquire(b.releases[(u64)address], known_to(b, me, me.fenced_in_block));
}

// An atomic at `address` follows volatile stores without a fence: a thread that reads the atomic's value expects these
// stores, and nothing orders them.
static void pass_unfenced(Worker& w, const void* address) {
    Job& job = *w.job;
    u32 block = w.block->number;
    auto& known = job.releases[(u64)address];
    if (known && known->count(block)) return;
    if (!job.no_clocks) job.no_clocks = std::make_shared<std::vector<u32>>(job.num_threads);
    acquire(known, std::make_shared<Acquired>(Acquired{{block, job.no_clocks}}));
}
