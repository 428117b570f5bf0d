// When a thread block gives way to the others in flight, and when all of them wait in vain.
//
// The threads of a thread block run in rounds: in each, every thread that can run has its turn once. A thread block that
// waits for another one polls memory, often with a barrier in each step of its loop, so the barriers say nothing. It gives
// way when it is in the same state as some rounds before, and has therefore only waited. Where the state differs each time,
// as with a loop that counts its steps, the thread block gives way after a number of rounds.
//
// If all thread blocks in flight come back to their states, memory included, and no other can start, they wait for ever.
#pragma once

#include "heap.h"
#include "memory.h"

constexpr u64 NEVER = ~0ull;
constexpr u32 FIRST_LOOK = 256, FIRST_LOOK_AT_POLLS = 16;  // rounds without progress until the state is kept, which takes time
constexpr u32 POLLS_IN_VAIN = 128;  // rounds in which some thread polls and nothing changes
constexpr u32 LONGEST_TURN = 65536, SHORTEST_TURN = 1024;  // rounds. A thread block that has given way once takes no more
                                                           // memory if it does so more often
constexpr u32 ROUNDS_PER_YIELD = 256;  // what a round counts in which no thread waits: threads give way after 256 polls

static u64 hashed(u64 hash, u64 value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15;
    return hash ^ hash >> 32;
}
static u64 hashed(u64 hash, const char* from, const char* to) {
    u64 word = (u64)(to - from);
    for (hash = hashed(hash, word); from + 8 <= to; from += 8) memcpy(&word, from, 8), hash = hashed(hash, word);
    word = 0;
    memcpy(&word, from, (size_t)(to - from));
    return hashed(hash, word);
}

// What decides how a thread goes on: its registers and local memory, which are on its stack, and what it waits for.
static u64 state_of(const Block& b, const Thread& t) {
    u64 hash = hashed(t.state, t.clock_reads);
    if (t.state == GONE) return hash;
    for (u64 value : {t.value, t.result, (u64)t.lanes << 32 | t.mask, (u64)t.source}) hash = hashed(hash, value);
    return hashed(hash, (const char*)t.context.sp, b.stacks.start + (t.id + 1) * STACK);
}

static u64 state_of_shared(const Launch& launch, const Block& b) {
    u64 hash = hashed(b.output.size(), (u64)b.barrier_total);
    for (const auto& [id, barrier] : b.numbered_barriers) hash = hashed(hash, (u64)id << 32 | barrier.arrived);
    u64 sum = 0;  // the map has no order
    for (const auto& [at, p] : b.phases) sum += hashed(hashed(at, p.number & 1), p.pending);
    hash = hashed(hash, sum);
    for (u32 i = 0; i < launch.num_shared; ++i) {
        const char* array = b.shared.start + launch.shared[i].offset;
        hash = hashed(hash, array, array + launch.shared[i].bytes);
    }
    return hash;
}

static u64 state_of_memory(const Job& job) {
    u64 hash = hashed(heap_used, (const char*)job.code.variables, (const char*)job.code.variables_end);
    for (const Shadow& s : job.tensors) hash = hashed(hash, s.start, s.start + s.bytes);
    return hashed(hash, heap, heap + heap_used);
}

// Whether the thread block is in the state of an earlier round, and no thread has made progress since. States are kept at
// rounds 2^n and compared at all other rounds, so that a loop of any length is found.
static bool came_back(Worker& w, Block& b, u32 first_look) {
    if (b.rounds_since != w.progress) b.rounds_since = w.progress, b.rounds = 0, b.seen.clear();
    u64 round = ++b.rounds;
    if ((round & (round - 1)) == 0) {
        b.seen.clear();
        if (round < first_look) return false;
        for (const Thread& t : b.threads) b.seen.push_back(state_of(b, t));
        b.seen.push_back(state_of_shared(w.job->launch, b));
        return false;
    }
    if (b.seen.empty()) return false;
    auto differs = [&](const Thread& t) { return state_of(b, t) != b.seen[t.id]; };
    for (const Thread* t : b.ready)  // mostly, the first of them differs
        if (differs(*t)) return false;
    if (std::any_of(b.threads.begin(), b.threads.end(), differs) || state_of_shared(w.job->launch, b) != b.seen.back()) return false;
    b.repeats_since = w.progress;
    return true;
}

// Whether all workers find that nothing changes any more. One has found it for its own thread blocks, which another worker
// may let go on. They all have to find it, with the same memory, and to find it again twice after the last of them.
static bool all_workers_find_so(Worker& w, u64 memory) {
    Job& job = *w.job;
    if (job.launch.workers == 1) return true;
    std::lock_guard<std::mutex> guard(job.lock);
    if (job.memory_in_vain != memory) job.memory_in_vain = memory, job.rounds_in_vain = 0, job.in_vain.clear();
    job.in_vain.insert(&w);
    if (job.in_vain.size() < job.running) return false;
    job.in_vain.clear();
    return ++job.rounds_in_vain == 3;
}

// Nothing changes any more: each thread block in flight has come back to its state twice or waits at a barrier of the grid,
// memory is the same both times, and no other thread block can start.
static bool nobody_can_go_on(Worker& w) {
    bool somebody_runs = false;
    for (Block* b : w.waiting) {
        if (b->ready.empty() && !b->gives_up()) continue;
        if (b->repeats_since != w.progress) return false;
        somebody_runs = true;
    }
    if (!somebody_runs) return true;
    u64 memory = state_of_memory(*w.job);
    if (w.memory_since == w.progress && w.memory == memory && all_workers_find_so(w, memory)) return true;
    w.memory_since = w.progress, w.memory = memory;
    for (Block* b : w.waiting) {
        b->repeats_since = NEVER;
        for (Thread& t : b->threads) t.poll_site = nullptr;  // it polls if it has polled when all come back again
    }
    return false;
}
