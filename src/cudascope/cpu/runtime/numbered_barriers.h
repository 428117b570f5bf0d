// The barriers of a thread block that have a number (PTX: bar.sync, bar.arrive): of so many threads, not of all.
#pragma once

#include "collectives.h"
#include "order.h"

extern "C" void simt_numbered_barrier(u32 id, u32 threads, bool waits) {
    Worker& w = *worker;
    Block& b = *w.block;
    Thread& me = *w.current;
    if (id >= 16 || threads % 32)
        return raise_argument(
            w, CALLER, "arrives at barrier %u for %u threads: a barrier is 0 to 15, for whole warps", id, threads);
    if (!threads || threads > w.job->num_threads) threads = w.job->num_threads;
    NumberedBarrier& barrier = b.numbered_barriers[id];
    if (w.job->launch.mode == CHECK) release_all(barrier.known, b, me);
    if (waits) me.passed = CALLER;
    if (++barrier.arrived < threads) {
        if (!waits) return;
        barrier.waiting.push_back(&me);
        return wait_apart(w, AT_NUMBERED, NUMBERED, CALLER);
    }
    count(w, CALLER, BARRIER);
    pass_barrier(w);
    if (waits) acquire(me.acquired, barrier.known);
    for (Thread* t : barrier.waiting) {
        acquire(t->acquired, barrier.known);
        wake(w, b, *t);
    }
    b.numbered_barriers.erase(id);
    if (waits) go_on_in_order(w);
}
