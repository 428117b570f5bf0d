// Bulk copies (PTX: cp.async.bulk), one thread's order for a whole tile: between global and shared memory, with or without
// a tensor map, which says how a tile lies in a larger tensor.
//
// A copy to shared memory lands when somebody waits for the mbarrier that it names, and a copy to global memory when its
// thread waits for its batch. Until then the target in shared memory holds NaNs, and a checked launch reports whoever
// touches either end. Bulk copies are of the async proxy: they may read or overwrite what a thread has stored only after
// a fence.proxy.async.
#pragma once

#include "phases.h"

static Asynchronous& asynchronous(Thread& t) {
    if (!t.asynchronous) t.asynchronous = std::make_unique<Asynchronous>();
    return *t.asynchronous;
}

constexpr u32 ELEMENT_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};  // by TensorMap::type

// `f(global, shared, bytes)` for each piece of at most 16 bytes of a tile; `global` is null where the tile is outside.
template <class F>
static void each_piece(const Bulk& c, F f) {
    const TensorMap& map = c.map;
    if (!c.rank) {
        for (u32 at = 0; at < c.bytes; at += 16) f(c.global + at, c.shared + at, 16u);
        return;
    }
    u32 element = ELEMENT_BYTES[map.type], row_bytes = map.box[0] * element, rows = c.bytes / row_bytes;
    u32 pieces = map.swizzle == 3 ? 8 : map.swizzle == 2 ? 4 : map.swizzle == 1 ? 2 : 1;
    for (u32 row = 0; row < rows; ++row) {
        int64_t place = 0;
        bool inside = true;
        for (u32 dim = 1, rest = row; dim < c.rank; rest /= map.box[dim++]) {
            int64_t index = c.gathers ? c.at[1 + row] : c.at[dim] + (int64_t)(rest % map.box[dim]);
            inside &= index >= 0 && index < (int64_t)map.size[dim];
            place += index * (int64_t)map.stride[dim - 1];
        }
        for (u32 at = 0; at < row_bytes; at += 16) {
            u64 offset = (u64)(c.shared - worker->block->shared.start) + row * row_bytes + at;
            char* to = worker->block->shared.start + (offset ^ (offset >> 7 & (pieces - 1)) << 4);
            int64_t first = c.at[0] + at / element, last = first + 16 / element, size = map.size[0];
            char* from = (char*)map.address + place + first * (int64_t)element;
            if (!inside || last <= 0 || first >= size) f(nullptr, to, 16u);
            else if (first >= 0 && last <= size) f(from, to, 16u);
            else
                for (int64_t i = first; i < last; ++i, from += element, to += element)
                    f(i >= 0 && i < size ? from : nullptr, to, element);
        }
    }
}

static void let_go(Worker& w, const Bulk& c) {
    each_piece(c, [&](char* global, char* shared, u32) {
        if (global) end_flight(w, global, c.thread, c.site);
        end_flight(w, shared, c.thread, c.site);
    });
}

// What is wrong with a copy, before anything is touched; null: nothing.
static const char* wrong_with(const Worker& w, const Bulk& c) {
    if (!is_shared(*w.block, c.shared)) return "copies in bulk from or to what is not shared memory";
    if (!c.rank) return c.bytes % 16 || (u64)c.global % 16 || (u64)c.shared % 16 ? "copies in bulk what is no multiple of 16 bytes" : nullptr;
    const TensorMap& map = c.map;
    if (map.type >= std::size(ELEMENT_BYTES) || map.last_dim + 1 != c.rank) return "copies a tile by a tensor map of another rank, or by none";
    if (c.gathers && (c.rank != 2 || map.box[1] != 1)) return "gathers rows by a tensor map whose tiles are no single rows";
    u32 element = ELEMENT_BYTES[map.type], row = map.box[0] * element;
    if (map.interleave) return "copies a tile by an interleaved tensor map, which the CPU runner does not have";
    for (u32 i = 0; i < c.rank; ++i) {
        if (!map.box[i] || map.box[i] > 256) return "copies a tile with a side that is not 1 to 256 elements";
        if (map.element_stride[i] != 1) return "copies a tile with element strides, which the CPU runner does not have";
        if (i && map.stride[i - 1] % 16) return "copies a tile of a tensor whose strides are no multiples of 16 bytes";
    }
    if (row % 16) return "copies a tile whose rows are no multiple of 16 bytes";
    if (map.swizzle && row > 16u << map.swizzle) return "copies a tile whose rows are longer than its swizzle";
    return map.address % 16 || (u64)c.shared % 128 ? "copies a tile of misaligned memory: global 16 bytes, shared 128" : nullptr;
}

static u32 tile_bytes(const Bulk& c) {
    u32 bytes = ELEMENT_BYTES[c.map.type] * (c.gathers ? 4 : 1);
    for (u32 i = 0; i < c.rank; ++i) bytes *= c.map.box[i];
    return bytes;
}

// The copy as this thread begins it. What is wrong with it ends the launch.
static Bulk checked_bulk(Worker& w, const simt::BulkCopy& copy, void* site) {
    Bulk c{copy, site, w.current->id, 0};
    if (c.rank) c.bytes = c.map.type < std::size(ELEMENT_BYTES) ? tile_bytes(c) : 0;
    if (const char* why = wrong_with(w, c)) raise_argument(w, site, "%s", why);
    return c;
}

// The copy's ends, as the access that they will be. All pieces are one request of its thread.
static void begin_bulk(Worker& w, const Bulk& c) {
    bool to_shared = !c.to_global, continues = false;
    Access at_global = to_shared ? READ : c.combine ? ATOMIC : WRITE;
    auto announce_piece = [&](const char* p, u32 bytes, Access access, const char* source) {
        Announced a{p, bytes, access, false, true, c.site, false, true, source};
        a.is_barrier = access == ATOMIC;  // a reduction is relaxed: it passes no flag
        a.continues = continues;
        continues = true;
        announce(a, 1);
    };
    if (w.job->launch.mode != PLAIN)
        each_piece(c, [&](char* global, char* shared, u32 bytes) {
            const char* source = at_global == WRITE ? shared : nullptr;
            if (to_shared || global) announce_piece(shared, bytes, to_shared ? WRITE : READ, nullptr);
            if (global) announce_piece(global, bytes, at_global, source);
            if (w.job->launch.mode != CHECK) return;
            begin_flight(w, shared, bytes, to_shared ? WRITE : READ, c.thread, c.site);
            if (global) begin_flight(w, global, bytes, at_global, c.thread, c.site, source);
        });
    if (to_shared) each_piece(c, [&](char*, char* shared, u32 bytes) { memset(shared, 0xFF, bytes); });
}

static void land_bulk(Worker& w, const Bulk& c) {
    if (w.job->launch.mode == CHECK) let_go(w, c);
    w.landing = c.site;
    each_piece(c, [&](char* global, char* shared, u32 bytes) {
        if (c.combine && global) c.combine(global, shared, bytes, c.map.type);
        else if (c.to_global && global) memcpy(global, shared, bytes);
        else if (!c.to_global && global) memcpy(shared, global, bytes);
        else if (!c.to_global) memset(shared, c.map.fill ? 0xFF : 0, bytes);
    });
    w.landing = nullptr;
}

// A phase ends when all have arrived and as many bytes have landed as were announced.
static bool try_end_phase(Worker& w, void* at, Phases& p) {
    int64_t under_way = 0;
    for (const Bulk& c : p.bulk) under_way += c.bytes;
    if (p.pending || p.bytes != under_way) return false;
    std::vector<Bulk> landing;
    landing.swap(p.bulk);
    for (const Bulk& c : landing) land_bulk(w, c);
    p.bytes = 0;
    end_phase(w, at, p);
    return true;
}

static bool is_waited_for(const Block& b, const void* at) {
    return std::any_of(b.threads.begin(), b.threads.end(),
        [&](const Thread& t) { return t.state == AT_PHASE && t.payload == at; });
}

extern "C" {
void simt_mbarrier_invalidate(void* at) {
    Phases& p = barrier_at(*worker, at, CALLER);
    if (!p.bulk.empty()) raise_argument(*worker, CALLER, "invalidates an mbarrier for which a bulk copy is under way");
    worker->block->phases.erase((u64)at);
}
void simt_mbarrier_expect(void* at, u32 bytes) { barrier_at(*worker, at, CALLER).bytes += bytes; }
u64 simt_mbarrier_arrive(void* at, u32 arrivals) {
    Worker& w = *worker;
    Phases& p = barrier_at(w, at, CALLER);
    if (!p.pending) try_end_phase(w, at, p);
    if (arrivals > p.pending)
        raise_argument(w, CALLER, "arrives %u times at an mbarrier at which %u more are expected", arrivals, p.pending);
    release(w, p);
    if (p.pending == p.expected) count(w, CALLER, BARRIER);
    u64 number = p.number;
    p.pending -= arrivals;
    if (!p.pending && (p.bulk.empty() || is_waited_for(*w.block, at))) try_end_phase(w, at, p);
    return number;
}
// Whether the phase of this parity has ended, which is the current one or the one before. With `waits`, the thread waits for
// it until its thread block can do nothing else. On a GPU the time of the wait has a limit, too: in a shuffled order it is
// over at once in some cases.
bool simt_mbarrier_ended(void* at, u32 parity, bool waits) {
    Worker& w = *worker;
    Thread& me = *w.current;
    Phases* p = &barrier_at(w, at, CALLER);
    auto ended = [&] { return (p->number & 1) != parity || try_end_phase(w, at, *p); };
    if (waits && w.job->launch.shuffled) waits = w.block->random() % 4;
    if (waits && !ended()) {
        me.gives_up = true;
        wait_for_phase(w, at, MBARRIER, CALLER);
        me.gives_up = false;
        p = &phases_at(w, at, CALLER);
    }
    if (ended()) {
        if (w.job->launch.mode == CHECK) acquire(me.acquired, p->arrived);
        return true;
    }
    w.polls++;
    if (!waits) let_others_run(w);
    return false;
}

// A copy to shared memory, for the phase of the mbarrier at `at`.
void simt_bulk_load(const simt::BulkCopy* copy, void* at) {
    Worker& w = *worker;
    Bulk c = checked_bulk(w, *copy, CALLER);
    Phases& p = barrier_at(w, at, CALLER);
    if (!p.pending && p.bulk.empty() == false) try_end_phase(w, at, p);
    begin_bulk(w, c);
    release(w, p);
    p.bulk.push_back(c);
    if (!p.pending && is_waited_for(*w.block, at)) try_end_phase(w, at, p);
}
// A copy from shared memory, of this thread's current batch.
void simt_bulk_store(const simt::BulkCopy* copy) {
    Worker& w = *worker;
    Asynchronous& own = asynchronous(*w.current);
    Bulk c = checked_bulk(w, *copy, CALLER);
    c.batch = own.bulk_batches;
    begin_bulk(w, c);
    own.bulk_stores.push_back(c);
}
void simt_bulk_commit() { asynchronous(*worker->current).bulk_batches++; }
void simt_bulk_wait(u32 newest) {
    Worker& w = *worker;
    Asynchronous& own = asynchronous(*w.current);
    u64 batch = own.bulk_batches - std::min<u64>(newest, own.bulk_batches);
    while (!own.bulk_stores.empty() && own.bulk_stores.front().batch < batch) {
        Bulk c = own.bulk_stores.front();
        own.bulk_stores.erase(own.bulk_stores.begin());
        land_bulk(w, c);
    }
}

// What this thread and those before it have stored may be read through the async proxy.
void simt_proxy_fence() {
    Worker& w = *worker;
    Thread& me = *w.current;
    if (w.job->launch.mode != CHECK) return;
    me.proxy_fenced = ++me.clock;
    asynchronous(me).covered = known_to(*w.block, me, me.clock)->at(w.block->number);
}
}

// A thread that leaves does not wait: its bulk stores never land.
void abandon_bulk_stores(Worker& w) {
    auto& stores = asynchronous(*w.current).bulk_stores;
    if (stores.empty()) return;
    Bulk first = stores.front();
    if (w.job->launch.mode == CHECK) {
        for (const Bulk& c : stores) let_go(w, c);
        raise_error(w, access_error(w, PENDING_COPY, first.site, first.shared, 16, READ, place_of(*w.job, *w.block, first.shared)));
    }
    stores.clear();
}
