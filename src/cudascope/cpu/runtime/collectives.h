// Threads wait for each other at barriers and in the functions of a warp. The last thread to arrive frees the others.
#pragma once

#include <cstring>

#include "order.h"

// Whether a thread that has left the kernel has gone round the barrier in this line, and did not return before it. The
// kernel's own lines from `body` to before `returned` come before its `return`, and no loop leads back to them.
static bool went_round(const Job& job, const Thread& gone, u32 line) {
    if (!gone.returned) return !job.launch.may_return;
    return line >= gone.body && line < gone.returned;
}

static void check_barrier(Worker& w, Block& b) {
    if (b.live < w.job->num_threads) {
        const Thread *gone = nullptr, *waiting = nullptr, *round = nullptr;
        for (u32 i = w.job->num_threads; i--;) (b.threads[i].state == GONE ? gone : waiting) = &b.threads[i];
        for (const Thread& t : b.threads)
            if (!round && t.state == GONE && went_round(*w.job, t, (u32)waiting->line)) gone = round = &t;
        Error e = new_error(w, round ? BARRIER_IN_A_BRANCH : LEFT_BEFORE_BARRIER, waiting->site);
        e.thread = gone->index, e.other_thread = waiting->index;
        e.num_waiters = b.live;
        raise_error(w, e);
    }
    const Thread* first = nullptr;
    for (const Thread& t : b.threads) {
        if (t.state == GONE) continue;
        if (!first) first = &t;
        if (t.line == first->line) continue;
        Error e = new_error(w, DIFFERENT_BARRIERS, t.site);
        e.thread = t.index, e.other_thread = first->index, e.other_site = (u64)first->site, e.other_block = b.index;
        return raise_error(w, e);
    }
}

// All threads of a thread block have met: every access before the barrier happens before every access after it.
static void join_clocks(Worker& w, Block& b) {
    for (Warp& warp : b.warps) warp.steps.begin();
    for (u32 i = 0; i < w.job->num_threads; ++i) b.barrier_clock[i] = ++b.threads[i].clock;
    for (u32 i = 0; i < w.job->num_threads; ++i)
        for (u32 lane = 0; lane < b.warps[i / 32].size; ++lane)
            b.warps[i / 32].known[i % 32][lane] = b.barrier_clock[i / 32 * 32 + lane];
    for (Thread& t : b.threads) {  // a fence.proxy.async of one is one for all that come after the barrier
        if (!t.asynchronous || !t.asynchronous->covered) continue;
        b.covered = later(b.covered, t.asynchronous->covered);
        t.asynchronous->covered = nullptr;
    }
    std::vector<Thread*> all;
    for (Thread& t : b.threads) all.push_back(&t);
    share_acquired(all.data(), (u32)all.size());
}

void complete_barrier(Worker& w, Block& b) {
    if (w.job->launch.mode == CHECK) {
        check_barrier(w, b);
        if (w.job->failed) return;
        join_clocks(w, b);
    }
    for (Thread& t : b.threads)
        if (t.state == AT_BARRIER) t.value = b.barrier_total, wake(w, b, t);
    b.barrier_total = 0;
    b.arrived = 0;
    pass_barrier(w);
}

// __activemask is answered when no lane of the warp can run: the lanes that wait for it at one place are together. CUDA
// promises that no more than a part of them is (C++ Programming Guide, "Warp Vote Functions"), so a shuffled schedule
// gives a part every other time. The others are asked again when this part waits or has left.
[[gnu::noinline]] static void resolve_activemask(Worker& w, Block& b, u32 warp) {
    Thread* lanes = &b.threads[warp * 32];
    u32 waiting = b.warps[warp].bits(AT_ACTIVEMASK, lanes);
    if (!waiting) return;
    void* site = lanes[__builtin_ctz(waiting)].site;
    u32 together = 0;
    for (u32 lane = 0; lane < b.warps[warp].size; ++lane)
        together |= (u32)((waiting >> lane & 1) && lanes[lane].site == site) << lane;
    u64 drawn = w.job->launch.shuffled ? b.random() : 0;
    if (u32 part = together & (u32)(drawn >> 32); part && drawn & 1) together = part;
    for (u32 lane = 0; lane < b.warps[warp].size; ++lane)
        if (together >> lane & 1) lanes[lane].lanes = together, wake(w, b, lanes[lane]);
}

void leave_ready(Worker& w, Block& b, Thread& t) {
    u32 warp = t.id / 32;
    if (--b.warps[warp].ready == 0) resolve_activemask(w, b, warp);
}

extern "C" int simt_barrier(bool predicate, int line) {
    Worker& w = *worker;
    Block& b = *w.block;
    b.barrier_total += predicate;
    Thread& me = arrive(w, AT_BARRIER, SYNCTHREADS, line, CALLER);
    me.passed = CALLER;
    if (++b.arrived == b.live) {
        count(w, me.site, BARRIER);
        complete_barrier(w, b);
        go_on_in_order(w);
    } else {
        wait(w, AT_BARRIER, CALLER);
    }
    return (int)me.value;
}

// A thread block that has ended never comes to the barrier of the grid at which others wait.
static void raise_grid_never_complete(Worker& w) {
    Job& job = *w.job;
    std::vector<Block*> blocks;
    std::set<u32> present;
    for (Block* b : w.waiting)
        if (b->at_grid) blocks.push_back(b), present.insert(b->number);
    u32 ended = 0;
    while (present.count(ended)) ++ended;
    Dim at = index_at(job.grid, ended);
    w.block = nullptr;
    Error e = waiting_error(w, DEADLOCK, blocks);
    snprintf(e.text, sizeof(e.text),
             ": thread block (%u, %u, %u) has ended and has not come to this barrier of the grid. A GPU waits for ever",
             at.x, at.y, at.z);
    raise_error(w, e);
}

// If all threads of all thread blocks wait here, free them.
void complete_grid(Worker& w) {
    Job& job = *w.job;
    if (!job.at_grid || job.at_grid + job.ended_blocks < job.num_blocks) return;
    if (job.ended_blocks) return raise_grid_never_complete(w);
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

void arrive_at_grid(Worker& w, Block& b) {
    if (!b.live || b.at_grid != b.live) return;
    if (w.job->launch.mode == CHECK) check_barrier(w, b);
    if (b.threads[0].state == GONE) {  // cooperative_groups.h: thread 0 counts its thread block, and waits for the others
        Error e = waiting_error(w, DEADLOCK, {&b});
        snprintf(e.text, sizeof(e.text), ": thread (0, 0, 0), which brings its thread block to this barrier of the grid, "
                 "has left the kernel. A GPU waits for ever");
        raise_error(w, e);
    }
    w.job->at_grid++;
}

// The launch has one worker and all its thread blocks fit at once: cpu/limits.py.
extern "C" void simt_grid_sync(int line) {
    Worker& w = *worker;
    Block& b = *w.block;
    if (b.at_grid++ == 0) count(w, CALLER, BARRIER);
    arrive(w, AT_GRID, SYNCGRID, line, CALLER);
    arrive_at_grid(w, b);
    wait(w, AT_GRID, CALLER);
}

static bool needs_whole_warp(Collective collective) { return collective == PRODUCT || collective == MATRIX; }

static void raise_lanes_missing(Worker& w, const Thread& t, u32 present) {
    Error e = new_error(w, LANES_MISSING, t.site);
    e.thread = t.index, e.lane = (u32)__builtin_ctz(~present), e.waiters[0].collective = t.collective;
    raise_error(w, e);
}

static void raise_apart(Worker& w, FindingKind finding, const Thread& t, const Met& mine, u32 lane, const Met& other) {
    w.block->warps[t.id / 32].steps.explained = true;
    Error e = new_error(w, finding, mine.site);
    e.thread = t.index, e.lane = lane, e.other_site = (u64)other.site, e.other_block = w.block->index;
    e.waiters[0].collective = mine.collective, e.waiters[0].mask = mine.mask, e.waiters[1].mask = other.mask;
    e.waiters[1].collective = other.collective;
    raise_error(w, e);
}

// The lanes `present` meet, and lanes that their mask names have left the kernel. This is right if those left before. It is
// wrong if those were in another warp function when they should have been here: what a mask names must come, in the same
// function and with the same mask (PTX ISA, shfl.sync). Two signs tell:
//   - A lane that has left has met others without these lanes, with another mask, while these lanes met nobody.
//   - The lanes have met in two places before. Since then they were never in one place all together, and now these lanes
//     are where one that has left was last.
static void check_in_step(Worker& w, Warp& own, Thread* lanes, u32 present, const Thread& first) {
    Steps& steps = own.steps;
    u32 here = 0, left = first.mask & ~present;
    bool in_one_place = true;
    for (u32 lane = 0; lane < own.size; ++lane) {
        here |= (u32)(lanes[lane].state != GONE) << lane;
        if (present >> lane & 1) in_one_place &= lanes[lane].site == first.site;
    }
    for (u32 lane = 0; left && lane < own.size && !steps.explained; ++lane) {
        const Met& other = steps.last[lane];
        u32 mine = 1u << first.lane, theirs = 1u << lane;
        bool was_alone = (left & theirs & steps.without[first.lane]) && !(steps.without[lane] & mine);
        if (was_alone && other.collective == first.collective)
            raise_apart(w, DIFFERENT_MASKS, first, {first.site, first.collective, first.mask, 0}, lane, other);
    }
    for (int i = 0; left && i < 2 && !steps.explained; ++i) {
        const Met &mine = steps.apart[i], &theirs = steps.apart[1 - i];
        u32 gone = theirs.lanes & left;
        if (gone && (mine.lanes & present) && steps.last[__builtin_ctz(gone)].site == first.site)
            raise_apart(w, WARP_FUNCTION_IN_A_BRANCH, first, mine, (u32)__builtin_ctz(gone), theirs);
    }
    if (in_one_place && present == here) steps.apart[0] = steps.apart[1] = {};
    bool are_new = !in_one_place && !steps.apart[0].site;
    for (u32 lane = 0; lane < own.size; ++lane) {
        const Thread& t = lanes[lane];
        bool is_here = present >> lane & 1;
        steps.without[lane] = is_here ? steps.without[lane] & ~present : steps.without[lane] | present;
        if (!is_here) continue;
        steps.last[lane] = {t.site, t.collective, t.mask, 0};
        Met& place = steps.apart[t.site != first.site];
        if (are_new && (!place.site || place.site == t.site))  // else it is a third place
            place = {t.site, t.collective, t.mask, place.lanes | 1u << lane};
    }
}

// If every lane of the mask of `one` that has not left waits where `one` waits, end the meeting and free its lanes.
bool complete_meeting(Worker& w, Block& b, const Thread& one) {
    u32 warp = one.id / 32, present = 0;
    Thread* lanes = &b.threads[warp * 32];
    Warp& own = b.warps[warp];
    if (one.mask == ~0u && own.ready) return false;  // a lane is still on its way
    for (u32 lane = own.size; lane--;) {  // the highest lane is mostly the last to arrive
        const Thread& t = lanes[lane];
        if (!(one.mask >> lane & 1) || t.state == GONE) continue;
        if (t.state != AT_COLLECTIVE || t.mask != one.mask || t.collective != one.collective) return false;
        if (t.complete != one.complete || t.line != one.line) return false;
        present |= 1u << lane;
    }
    const Thread& first = lanes[__builtin_ctz(present)];
    if (needs_whole_warp(first.collective) && present != ~0u) return raise_lanes_missing(w, first, present), false;
    Access counted = first.collective == SYNCWARP ? BARRIER : first.collective == PRODUCT ? MMA : SHUFFLE;
    if (first.collective != MATRIX) count(w, first.site, counted);  // its loads and stores are counted
    void* payloads[32];
    for (u32 lane = 0; lane < 32; ++lane) payloads[lane] = present >> lane & 1 ? lanes[lane].payload : nullptr;
    if (w.job->launch.mode == CHECK) check_in_step(w, own, lanes, present, first);
    if (w.job->failed) return false;
    first.complete(payloads);
    for (u32 lane = 0; lane < own.size && !w.job->failed; ++lane)
        if (present >> lane & 1) lanes[lane].lanes = present, wake(w, b, lanes[lane]);
    return !w.job->failed;
}

// This thread meets the other lanes of `mask` in one function and one line. The last lane runs `complete` for all of them.
[[gnu::always_inline]] static inline u32 meet(
    Worker& w, Collective what, u32 mask, void* payload, void (*complete)(void**), int line, void* site) {
    Block& b = *w.block;
    Thread& me = *w.current;
    if (!(mask >> me.lane & 1)) {
        Error e = new_error(w, LANE_NOT_IN_MASK, site);
        e.lane = me.lane;
        raise_error(w, e);
        mask |= 1u << me.lane;
    }
    me.collective = what, me.mask = mask, me.payload = payload, me.complete = complete, me.line = line;
    me.state = AT_COLLECTIVE;
    me.site = site;
    leave_ready(w, b, me);
    if (complete_meeting(w, b, me)) go_on_in_order(w);
    else wait(w, AT_COLLECTIVE, site);
    return me.lanes;
}

// In the functions below, every lane brings its Thread.
template <class Function>
static void for_each(void** lanes, Function function) {
    for (u32 lane = 0; lane < 32; ++lane)
        if (lanes[lane]) function(*(Thread*)lanes[lane]);
}
[[gnu::always_inline]] static inline u64 meet(Collective what, u32 mask, u64 value, void (*complete)(void**), void* site) {
    Thread& me = *worker->current;
    me.value = value;
    meet(*worker, what, mask, &me, complete, 0, site);
    return me.result;
}

[[gnu::noinline]] static void raise_no_source(const Thread& t) {
    if (worker->job->launch.mode != CHECK || worker->block->warps[t.id / 32].steps.explained) return;
    Error e = new_error(*worker, t.mask >> t.source & 1 ? LANE_GONE : LANE_NOT_IN_MASK, t.site);
    e.thread = t.index, e.lane = t.source;
    raise_error(*worker, e);
}
static void shuffle(void** lanes) {
    for_each(lanes, [&](Thread& t) {
        Thread* source = (Thread*)lanes[t.source];
        t.result = (source ? source : &t)->value;
        if (!source) raise_no_source(t);
    });
}
static void vote(void** lanes) {
    u32 votes[2] = {};
    for_each(lanes, [&](Thread& t) { votes[t.value] |= 1u << t.lane; });
    for_each(lanes, [&](Thread& t) { memcpy(&t.result, votes, sizeof(votes)); });
}
static void match(void** lanes) {
    for_each(lanes, [&](Thread& t) {
        t.result = 0;
        for_each(lanes, [&](Thread& other) { t.result |= (u64)(other.value == t.value) << other.lane; });
    });
}
// Every access of a lane before __syncwarp happens before every access of the other lanes after __syncwarp.
static void order_lanes(void** lanes) {
    if (worker->job->launch.mode != CHECK) return;
    Warp* warp = nullptr;
    u32 joined[32] = {}, number = 0;
    Thread* together[32];
    for_each(lanes, [&](Thread& t) {
        warp = &worker->block->warps[t.id / 32];
        together[number++] = &t;
        warp->known[t.lane][t.lane] = ++t.clock;
        for (u32 s = 0; s < warp->size; ++s) joined[s] = std::max(joined[s], warp->known[t.lane][s]);
    });
    for_each(lanes, [&](Thread& t) { memcpy(warp->known[t.lane], joined, sizeof(joined)); });
    share_acquired(together, number);
}

extern "C" {
u64 simt_shuffle(Collective function, u32 mask, u64 value, u32 source) {
    worker->current->source = source % 32;
    return meet(function, mask, value, shuffle, CALLER);
}
Votes simt_vote(Collective function, u32 mask, bool predicate) {
    u64 votes = meet(function, mask, predicate, vote, CALLER);
    return {(u32)votes, (u32)(votes >> 32)};
}
u32 simt_match(Collective function, u32 mask, u64 value) { return (u32)meet(function, mask, value, match, CALLER); }
void simt_syncwarp(u32 mask) { meet(SYNCWARP, mask, 0, order_lanes, CALLER); }
u32 simt_meet(Collective what, u32 mask, void* payload, void (*complete)(void**), int line) {
    return meet(*worker, what, mask, payload, complete, line, CALLER);
}
u32 simt_activemask() {
    Worker& w = *worker;
    Thread& me = *w.current;
    me.state = AT_ACTIVEMASK;
    me.site = CALLER;
    leave_ready(w, *w.block, me);
    if (me.state == AT_ACTIVEMASK) wait(w, AT_ACTIVEMASK, CALLER);
    return me.lanes;
}
}
