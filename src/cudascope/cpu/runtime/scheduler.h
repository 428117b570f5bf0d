// The scheduler. The threads of a thread block are fibers that take turns. The next thread block starts when one has ended,
// or when all threads of one wait for another thread block.
#pragma once

#include "addresses.h"
#include "switch.h"
#include "turns.h"

static void leave_kernel(Worker& w) {
    settle(w);
    Block& b = *w.block;
    Thread& me = *w.current;
    abandon_copies(w);
    if (me.asynchronous) abandon_bulk_stores(w);
    me.state = GONE;
    if (me.asynchronous) release_operands(w, ~0ull);
    b.live--;
    w.progress++;
    w.milestones++, w.ends++;
    leave_ready(w, b, me);
    w.current = nullptr;
    if (b.live && b.arrived == b.live) complete_barrier(w, b);
    if (b.at_grid) arrive_at_grid(w, b);
    u32 warp = me.id / 32;
    Warp& own = b.warps[warp];
    bool somebody_waits = --own.live > own.ready;
    for (u32 lane = 0; somebody_waits && lane < own.size && !w.job->failed; ++lane) {
        Thread& t = b.threads[warp * 32 + lane];
        if (t.state == AT_COLLECTIVE && t.mask >> me.lane & 1) complete_meeting(w, b, t);
    }
    w.current = &me;
}

[[noreturn]] static void end_thread() {
    Worker& w = *worker;
    leave_kernel(w);
    switch_to(w.current->context, w.scheduler);
    __builtin_unreachable();
}

extern "C" void simt_returned(u32 body, u32 from) { worker->current->body = body, worker->current->returned = from; }

extern "C" [[noreturn]] void simt_exit() {
    simt_returned(0, 1);  // PTX's `exit` is a `return`, at no line
    end_thread();
}

static void start_thread() {
    Worker& w = *worker;
    w.job->launch.entry(w.job->launch.arguments);
    end_thread();
}

// An error that lists where the threads of `blocks` wait.
Error waiting_error(Worker& w, FindingKind finding, const std::vector<Block*>& blocks) {
    Error e = new_error(w, finding, nullptr);
    for (Block* b : blocks)
        for (Thread& t : b->threads) {
            if (t.state == GONE) continue;
            u32 k = 0, running = t.state == READY, line = running ? 0 : (u32)t.line;
            bool polls = t.poll_site && (finding == SPIN || (running && t.only_polls && t.site == t.poll_site));
            if (!e.site || (polls && !e.address)) {
                e.block = b->index, e.thread = t.index, e.site = (u64)(polls ? t.poll_site : t.site);
                if (polls) {
                    Place place = place_of(*w.job, *b, t.polled);
                    e.address = (u64)t.polled, e.bytes = t.polled_bytes, e.access = t.polls_volatile ? READ : ATOMIC;
                    e.space = place.space, e.region = place.region, e.offset = place.offset;
                }
            }
            auto same = [&](const Waiter& w) {
                return w.site == (u64)t.site && w.line == line && w.running == running && w.collective == t.collective &&
                       w.mask == t.mask;
            };
            while (k < e.num_waiters && !same(e.waiters[k])) ++k;
            if (k == 8) continue;
            if (k == e.num_waiters)
                e.waiters[e.num_waiters++] = Waiter{(u64)t.site, t.collective, t.mask, 0, running, line, t.index};
            e.waiters[k].count++;
        }
    return e;
}

static Block& make_block(Worker& w) {
    if (w.idle.empty()) {
        Job& job = *w.job;
        w.blocks.push_back(std::make_unique<Block>());
        Block& b = *w.blocks.back();
        b.threads.resize(job.num_threads);
        b.warps.resize((job.num_threads + 31) / 32);
        b.barrier_clock.resize(job.num_threads);
        b.executions.resize(job.launch.mode == OBSERVE ? job.num_threads : 0);
        b.ready.reserve(job.num_threads), b.batch.reserve(job.num_threads);
        b.stacks = take_stacks(job.num_threads, w.blocks.size());
        map_shared(job, b);
        w.idle.push_back(&b);
    }
    Block& b = *w.idle.back();
    w.idle.pop_back();
    return b;
}

static Block& start_block(Worker& w, u32 rank) {
    Job& job = *w.job;
    Launch& launch = job.launch;
    Block& b = make_block(w);
    u32 number = job.at(rank);
    b.index = {number % job.grid.x, number / job.grid.x % job.grid.y, number / job.grid.x / job.grid.y};
    b.number = number, b.rank = rank;
    b.live = job.num_threads;
    b.arrived = b.at_grid = b.yields = b.barrier_total = 0;
    b.turn = LONGEST_TURN, b.rounds_since = b.repeats_since = NEVER;
    b.unwritten_read.finding = NOTHING;
    b.stores_volatile = false;
    b.unused.clear();
    b.numbered_barriers.clear();
    b.phases.clear();
    b.releases.clear();
    b.covered.reset();
    b.ready.clear();
    if (launch.mode == CHECK) std::fill(b.barrier_clock.begin(), b.barrier_clock.end(), 0);
    for (u32 i = 0; i < b.warps.size(); ++i) {
        b.warps[i].size = b.warps[i].live = b.warps[i].ready = std::min(32u, job.num_threads - 32 * i);
        if (launch.mode != CHECK) continue;
        memset(b.warps[i].known, 0, sizeof(b.warps[i].known));
        b.warps[i].steps.begin();
    }
    for (u32 i = 0; i < job.num_threads; ++i) {
        Thread& t = b.threads[i];
        t.index = {i % job.size.x, i / job.size.x % job.size.y, i / job.size.x / job.size.y};
        t.id = (u16)i, t.lane = i % 32, t.state = READY, t.clock = t.fenced = t.fenced_in_block = t.proxy_fenced = 0;
        t.in_block = false;
        t.asynchronous = nullptr, t.gives_up = false;
        t.reads = t.progress = t.clock_reads = t.batches = 0;
        t.budget = BUDGET, t.accesses = 0, t.misaligned = t.reported = nullptr, t.read_at = nullptr, t.poll_site = nullptr;
        t.loads = 0, t.stored = 0, t.body = t.returned = 0, t.passed = nullptr;
        t.site = nullptr;
        t.acquired.reset(), t.seen.reset();
        prepare(t.context, b.stacks.start + i * STACK, start_thread);
        b.ready.push_back(&t);
    }
    if (launch.shuffled) b.random.seed(launch.seed * 0x9e3779b97f4a7c15u + number);
    w.milestones++, w.ends++;
    return b;
}

// Run a thread block until it has ended (true), or until it is another one's turn.
static bool advance(Worker& w, Block& b) {
    Job& job = *w.job;
    w.block = &b;
    blockIdx = b.index, blockDim = job.size, gridDim = job.grid;
    u32 turn = 0, polled_in_vain = 0;
    if (b.ready.empty())
        for (Thread& t : b.threads)
            if (t.gives_up) wake(w, b, t);
    while (!b.ready.empty()) {
        u64 progress = w.progress, waits = w.waits, polls = w.polls, preemptions = 0;
        b.batch.swap(b.ready);
        b.ready.clear();
        if (job.launch.shuffled) std::shuffle(b.batch.begin(), b.batch.end(), b.random);
        for (size_t i = 0; i < b.batch.size(); ++i) {
            Thread* t = b.batch[i];
            w.current = t;
            threadIdx = t->index;
            w.switches++;
            switch_to(w.scheduler, t->context);
            w.current = nullptr;
            if (w.wanted.load(std::memory_order_relaxed)) w.wanted = false, ask_python(job);
            if (job.failed || job.stop) return false;
            if (w.clock_preempted_at == w.switches) preemptions++;
        }
        if (b.ready.empty()) break;
        bool waited = w.waits != waits, polled = w.polls != polls, changed = w.progress != progress;
        b.yields = waited || changed ? 0 : b.yields + 1;
        polled_in_vain = changed ? 0 : polled_in_vain + polled;
        turn += waited ? 1 : ROUNDS_PER_YIELD;
        u32 first_look = !waited ? 1 : polled ? FIRST_LOOK_AT_POLLS : FIRST_LOOK;
        if (!changed && came_back(w, b, first_look)) return false;
        if (turn > FIRST_LOOK) b.repeats_since = NEVER;
        if ((preemptions && !changed) || b.yields >= 4 || polled_in_vain >= POLLS_IN_VAIN) return false;
        if (turn >= b.turn) return b.turn = std::max(b.turn / 8, SHORTEST_TURN), false;
    }
    if (b.live && b.at_grid == b.live) return false;
    if (b.gives_up()) return came_back(w, b, 1), false;
    if (b.live) raise_error(w, waiting_error(w, DEADLOCK, {&b}));
    return true;
}

static void finish_block(Worker& w, Block& b) {
    Job& job = *w.job;
    if (b.unwritten_read.finding) {
        Error e = b.unwritten_read;
        b.unwritten_read.finding = NOTHING;
        raise_error(w, e);
    }
    check_landed(w, b);
    if (job.launch.mode == OBSERVE) finish_block_events(w, b);
    if (!b.output.empty()) {
        std::lock_guard<std::mutex> guard(job.lock);
        job.outputs[b.number] = std::move(b.output);
        b.output.clear();
    }
    job.ended_blocks++;
    w.idle.push_back(&b);
}

static Block* next_block(Worker& w) {
    Job& job = *w.job;
    bool full = w.waiting.size() >= job.launch.max_blocks;
    if (!full && job.next < job.num_blocks) {
        u64 rank = job.next++;
        if (rank < job.num_blocks) return &start_block(w, (u32)rank);
    }
    if (w.waiting.empty()) return nullptr;
    complete_grid(w);
    if (job.failed) return nullptr;
    if (nobody_can_go_on(w)) {
        std::vector<Block*> blocks(w.waiting.begin(), w.waiting.end());
        bool somebody_runs = std::any_of(blocks.begin(), blocks.end(), [](Block* b) { return !b->ready.empty(); });
        w.block = nullptr;
        Error e = waiting_error(w, somebody_runs ? SPIN : DEADLOCK, blocks);
        if (full && job.next < job.num_blocks)
            snprintf(e.text, sizeof(e.text), ". %u thread blocks have not started: an H100 holds %u of this size at once",
                     job.num_blocks - (u32)job.next, job.launch.max_blocks);
        raise_error(w, e);
        return nullptr;
    }
    Block* b = w.waiting.front();
    w.waiting.pop_front();
    return b;
}

static void run_blocks(Worker& w) {
    Job& job = *w.job;
    while (!job.failed) {
        Block* b = next_block(w);
        if (!b) break;
        bool ended = advance(w, *b);
        if (job.stop) {
            w.waiting.push_back(b);
            std::vector<Block*> blocks(w.waiting.begin(), w.waiting.end());
            raise_error(w, waiting_error(w, (FindingKind)job.stop.load(), blocks));
        } else if (!job.failed) {
            if (ended) finish_block(w, *b);
            else w.waiting.push_back(b);
        }
    }
}
