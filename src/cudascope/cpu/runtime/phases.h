// Barriers that a kernel makes itself (cuda::barrier). Threads arrive and go on. The same or other threads wait for the end
// of the phase. The accesses of a thread before its arrival happen before the accesses after a wait. A phase can include
// asynchronous copies: they land here when all threads have arrived, and then the phase ends.
#pragma once

#include "async_copies.h"
#include "collectives.h"

static void let_go(Worker& w, const Bulk& c);

static Phases& phases_at(Worker& w, void* at, void* site) {
    auto found = w.block->phases.find((u64)at);
    if (found == w.block->phases.end()) raise_argument(w, site, "uses a barrier that no thread has initialised");
    return found->second;
}

static void barrier_accessed(void* at, void* site) {
    Announced a{(const char*)at, 8, ATOMIC, false, false, site};
    a.is_barrier = true;
    announce(a, 8);
}

static Phases& barrier_at(Worker& w, void* at, void* site) {
    barrier_accessed(at, site);
    return phases_at(w, at, site);
}

static void release(Worker& w, Phases& p) {
    if (w.job->launch.mode == CHECK) release_all(p.arriving, *w.block, *w.current);
}

// The thread waits for a phase of a PHASE or an MBARRIER.
static void wait_for_phase(Worker& w, void* at, Collective kind, void* site) {
    w.current->payload = at;
    wait_apart(w, AT_PHASE, kind, site);
}

static void end_phase(Worker& w, void* at, Phases& p) {
    Block& b = *w.block;
    for (const auto& [thread, copy] : p.copies) {
        if (w.job->launch.mode == CHECK) touch_down(w, *thread, copy);
        land(w, copy);
    }
    p.copies.clear();
    p.number++;
    p.pending = p.expected;
    p.arrived = p.arriving;
    for (Thread& t : b.threads)
        if (t.state == AT_PHASE && t.payload == at) wake(w, b, t);
    pass_barrier(w);
}

// Report copies that have not landed when a thread block has ended.
void check_landed(Worker& w, const Block& b) {
    for (const auto& [at, p] : b.phases)
        if (!p.bulk.empty() && w.job->launch.mode == CHECK) {
            const Bulk& c = p.bulk.front();
            Error e = access_error(w, PENDING_COPY, c.site, c.shared, 16, WRITE, place_of(*w.job, b, c.shared));
            e.thread = b.threads[c.thread].index;
            for (const Bulk& each : p.bulk) let_go(w, each);
            raise_error(w, e);
        } else if (!p.copies.empty() && w.job->launch.mode == CHECK) {
            const auto& [thread, copy] = p.copies.front();
            Place place = place_of(*w.job, b, copy.to);
            Error e = access_error(w, PENDING_COPY, copy.site, copy.to, copy.bytes, WRITE, place);
            e.thread = thread->index;
            raise_error(w, e);
            for (const auto& [thread, copy] : p.copies) touch_down(w, *thread, copy);
        }
}

extern "C" {
void simt_phases_init(void* at, u32 expected) {
    accessed(at, 8, WRITE, CALLER, 8);
    Shadow& shadow = worker->block->shared;  // both proxies use a barrier, so a bulk copy to its place needs no proxy fence
    if (worker->job->launch.mode == CHECK && is_shared(*worker->block, at))
        for (u64 i = 0; i < 8; ++i) shadow.cells[((u64)((char*)at - shadow.start) + i) / shadow.granule].write.is_async = 1;
    *(u64*)at = expected;
    worker->block->phases[(u64)at] = {expected, expected, 0, {}, {}, {}, {}, 0};
}
u64 simt_phases_arrive(void* at, u32 arrivals, u32 dropped) {
    Worker& w = *worker;
    Phases& p = barrier_at(w, at, CALLER);
    if (arrivals > p.pending)
        raise_argument(w, CALLER, "arrives %u times at a barrier that expects %u more arrivals", arrivals, p.pending);
    release(w, p);
    if (p.pending == p.expected) count(w, CALLER, BARRIER);
    u64 number = p.number;
    p.pending -= arrivals, p.expected -= dropped;
    if (!p.pending) end_phase(w, at, p);
    return number;
}
void simt_phases_wait(void* at, u64 number) {
    Worker& w = *worker;
    Phases& p = barrier_at(w, at, CALLER);
    while (p.number <= number) wait_for_phase(w, at, PHASE, CALLER);
    if (w.job->launch.mode == CHECK) acquire(w.current->acquired, p.arrived);
}
bool simt_phases_ended(void* at, u64 number) {
    Worker& w = *worker;
    Phases& p = barrier_at(w, at, CALLER);
    bool ended = p.number > number;
    if (ended && w.job->launch.mode == CHECK) acquire(w.current->acquired, p.arrived);
    if (!ended) w.polls++, let_others_run(w);
    return ended;
}
// The copies that this thread has begun since its last commit belong to the phase.
void simt_phases_await_copies(void* at) {
    Worker& w = *worker;
    Thread& me = *w.current;
    Phases& p = phases_at(w, at, CALLER);
    release(w, p);
    while (!me.copies.empty() && me.copies.back().batch == me.batches) {
        p.copies.emplace_back(&me, me.copies.back());
        me.copies.pop_back();
    }
}
}
