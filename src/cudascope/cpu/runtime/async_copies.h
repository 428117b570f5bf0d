// Asynchronous copies (cp.async): each thread has a list of them, in batches that it commits and waits for.
//
// The runtime does a copy as late as the rules allow, at the wait that guarantees the copy. Until then the target holds
// NaNs (bytes 0xFF) and the source is not read. A missing wait, or a wait for too few copies, therefore shows in every
// run. A checked launch also reports each access to memory of a copy under way. The end of a copy counts as a write by
// the thread that waits for the copy: other threads may read after a barrier.
#pragma once

#include "hooks.h"

// The bytes at `start` are in use by what `thread` of this thread block has begun at `site`, until it ends. The key is the
// address divided by 16: no piece crosses a multiple of 16 bytes.
static void begin_flight(Worker& w, const char* start, u32 bytes, Access access, u16 thread, void* site,
                         const char* source = nullptr) {
    if (bytes) w.job->in_flight.insert({(u64)start / 16, {start, bytes, access, w.block->number, thread, site, source}});
}
static void end_flight(Worker& w, const char* start, u16 thread, void* site) {
    auto [at, last] = w.job->in_flight.equal_range((u64)start / 16);
    auto own = [&](auto& entry) {
        const Flight& f = entry.second;
        return f.start == start && f.site == site && f.thread == thread && f.block == w.block->number;
    };
    auto found = std::find_if(at, last, own);
    if (found != last) w.job->in_flight.erase(found);
}

// No thread may touch both ends of `c` until the copy has landed.
static void take_off(Worker& w, const Thread& thread, const Copy& c) {
    begin_flight(w, c.to, c.bytes, WRITE, thread.id, c.site);
    begin_flight(w, c.from, c.bytes - c.zeros, READ, thread.id, c.site);
}
static void touch_down(Worker& w, const Thread& thread, const Copy& c) {
    for (const char* end : {(const char*)c.to, c.from}) end_flight(w, end, thread.id, c.site);
}

static void land(Worker& w, const Copy& c) {
    w.landing = c.site;
    memcpy(c.to, c.from, c.bytes - c.zeros);
    memset(c.to + c.bytes - c.zeros, 0, c.zeros);
    w.landing = nullptr;
}

// Complete this thread's copies of the batches before `batch`.
static void land_before(Worker& w, u64 batch) {
    Thread& me = *w.current;
    size_t landed = 0;
    for (; landed < me.copies.size() && me.copies[landed].batch < batch; ++landed) {
        const Copy c = me.copies[landed];
        if (w.job->launch.mode == CHECK) {
            touch_down(w, me, c);
            if (c.zeros < c.bytes) check(w, {c.from, c.bytes - c.zeros, READ, false, true, c.site}, 1);
            check(w, {c.to, c.bytes, WRITE, false, true, c.site}, 1);
        }
        land(w, c);
    }
    me.copies.erase(me.copies.begin(), me.copies.begin() + (ptrdiff_t)landed);
}

// A thread leaves the kernel without a wait for its copies: they never land.
void abandon_copies(Worker& w) {
    Thread& me = *w.current;
    if (me.copies.empty()) return;
    if (w.job->launch.mode == CHECK) {
        const Copy first = me.copies.front();
        for (const Copy& c : me.copies) touch_down(w, me, c);
        Place place = place_of(*w.job, *w.block, first.to);
        raise_error(w, access_error(w, PENDING_COPY, first.site, first.to, first.bytes, WRITE, place));
    }
    me.copies.clear();
}

extern "C" {
bool simt_copies_async(const void* to, const void* from) {
    const Block& b = *worker->block;
    return is_shared(b, to) && !is_shared(b, from) && !is_local(b, from);
}
void simt_copy_async(void* to, const void* from, u32 bytes, u32 zeros) {
    Worker& w = *worker;
    Thread& me = *w.current;
    if (bytes != 4 && bytes != 8 && bytes != 16)
        raise_argument(w, CALLER, "copies %u bytes asynchronously: a copy has 4, 8 or 16", bytes);
    if (zeros > bytes)
        raise_argument(w, CALLER, "fills %u bytes of an asynchronous copy of %u with zeros", zeros, bytes);
    if (!is_shared(*w.block, to)) raise_argument(w, CALLER, "copies asynchronously to memory that is not shared");
    if (zeros < bytes && !simt_copies_async(to, from))
        raise_argument(w, CALLER, "copies asynchronously from memory that is not global");
    Announced write{(const char*)to, bytes, WRITE, false, true, CALLER};
    if (zeros < bytes) {
        announce({(const char*)from, bytes - zeros, READ, false, true, CALLER}, bytes);
        write.continues = true;
    }
    announce(write, bytes);
    bool aligned = (u64)to % bytes == 0 && (zeros == bytes || (u64)from % bytes == 0);
    if (!aligned && w.job->launch.mode != CHECK)  // else that is found, and named, already
        raise_argument(w, CALLER, "copies %u bytes asynchronously: both addresses must be multiples of %u", bytes, bytes);
    me.copies.push_back({(char*)to, (const char*)from, bytes, zeros, me.batches, CALLER});
    if (w.job->launch.mode == CHECK) take_off(w, me, me.copies.back());
    memset(to, 0xFF, bytes);
}
void simt_copies_commit() { worker->current->batches++; }
void simt_copies_wait(u32 newest) {
    u64 batches = worker->current->batches;
    land_before(*worker, batches - std::min<u64>(newest, batches));
}
void simt_copies_wait_all() { land_before(*worker, ~0ull); }
}
