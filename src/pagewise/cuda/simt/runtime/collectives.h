// Where threads wait for each other: barriers and the functions of a warp. Whoever arrives last frees the others.
#pragma once

#include <cstring>

#include "block.h"

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
    for (Thread& t : w.threads)
        if (t.state == AT_BARRIER) t.value = w.barrier_total, wake(w, t);
    w.barrier_total = 0;
    w.arrived = 0;
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

static void leave_ready(Worker& w, Thread& t) {
    u32 warp = t.id / 32;
    if (--w.warps[warp].ready == 0) resolve_activemask(w, warp);
}

extern "C" int simt_barrier(bool predicate, int line) {
    Worker& w = *worker;
    Thread& me = *w.current;
    me.collective = SYNCTHREADS, me.mask = 0, me.line = line;
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

static bool needs_whole_warp(Collective collective) { return collective == PRODUCT || collective == MATRIX; }

static void raise_lanes_missing(Worker& w, const Thread& t, u32 present) {
    Error& e = new_error(w, LANES_MISSING, t.site);
    e.thread = t.index, e.lane = (u32)__builtin_ctz(~present), e.waiters[0].collective = t.collective;
    raise_error(w, e);
}

// If every lane of `mask` that has not left waits with this mask in this function, give out the results.
static bool complete_collective(Worker& w, u32 warp, u32 mask, Collective collective) {
    Thread* lanes = &w.threads[warp * 32];
    Warp& own = w.warps[warp];
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
    if (collective != MATRIX) count(w, first.site, collective == SYNCWARP ? BARRIER : collective == PRODUCT ? MMA : SHUFFLE);
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
                Error& e = new_error(w, mask >> t.source & 1 ? LANE_GONE : LANE_NOT_IN_MASK, t.site);
                e.thread = t.index;
                e.lane = t.source;
                raise_error(w, e);
                return false;
            }
            t.values[t.source] = there ? lanes[t.source].value : t.value;
        } else if (t.values) {
            for (u32 other = 0; other < own.size; ++other) t.values[other] = lanes[other].value;
        }
    }
    if (collective == SYNCWARP && w.job->launch.mode == CHECK) {
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

static u32 arrive(Worker& w, Collective collective, u32 mask, void* site) {
    Thread& me = *w.current;
    if (!(mask >> me.lane & 1)) {
        Error& e = new_error(w, LANE_NOT_IN_MASK, site);
        e.lane = me.lane;
        raise_error(w, e);
    }
    me.collective = collective, me.mask = mask;
    me.state = AT_COLLECTIVE;
    me.site = site;
    leave_ready(w, me);
    if (me.state == AT_COLLECTIVE && !complete_collective(w, me.id / 32, mask, collective)) wait(w, AT_COLLECTIVE, site);
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
    Thread& me = *w.current;
    me.state = AT_ACTIVEMASK;
    me.site = CALLER;
    leave_ready(w, me);
    if (me.state == AT_ACTIVEMASK) wait(w, AT_ACTIVEMASK, CALLER);
    return me.lanes;
}
