// Checking: compare every access with bounds and alignment, and with the last accesses to the same bytes.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include "addresses.h"
#include "heap.h"
#include "order.h"
#include "pages.h"

static Error access_error(Worker& w, FindingKind finding, void* site, const char* p, u32 bytes, Access access, Place place) {
    Error e = new_error(w, finding, site);
    e.access = access, e.bytes = bytes, e.space = place.space, e.region = place.region, e.offset = place.offset;
    e.address = (u64)p;
    return e;
}

// An access as it was announced, and what is being held against it.
struct Announced {
    const char* p;
    u32 bytes;
    Access access;
    bool is_volatile, in_range;  // part of a copy of many bytes, or of a matrix
    void* site;
    bool swaps = false;  // an atomicCAS
    bool is_async = false;  // through the async proxy: a bulk copy, or a product of matrices
    const char* source = nullptr;  // of a copy to global memory, which stores later: where the value is now
    bool is_barrier = false;  // an arrival or a wait: its phase tells what it orders, and the word itself is no flag
    bool continues = false;  // a part of the copy that this thread's last access here began: one execution
};

// Several threads may load one element though only one of them stores a result (translate/ptx/entry.py). A race with a load of
// another thread is kept until that thread stores what it has loaded.
static bool is_unused(Worker& w, const Stamp& s, const Announced& a, const Error& race) {
    Block& b = *w.block;
    bool i_read = a.access == READ;
    if (s.block != b.number + 1 || i_read != (bool)s.wrote) return false;
    const auto& loads = w.job->loads;
    Thread& reader = i_read ? *w.current : b.threads[s.thread];
    u8 number = i_read ? reader.loads : s.site < loads.size() ? loads[s.site] : 0;
    if (!number || reader.stored >> (number - 1) & 1) return false;
    b.unused.try_emplace({reader.id, number}, race);
    return true;
}

// The thread stores what its loads of these numbers have loaded.
static void use(Worker& w, u64 bits) {
    Thread& me = *w.current;
    me.stored |= bits;
    auto& unused = w.block->unused;
    for (u8 number = 1; number <= 64 && !unused.empty(); ++number) {
        auto race = bits >> (number - 1) & 1 ? unused.find({me.id, number}) : unused.end();
        if (race == unused.end()) continue;
        Error e = race->second;
        unused.erase(race);
        raise_error(w, e);
    }
}

// `f(flight)` for each copy under way at these bytes.
template <class F>
static void each_flight(const Job& job, const Announced& a, F f) {
    for (u64 sixteen = (u64)a.p / 16; sixteen <= ((u64)a.p + a.bytes - 1) / 16; ++sixteen) {
        auto [at, end] = job.in_flight.equal_range(sixteen);
        for (; at != end; ++at)
            if (at->second.start < a.p + a.bytes && a.p < at->second.start + at->second.bytes) f(at->second);
    }
}

// Whether two copies to the same bytes of global memory store the same values.
static bool store_the_same(const Announced& a, const Flight& f) {
    bool are_there = a.source && f.source && a.p == f.start && a.bytes == f.bytes;
    return are_there && memcmp(a.source, f.source, a.bytes) == 0;
}

// Whether a copy to global memory stores the values that are there, or that copies under way store there as well.
static bool is_same_value(const Job& job, const Announced& a) {
    bool flies = false, is_same = true;
    each_flight(job, a, [&](const Flight& f) { flies = true, is_same &= store_the_same(a, f); });
    return flies ? is_same : memcmp(a.p, a.source, a.bytes) == 0;
}

static bool is_plain(const Stamp& s) { return !s.atomic && !s.is_volatile; }

// Report a race, and return true. Return false if the reading thread has not stored the value that it read.
[[gnu::noinline]] static bool raise_race(Worker& w, const Stamp& s, const Announced& a, Place place) {
    Error e = access_error(w, RACE, a.site, a.p, a.bytes, a.access, place);
    e.other_block = index_at(w.job->grid, s.block - 1);
    e.other_thread = index_at(w.job->size, s.thread);
    e.other_site = w.job->sites[s.site];
    e.other_access = s.atomic ? ATOMIC : s.wrote ? WRITE : READ;
    e.barrier_site = (u64)w.current->passed;
    e.apart = s.block != w.block->number + 1 ? 2 : s.thread / 32 != w.current->id / 32;
    if (a.source && e.other_access == WRITE && is_same_value(*w.job, a)) e.finding = SAME_VALUE;
    const Thread& me = *w.current;
    bool is_strong = a.access == ATOMIC || a.is_volatile;
    if (is_strong && !is_plain(s) && s.block != w.block->number + 1 && (s.in_block || me.in_block)) e.finding = SMALL_SCOPE;
    if (has_acquired(me.seen, s, s.clock)) e.finding = NO_ACQUIRE;
    bool both_store = a.access == WRITE && e.other_access == WRITE && a.bytes <= sizeof(Pending::before) && !a.in_range;
    bool first_read = a.access == READ && s.swaps;
    if (is_unused(w, s, a, e)) return false;
    if (!both_store && !first_read) return raise_error(w, e), true;
    Pending& pending = w.pending;
    pending.address = (char*)a.p, pending.bytes = a.bytes, pending.drop = false, pending.first_read = first_read;
    pending.race = e;
    if (both_store) memcpy(pending.before, a.p, a.bytes);
    return true;
}

// Before the first atomicCAS of a loop, a thread reads the old value, mostly by a plain load (programming guide, atomic
// functions). This load may race with an atomicCAS of another thread: the thread's own atomicCAS then fails and returns
// the new value. A load of the same line without an atomicCAS after it, as for a maximum, is allowed as well.
static void confirm_first_read(Worker& w, const volatile void* address, u32 bytes, u64 compare) {
    Thread& me = *w.current;
    if (me.read_at != address || memcmp(me.read_at, &compare, bytes)) return;
    w.job->first_reads.insert((u64)me.read_site);
    settle(w);
}

// An atomic of block scope is an ordinary access to threads of other thread blocks.
static bool scope_is_too_small(const Stamp& s, const Stamp& mine) {
    return s.block && s.block != mine.block && (s.in_block || mine.in_block);
}

// Two accesses need no order if both are atomic or volatile. The lanes of a warp are an exception: if they pass values on
// in volatile shared memory, they rely on running in step, and lanes do not run in step since sm_70.
[[gnu::noinline]] static bool may_meet(const Job& job, const Stamp& s, const Stamp& mine, bool is_shared) {
    if (mine.swaps && !s.wrote && job.first_reads.count(job.sites[s.site])) return true;
    if (!(s.atomic || s.is_volatile) || !(mine.atomic || mine.is_volatile)) return false;
    if (scope_is_too_small(s, mine)) return false;
    return (s.atomic && mine.atomic) || !is_shared || s.thread / 32 != mine.thread / 32;
}

// A volatile read meets a volatile store that no thread has read before. The reader has seen a later atomic of the
// storing thread block, and therefore expects the stored value. Without a fence or a barrier it may get an older value.
[[gnu::noinline]] static bool is_stale(const Stamp& s, const Stamp& mine, const Thread& me) {
    if (mine.wrote || mine.atomic || !s.is_volatile || s.atomic || s.is_flag || s.block == mine.block) return false;
    return (me.acquired && me.acquired->count(s.block - 1)) || (me.seen && me.seen->count(s.block - 1));
}

#pragma GCC push_options
#pragma GCC optimize("O3")  // for every access of a checked launch: -O2 takes a tenth longer
// The first element of an access to shared memory that reads an unwritten word of 4 bytes, or only unwritten bytes. Fewer
// unwritten bytes may be the padding of a struct. ~0: the access reads written memory.
static u64 first_unwritten(const Shadow& shadow, u64 first, u64 last, u32 block) {
    u64 run = 0, written = 0;
    for (u64 i = first; i <= last; ++i) {
        if ((u64)(shadow.start + i) % 4 == 0) run = 0;
        if (shadow.cells[i].write.block == block) run = 0, ++written;
        else if (++run == 4) return i - 3;
    }
    return written ? ~0ull : first;
}

// Whether the async proxy may read or overwrite what `s` has stored: a fence.proxy.async comes after the store.
static bool is_covered(const Block& b, const Thread& me, const Stamp& s) {
    if (!s.block || s.is_async || s.clock < b.threads[s.thread].proxy_fenced) return true;
    const auto& own = me.asynchronous ? me.asynchronous->covered : nullptr;
    return (own && s.clock < (*own)[s.thread]) || (b.covered && s.clock < (*b.covered)[s.thread]);
}

static void check_cells(Worker& w, Shadow& shadow, Place place, const Announced& a, bool expect_written, u8* written) {
    Block& b = *w.block;
    Thread& me = *w.current;
    Access access = a.access;
    bool is_shared = place.space == SHARED;
    u16 number = site_number(*w.job, a.site);
    u64 mark = Stamp::marked(me.id, number, access != READ, access == ATOMIC, a.is_volatile, a.swaps, a.is_async,
                             access == ATOMIC && me.in_block);
    Stamp mine{me.clock, b.number + 1, {mark}};
    if (me.loads) {
        auto& loads = w.job->loads;
        if (loads.size() <= number) loads.resize(number + 1);
        loads[number] = me.loads;
    }
    me.read_at = access == READ && !a.is_volatile ? a.p : nullptr, me.read_site = a.site;
    u64 offset = a.p - shadow.start, first = shadow.cell_at(offset), last = shadow.cell_at(offset + a.bytes - 1);
    u64 unwritten = is_shared && access != WRITE ? first_unwritten(shadow, first, last, mine.block) : ~0ull;
    bool raced = false, unfenced = false;
    Cell earlier_cell{};
    for (u64 i = first; i <= last; ++i) {
        Cell& cell = shadow.cells[i];
        if (i > first && i != unwritten && !expect_written && memcmp(&cell, &earlier_cell, sizeof(Cell)) == 0) {
            cell = shadow.cells[i - 1];  // the last one was as this is
            if (written && access != READ) written[i] = 1;
            continue;
        }
        if (i < last) earlier_cell = cell;
        Place at = place;
        at.offset += (int64_t)((i - first) * shadow.granule);
        if (is_shared) {
            for (Stamp* stamp : {&cell.write, &cell.read[0], &cell.read[1]})
                if (stamp->block != mine.block) *stamp = Stamp{};  // what another thread block left
            if (i == unwritten && !b.unwritten_read.finding)
                b.unwritten_read = access_error(w, UNINITIALISED, a.site, a.p, a.bytes, access, at);
        }
        if (expect_written && access != WRITE && !written[i]) {
            raise_error(w, access_error(w, UNWRITTEN_OUTPUT, a.site, a.p, a.bytes, access, at));
            expect_written = false;
        }
        auto before_me = [&](const Stamp& s) { return happened_before(*w.job, b, s, me); };
        bool after_write = before_me(cell.write);
        if (a.is_async && is_shared && !unfenced && !is_covered(b, me, cell.write)) {
            unfenced = true;
            Error e = access_error(w, NO_PROXY_FENCE, a.site, a.p, a.bytes, access, at);
            e.other_thread = index_at(w.job->size, cell.write.thread), e.other_site = w.job->sites[cell.write.site];
            raise_error(w, e);
        }
        if (!after_write && !raced && (!may_meet(*w.job, cell.write, mine, is_shared) || is_stale(cell.write, mine, me)))
            raced = raise_race(w, cell.write, a, at);
        for (Stamp& read : cell.read)
            if (!raced && !before_me(read) && (read.wrote || access != READ) && !may_meet(*w.job, read, mine, is_shared))
                raced = raise_race(w, read, a, at);
        if (access == READ) {
            Stamp* slot = nullptr;
            for (Stamp& read : cell.read)
                if (read.block == mine.block && read.thread == me.id && !read.wrote) slot = &read;
            for (Stamp& read : cell.read)
                if (!slot && before_me(read) && !(mine.is_volatile && read.wrote && is_plain(read))) slot = &read;
            if (!slot && cell.read[1].thread / 32 == cell.read[0].thread / 32) slot = &cell.read[1];
            if (slot) *slot = mine;
            if (mine.is_volatile) cell.write.is_flag = 1;
        } else if (is_plain(mine)) {
            cell.write = mine, cell.read[0] = cell.read[1] = Stamp{};
            if (written) written[i] = 1;
        } else {
            Stamp earlier = cell.write, (&read)[2] = cell.read;
            if (mine.is_volatile)
                mine.is_flag = me.fenced || earlier.is_flag || earlier.atomic || read[0].is_volatile || read[1].is_volatile;
            cell.write = mine;
            auto over = [&](const Stamp& s) { return is_shared && s.clock < b.barrier_clock[s.thread]; };
            for (Stamp& kept : read)  // a plain access may race with atomics that follow this one
                if (!is_plain(kept) || over(kept)) kept = Stamp{};
            if (is_plain(earlier) ? !over(earlier) : !after_write && !handed_over(earlier, me))
                (read[0].block ? read[1] : read[0]) = earlier;  // and an earlier atomic races with plain accesses
            if (written) written[i] = 1;
        }
    }
}

// Whether there is memory: a pointer in a struct may lead to memory of the process.
static bool is_mapped(const char* p, u32 bytes) {
    char there[64];
    iovec target{there, std::min<size_t>(bytes, sizeof(there))}, source{(void*)p, target.iov_len};
    return process_vm_readv(getpid(), &target, 1, &source, 1, 0) == (ssize_t)target.iov_len;
}

// A launch goes on after an access to no tensor and no shared array: move the access to memory that is not read.
static void divert(Worker& w, const char* p, u32 bytes, Access access) {
    char* page = (char*)((u64)p / PAGE * PAGE);
    u64 length = up((u64)p + bytes, PAGE) - (u64)page;
    auto within = [&](const Shadow& s) { return p >= s.arena && p + bytes <= s.arena + s.arena_bytes; };
    Shadow* near = within(w.block->shared) ? &w.block->shared : nullptr;
    for (Shadow& s : w.job->tensors)
        if (within(s)) near = &s;
    if (!near && !in_module(*w.job, p) && !is_mapped(p, bytes)) return;  // the fault that follows ends the launch
    if (near && !near->spoiled)  // all at once: a process has 65530 mappings at most
        near->spoiled = mprotect(near->arena, near->arena_bytes, PROT_READ | PROT_WRITE) == 0;
    if (access == READ) return;
    Pending& pending = w.pending;
    pending.address = (char*)p, pending.bytes = std::min<u32>(bytes, sizeof(pending.before)), pending.drop = true;
    bool empty = near && (page >= near->pages + near->page_bytes || (page >= near->arena + near->page_bytes && page + length <= near->pages));
    pending.empty = empty ? page : nullptr, pending.empty_bytes = length;
    memcpy(pending.before, p, pending.bytes);
}

static void check_alignment(Worker& w, const Announced& a, u32 alignment, Place place) {
    if ((u64)a.p % alignment == 0 || a.p == w.current->reported) return;
    raise_error(w, access_error(w, MISALIGNED, a.site, a.p, a.bytes, a.access, place));
}

// What an address in the kernels' own heap belongs to.
static void describe_heap(const Job& job, Error& e) {
    auto text = [&](const char* format, u64 size) { snprintf(e.text, sizeof(e.text), format, (unsigned long long)size); };
    for (const auto* map : {&job.heap, &job.freed}) {
        auto after = map->upper_bound(e.address);
        if (after == map->begin()) continue;
        auto [start, size] = *std::prev(after);
        if (e.address >= start + size + 16) continue;
        if (map == &job.freed) return text("memory of %llu bytes from malloc() or new that was freed before", size);
        return text("memory past the end of the %llu bytes that malloc() or new has returned", size);
    }
    auto after = job.heap.upper_bound(e.address);
    if (after != job.heap.end() && after->first - e.address <= 16)
        text("memory before the %llu bytes that malloc() or new has returned", after->second);
}

static void reject(Worker& w, FindingKind finding, const Announced& a, Place place) {
    Error e = access_error(w, finding, a.site, a.p, a.bytes, a.access, place);
    if (is_in_heap(a.p)) describe_heap(*w.job, e);
    raise_error(w, e);
    divert(w, a.p, a.bytes, a.access);
}

// Threads may only read the source of a copy under way: the copy has not yet read its source or written its target. Two
// reductions may have one target, and an atomic may be there meanwhile. Two
// copies of the same values to the same place are a matter of the rule for the same value.
static void check_in_flight(Worker& w, const Announced& a, Place place) {
    const Flight* other = nullptr;
    each_flight(*w.job, a, [&](const Flight& f) {
        bool may_overlap = (a.access == f.access && a.access != WRITE) || store_the_same(a, f);
        if (!other && !may_overlap) other = &f;
    });
    if (!other) return;
    if (other->start > a.p) place.offset += other->start - a.p;
    Error e = access_error(w, COPY_IN_FLIGHT, a.site, a.p, a.bytes, a.access, place);
    e.other_block = index_at(w.job->grid, other->block), e.other_thread = index_at(w.job->size, other->thread);
    e.other_site = (u64)other->site, e.other_access = other->access;
    raise_error(w, e);
}

// The variable of the compiled file that a stray address comes after.
static Place nearest_variable(const Job& job, const char* p, Place place) {
    for (u32 i = 0; i < job.tensors.size(); ++i)
        if (job.launch.regions[i].in_place == 1 && job.tensors[i].start <= p)
            if (place.region < 0 || job.tensors[i].start > job.tensors[place.region].start)
                place = {GLOBAL, (int32_t)i, p - job.tensors[i].start};
    return place;
}

// Whether an access to the compiled file, which belongs to no variable of the launch, is past the ends of a constant or a
// variable, and of which: place {OTHER, i, …} is in or beside the i-th of `Launch.objects`. Strings have no name.
static bool is_outside_of_objects(const Job& job, const Announced& a, Place& place) {
    int32_t i = object_at(job.launch, a.p);
    if (i < 0) {
        // A read may be of a string, or by a pointer in a variable, which leads to the plain build of the file.
        u64 at = (u64)a.p;
        bool is_variable = at >= job.code.variables && at < up(job.code.variables_end, PAGE);
        if (a.access == READ && !is_variable) return false;
        place = nearest_variable(job, a.p, place);
        return true;
    }
    const SharedArray& object = job.launch.objects[i];
    place = {OTHER, i, (int64_t)a.p - object.offset};
    for (u32 r = 0; r < job.tensors.size(); ++r)
        if ((int64_t)job.tensors[r].start == object.offset) place.space = GLOBAL, place.region = (int32_t)r;
    bool inside = place.offset >= 0 && (u64)place.offset + a.bytes <= object.bytes;
    return !inside || a.access != READ;
}

// The shared array that an access to no array misses by least.
static Place nearest_array(const Job& job, const Block& b, const char* p) {
    Place place{SHARED, -1, p - b.shared.start};
    int64_t least = INT64_MAX, at = p - b.shared.start;
    for (u32 i = 0; i < job.launch.num_shared; ++i) {
        const SharedArray& array = job.launch.shared[i];
        int64_t distance = std::max(array.offset - at, at - array.offset - (int64_t)array.bytes);
        if (distance < least) least = distance, place.region = (int32_t)i, place.offset = at - array.offset;
    }
    return place;
}

static void check(Worker& w, const Announced& a, u32 alignment) {
    Job& job = *w.job;
    bool is_flag = a.is_volatile || (a.access == ATOMIC && !a.is_barrier);
    if (is_flag && a.access != WRITE) read_flag(w, a.p);
    Block& b = *w.block;
    Place place = place_of(job, b, a.p);
    if (!job.in_flight.empty()) check_in_flight(w, a, place);
    if (place.space == SHARED) {
        bool outside = place.region < 0 || (u64)place.offset + a.bytes > job.launch.shared[place.region].bytes;
        if (outside) {
            if (place.region < 0) place = nearest_array(job, b, a.p);
            return reject(w, OUT_OF_SHARED_BOUNDS, a, place);
        }
        check_alignment(w, a, alignment, place);
        check_cells(w, b.shared, place, a, false, nullptr);
    } else if (place.region >= 0 && (u64)place.offset + a.bytes <= job.tensors[place.region].bytes) {
        const Region& region = job.launch.regions[place.region];
        Shadow& tensor = job.tensors[place.region];
        if (a.access != READ && tensor.arena && !tensor.is_kept) tensor.keep();
        check_alignment(w, a, alignment, place);
        if (a.bytes >= region.granule)
            check_cells(w, tensor, place, a, region.expect_written, region.written);
    } else {
        if (place.region < 0) {
            for (u32 i = 0; i < job.tensors.size(); ++i)  // in the empty space round a tensor?
                if (a.p >= job.tensors[i].arena && a.p < job.tensors[i].arena + job.tensors[i].arena_bytes)
                    place.region = (int32_t)i, place.offset = a.p - job.tensors[i].start;
            if (place.region < 0 && (is_allocated(job, a.p, a.bytes) || is_index(a.p))) return;
            if (place.region < 0 && in_module(job, a.p)) {
                bool of_host = (u64)a.p - job.launch.host_start < job.launch.host_end - job.launch.host_start;
                if (of_host) {
                    Place nearest = nearest_variable(job, a.p, place);
                    if (nearest.region >= 0 && nearest.offset < (int64_t)job.tensors[nearest.region].bytes + 256) place = nearest;
                } else if (!is_outside_of_objects(job, a, place)) {
                    return;
                }
                if (a.access == READ && a.p == w.current->reported) return;  // the sanitizer has just told of it
            }
        }
        return reject(w, OUT_OF_BOUNDS, a, place);
    }
    if (!is_flag || a.access == READ) return;
    write_flag(w, a.p);
    if (place.space == SHARED) return;
    if (a.access == WRITE) b.stores_volatile = true;
    else if (b.stores_volatile && !w.current->fenced) pass_unfenced(w, a.p);
}
#pragma GCC pop_options
