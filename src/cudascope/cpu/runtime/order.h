// One access happens before another by program order, by a barrier of the thread block or the grid, by __syncwarp within a
// warp, or by a flag. A flag is an address that a thread writes, by an atomic or a volatile store, after __threadfence().
// Another thread reads the flag by an atomic or a volatile load. The accesses of the first thread before its fence then
// happen before the later accesses of the second.
#pragma once

#include "block.h"

static bool has_acquired(const Acquired& acquired, u32 block, u32 thread, u32 clock) {
    auto found = acquired.find(block);
    return found != acquired.end() && clock < (*found->second)[thread];
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
    return me.acquired && has_acquired(*me.acquired, s.block - 1, s.thread, s.clock);
}

// Whether `me` has acquired `s`, an atomic that follows a fence: a thread that reads a flag comes after its writer.
static bool handed_over(const Stamp& s, const Thread& me) {
    return s.atomic && me.acquired && has_acquired(*me.acquired, s.block - 1, s.thread, s.clock - 1);
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

static void share_acquired(Thread* const* threads, u32 number) {
    std::shared_ptr<const Acquired> all, last;  // neighbours mostly know the same
    for (u32 i = 0; i < number; ++i)
        if (threads[i]->acquired != last) acquire(all, last = threads[i]->acquired);
    for (u32 i = 0; i < number; ++i) threads[i]->acquired = all;
}

static void fence(Thread& me) { me.fenced = ++me.clock; }

// The accesses of `me` before its last fence, and all accesses that `me` knows to have happened before.
static std::shared_ptr<const Acquired> known_to(const Block& b, const Thread& me) {
    auto clocks = std::make_shared<std::vector<u32>>(b.barrier_clock);
    const Warp& warp = b.warps[me.id / 32];
    for (u32 lane = 0; lane < warp.size; ++lane)
        (*clocks)[me.id / 32 * 32 + lane] = std::max((*clocks)[me.id / 32 * 32 + lane], warp.known[me.lane][lane]);
    (*clocks)[me.id] = me.fenced;
    std::shared_ptr<const Acquired> known = std::make_shared<Acquired>(Acquired{{b.number, clocks}});
    acquire(known, me.acquired);
    return known;
}

// All accesses of `me` until now become known, as if by a fence. Flags that follow still need a fence of their own.
static void release_all(std::shared_ptr<const Acquired>& known, const Block& b, Thread& me) {
    u32 fenced = me.fenced;
    fence(me);
    acquire(known, known_to(b, me));
    me.fenced = fenced;
}

// A flag at `address` is read, written, or both at once.
static void pass_flag(Worker& w, const void* address, bool reads, bool writes) {
    Thread& me = *w.current;
    auto& releases = w.job->releases;
    if (reads && !releases.empty()) {
        auto found = releases.find((u64)address);
        if (found != releases.end()) acquire(me.acquired, found->second);
    }
    if (writes && me.fenced) acquire(releases[(u64)address], known_to(*w.block, me));
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
