// Where threads wait for each other: barriers and the functions of a warp. Whoever arrives last frees the others.
#pragma once

#include <cstring>

#include "block.h"

// ---------------------------------------------------------------------------------------------- barrier

static void check_barrier(Worker& w, Block& b) {
    if (b.live < w.job->num_threads) {
        const Thread *gone = nullptr, *waiting = nullptr;
        for (u32 i = w.job->num_threads; i--;) (b.threads[i].state == GONE ? gone : waiting) = &b.threads[i];
        Error e = new_error(w, w.job->launch.may_return ? LEFT_BEFORE_BARRIER : BARRIER_NOT_REACHED, waiting->site);
        e.thread = gone->index, e.other_thread = waiting->index;
        e.num_waiters = b.live;
        raise_error(w, e);
    }
    const Thread* first = nullptr;
    for (const Thread& t : b.threads) {
        if (t.state == GONE) continue;
        if (!first) first = &t;
        if (t.line == first->line) continue;
        Error e = new_error(w, BARRIERS_DIFFER, t.site);
        e.thread = t.index, e.other_thread = first->index, e.other_site = (u64)first->site, e.other_block = b.index;
        return raise_error(w, e);
    }
}

// What any thread has acquired by a flag, `threads` have after a barrier.
static void share_acquired(Thread* const* threads, u32 number);

// All threads of a thread block have come together: what each did happens before what any does next.
static void join_clocks(Worker& w, Block& b) {
    for (u32 i = 0; i < w.job->num_threads; ++i) b.barrier_clock[i] = ++b.threads[i].clock;
    for (u32 i = 0; i < w.job->num_threads; ++i)
        for (u32 lane = 0; lane < b.warps[i / 32].size; ++lane)
            b.warps[i / 32].known[i % 32][lane] = b.barrier_clock[i / 32 * 32 + lane];
    for (Thread& t : b.threads) {  // a fence.proxy.async of one is one for all that come after the barrier
        if (!t.covered) continue;
        b.covered.resize(t.covered->size());
        for (size_t i = 0; i < b.covered.size(); ++i) b.covered[i] = std::max(b.covered[i], (*t.covered)[i]);
        t.covered = nullptr;
    }
    std::vector<Thread*> all;
    for (Thread& t : b.threads) all.push_back(&t);
    share_acquired(all.data(), (u32)all.size());
}

static void complete_barrier(Worker& w, Block& b) {
    if (w.job->launch.mode == CHECK) {
        check_barrier(w, b);
        if (w.job->failed) return;
        join_clocks(w, b);
    }
    for (Thread& t : b.threads)
        if (t.state == AT_BARRIER) t.value = b.barrier_total, wake(w, b, t);
    b.barrier_total = 0;
    b.arrived = 0;
    w.milestones++;
}

// __activemask is answered when no lane of the warp can run: the lanes that wait for it at one place are together.
static void resolve_activemask(Worker& w, Block& b, u32 warp) {
    Thread* lanes = &b.threads[warp * 32];
    u32 waiting = b.warps[warp].bits(AT_ACTIVEMASK, lanes);
    if (!waiting) return;
    void* site = lanes[__builtin_ctz(waiting)].site;
    u32 together = 0;
    for (u32 lane = 0; lane < b.warps[warp].size; ++lane)
        together |= (u32)((waiting >> lane & 1) && lanes[lane].site == site) << lane;
    for (u32 lane = 0; lane < b.warps[warp].size; ++lane)
        if (together >> lane & 1) lanes[lane].lanes = together, wake(w, b, lanes[lane]);
}

static void leave_ready(Worker& w, Block& b, Thread& t) {
    u32 warp = t.id / 32;
    if (--b.warps[warp].ready == 0) resolve_activemask(w, b, warp);
}

extern "C" int simt_barrier(bool predicate, int line) {
    Worker& w = *worker;
    Block& b = *w.block;
    Thread& me = *w.current;
    me.collective = SYNCTHREADS, me.mask = 0, me.line = line;
    b.barrier_total += predicate;
    me.state = AT_BARRIER;
    me.site = CALLER;
    leave_ready(w, b, me);
    if (++b.arrived == b.live) {
        count(w, me.site, BARRIER);
        complete_barrier(w, b);
        w.progress++;
    } else {
        wait(w, AT_BARRIER, CALLER);
    }
    return (int)me.value;
}

// ---------------------------------------------------------------------------------------------- grid barrier

// If all threads of all thread blocks that have not ended wait here, free them.
static void complete_grid(Worker& w) {
    Job& job = *w.job;
    if (job.at_grid + job.ended_blocks < job.num_blocks) return;
    job.at_grid = 0;
    for (Block* b : w.waiting) {
        if (!b->at_grid) continue;
        if (job.launch.mode == CHECK) {
            join_clocks(w, *b);
            job.grid_clocks[b->number] = b->barrier_clock;
        }
        b->at_grid = 0;
        for (Thread& t : b->threads)
            if (t.state == AT_GRID) wake(w, *b, t);
    }
    w.milestones++;
    w.progress++;
}

static void arrive_at_grid(Worker& w, Block& b) {
    if (!b.live || b.at_grid != b.live) return;
    if (w.job->launch.mode == CHECK) check_barrier(w, b);
    w.job->at_grid++;
}

// The launch has one worker and all its thread blocks fit at once: simt/limits.py.
extern "C" void simt_grid_sync(int line) {
    Worker& w = *worker;
    Block& b = *w.block;
    Thread& me = *w.current;
    me.collective = SYNCGRID, me.mask = 0, me.line = line;
    me.state = AT_GRID;
    me.site = CALLER;
    if (b.at_grid++ == 0) count(w, me.site, BARRIER);
    leave_ready(w, b, me);
    arrive_at_grid(w, b);
    wait(w, AT_GRID, CALLER);
}

// ---------------------------------------------------------------------------------------------- warp functions

static bool needs_whole_warp(Collective collective) { return collective == PRODUCT || collective == MATRIX; }

static void raise_lanes_missing(Worker& w, const Thread& t, u32 present) {
    Error e = new_error(w, LANES_MISSING, t.site);
    e.thread = t.index, e.lane = (u32)__builtin_ctz(~present), e.waiters[0].collective = t.collective;
    raise_error(w, e);
}

// If every lane of `mask` that has not left waits with this mask in this function, give out the results.
static bool complete_collective(Worker& w, Block& b, u32 warp, u32 mask, Collective collective) {
    Thread* lanes = &b.threads[warp * 32];
    Warp& own = b.warps[warp];
    if (mask == ~0u && own.ready) return false;  // somebody is on his way
    u32 present = 0;
    for (u32 lane = 0; lane < own.size; ++lane) {
        Thread& t = lanes[lane];
        if (!(mask >> lane & 1) || t.state == GONE) continue;
        if (t.state != AT_COLLECTIVE || t.mask != mask || t.collective != collective) return false;
        present |= 1u << lane;
        const Thread& first = lanes[__builtin_ctz(present)];
        if (t.complete != first.complete || t.line != first.line) return false;
    }
    if (!present) return false;
    Thread& first = lanes[__builtin_ctz(present)];
    if (needs_whole_warp(collective) && present != ~0u) return raise_lanes_missing(w, first, present), false;
    Access counted = collective == SYNCWARP ? BARRIER : collective == PRODUCT ? MMA : SHUFFLE;
    if (collective != MATRIX) count(w, first.site, counted);  // its accesses are
    if (first.complete) {
        void* payloads[32] = {};
        for (u32 lane = 0; lane < own.size; ++lane)
            if (present >> lane & 1) payloads[lane] = lanes[lane].payload;
        first.complete(payloads);
    }
    for (u32 lane = 0; lane < own.size; ++lane) {
        Thread& t = lanes[lane];
        if (!(present >> lane & 1)) continue;
        t.lanes = present;
        if (collective == SHFL) {
            bool there = present >> t.source & 1;
            if (!there && w.job->launch.mode == CHECK) {
                Error e = new_error(w, mask >> t.source & 1 ? LANE_GONE : LANE_NOT_IN_MASK, t.site);
                e.thread = t.index;
                e.lane = t.source;
                raise_error(w, e);
                if (w.job->failed) return false;
            }
            t.values[t.source] = there ? lanes[t.source].value : t.value;
        } else if (t.values) {
            for (u32 other = 0; other < own.size; ++other) t.values[other] = lanes[other].value;
        }
    }
    if (collective == SYNCWARP && w.job->launch.mode == CHECK) {
        u32 joined[32] = {};
        Thread* together[32];
        u32 number = 0;
        for (u32 lane = 0; lane < own.size; ++lane)
            if (present >> lane & 1) {
                together[number++] = &lanes[lane];
                own.known[lane][lane] = ++lanes[lane].clock;
                for (u32 s = 0; s < own.size; ++s) joined[s] = std::max(joined[s], own.known[lane][s]);
            }
        for (u32 lane = 0; lane < own.size; ++lane)
            if (present >> lane & 1) memcpy(own.known[lane], joined, sizeof(joined));
        share_acquired(together, number);
    }
    for (u32 lane = 0; lane < own.size; ++lane)
        if (present >> lane & 1) wake(w, b, lanes[lane]);
    return true;
}

static u32 arrive(Worker& w, Collective collective, u32 mask, void* site) {
    Block& b = *w.block;
    Thread& me = *w.current;
    if (!(mask >> me.lane & 1)) {
        Error e = new_error(w, LANE_NOT_IN_MASK, site);
        e.lane = me.lane;
        raise_error(w, e);
        mask |= 1u << me.lane;
    }
    me.collective = collective, me.mask = mask;
    me.state = AT_COLLECTIVE;
    me.site = site;
    leave_ready(w, b, me);
    if (me.state == AT_COLLECTIVE && !complete_collective(w, b, me.id / 32, mask, collective))
        wait(w, AT_COLLECTIVE, site);
    w.progress++;
    return me.lanes;
}

extern "C" u32 simt_collective(Collective collective, u32 mask, u64 value, int source, u64* values) {
    Thread& me = *worker->current;
    me.value = value, me.source = source & 31, me.values = values;
    me.complete = nullptr, me.line = 0;
    return arrive(*worker, collective, mask, CALLER);
}

extern "C" u32 simt_meet(Collective collective, u32 mask, void* payload, void (*complete)(void**), int line) {
    Thread& me = *worker->current;
    me.values = nullptr;
    me.payload = payload, me.complete = complete, me.line = line;
    return arrive(*worker, collective, mask, CALLER);
}

extern "C" u32 simt_activemask() {
    Worker& w = *worker;
    Block& b = *w.block;
    Thread& me = *w.current;
    me.state = AT_ACTIVEMASK;
    me.site = CALLER;
    leave_ready(w, b, me);
    if (me.state == AT_ACTIVEMASK) wait(w, AT_ACTIVEMASK, CALLER);
    return me.lanes;
}
