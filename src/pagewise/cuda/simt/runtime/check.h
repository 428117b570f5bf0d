// Checking: every access is held against bounds and alignment, and against the last accesses to the same bytes.
#pragma once

#include "memory.h"

static bool happened_before(Worker& w, const Stamp& s, const Thread& me) {
    if (!s.block) return true;
    if (s.block != w.block_number + 1) return w.acquired.count(s.block - 1);
    if (s.thread == me.id) return true;
    if (s.thread / 32 == me.id / 32) return s.clock < w.warps[me.id / 32].known[me.lane][s.thread % 32];
    return s.clock < w.barrier_clock[s.thread];
}

static Error& access_error(Worker& w, Finding finding, void* site, const char* p, u32 bytes, Access access, Place place) {
    Error& e = new_error(w, finding, site);
    e.access = access, e.bytes = bytes, e.space = place.space, e.region = place.region, e.offset = place.offset;
    e.address = (u64)p;
    return e;
}

static Dim block_at(const Worker& w, u32 number) {
    return {number % w.grid.x, number / w.grid.x % w.grid.y, number / w.grid.x / w.grid.y};
}
static Dim thread_at(Dim size, u32 id) { return {id % size.x, id / size.x % size.y, id / size.x / size.y}; }

[[gnu::noinline]] static void raise_race(
    Worker& w, const Stamp& s, void* site, const char* p, u32 bytes, Access access, Place place, Access other) {
    Error e = access_error(w, RACE, site, p, bytes, access, place);
    e.other_block = block_at(w, s.block - 1);
    e.other_thread = thread_at(w.size, s.thread);
    e.other_site = w.job->sites[s.site & ~ATOMIC_SITE];
    e.other_access = s.site & ATOMIC_SITE ? ATOMIC : other;
    raise_error(w, e);
}

// The first byte of an access to shared memory that makes it a read of what nobody wrote: of a word of 4 bytes, or all
// of them. Fewer may be the padding of a struct. ~0: none.
static u64 first_unwritten(const Shadow& shadow, u64 first, u64 last, u32 block) {
    u64 run = 0, written = 0;
    for (u64 i = first; i <= last; ++i) {
        if ((u64)(shadow.start + i) % 4 == 0) run = 0;
        if (shadow.cells[i].write.block == block) run = 0, ++written;
        else if (++run == 4) return i - 3;
    }
    return written ? ~0ull : first;
}

static void check_cells(Worker& w, Shadow& shadow, Place place, const char* p, u32 bytes, Access access, void* site,
                        bool expect_written, u8* written) {
    Thread& me = *w.current;
    bool is_shared = place.space == SHARED;
    u16 number = site_number(*w.job, site);
    Stamp mine{me.clock, w.block_number + 1, me.id, (u16)(number | (access == ATOMIC ? ATOMIC_SITE : 0))};
    u64 first = (u64)(p - shadow.start) / shadow.granule, last = (u64)(p - shadow.start + bytes - 1) / shadow.granule;
    u64 unwritten = is_shared && access != WRITE ? first_unwritten(shadow, first, last, mine.block) : ~0ull;
    for (u64 i = first; i <= last; ++i) {
        Cell& cell = shadow.cells[i];
        Place at = place;
        at.offset += (int64_t)((i - first) * shadow.granule);
        if (is_shared) {
            for (Stamp* stamp : {&cell.write, &cell.read[0], &cell.read[1]})
                if (stamp->block != mine.block) *stamp = Stamp{};  // what another thread block left
            if (i == unwritten && !w.unwritten_read.finding) {
                w.unwritten_read = access_error(w, UNINITIALISED_SHARED, site, p, bytes, access, at);
                w.failed = false;
            }
        }
        if (expect_written && access != WRITE && !written[i])
            return raise_error(w, access_error(w, UNINITIALISED_GLOBAL, site, p, bytes, access, at));
        bool after_write = happened_before(w, cell.write, me), atomic_write = cell.write.site & ATOMIC_SITE;
        if (!after_write && !(access == ATOMIC && atomic_write))
            return raise_race(w, cell.write, site, p, bytes, access, at, WRITE);
        for (Stamp& read : cell.read)
            if (!happened_before(w, read, me) && (read.site & ATOMIC_SITE ? access != ATOMIC : access != READ))
                return raise_race(w, read, site, p, bytes, access, at, READ);
        if (access == READ) {
            Stamp* slot = nullptr;
            for (Stamp& read : cell.read)
                if (read.block == mine.block && read.thread == me.id && !(read.site & ATOMIC_SITE)) slot = &read;
            for (Stamp& read : cell.read)
                if (!slot && happened_before(w, read, me)) slot = &read;
            if (!slot && cell.read[1].thread / 32 == cell.read[0].thread / 32) slot = &cell.read[1];
            if (slot) *slot = mine;
        } else {
            Stamp earlier = cell.write;
            cell.write = mine;
            cell.read[0] = cell.read[1] = Stamp{};
            if (access == ATOMIC && !after_write) cell.read[0] = earlier;  // it may still race with a plain access
            if (written) written[i] = 1;
        }
    }
}

// The source of a copy under way may be read, and that is all: it has not been read yet, and its target not written.
static void check_in_flight(Worker& w, const char* p, u32 bytes, Access access, void* site, Place place) {
    for (u64 sixteen = (u64)p / 16; sixteen <= ((u64)p + bytes - 1) / 16; ++sixteen) {
        auto [at, end] = w.job->in_flight.equal_range(sixteen);
        for (; at != end; ++at) {
            const Flight& f = at->second;
            if (f.start >= p + bytes || p >= f.start + f.bytes || (access == READ && f.access == READ)) continue;
            if (f.start > p) place.offset += f.start - p;
            Error e = access_error(w, COPY_IN_FLIGHT, site, p, bytes, access, place);
            e.other_block = block_at(w, f.block), e.other_thread = thread_at(w.size, f.thread);
            e.other_site = (u64)f.site, e.other_access = f.access;
            raise_error(w, e);
        }
    }
}

static void check(Worker& w, const char* p, u32 bytes, Access access, void* site, u32 alignment) {
    Job& job = *w.job;
    Place place = place_of(job, p);
    if (!job.in_flight.empty()) check_in_flight(w, p, bytes, access, site, place);
    if (place.space == SHARED) {
        bool outside = place.region < 0 || (u64)place.offset + bytes > job.launch.shared[place.region].bytes;
        if (outside) {
            if (place.region < 0) {  // the array before it is the one that was overrun
                int64_t nearest = -1;
                const SharedArray* arrays = job.launch.shared;
                for (u32 i = 0; i < job.launch.num_shared; ++i)
                    if (job.shared.original + arrays[i].offset + arrays[i].bytes <= p)
                        if (nearest < 0 || arrays[i].offset > arrays[nearest].offset) nearest = i;
                place.region = (int32_t)nearest;
                if (nearest >= 0) place.offset = p - (job.shared.original + job.launch.shared[nearest].offset);
            }
            return raise_error(w, access_error(w, OUTSIDE_SHARED, site, p, bytes, access, place));
        }
        if ((u64)p % alignment) return raise_error(w, access_error(w, MISALIGNED, site, p, bytes, access, place));
        return check_cells(w, job.shared, place, p, bytes, access, site, false, nullptr);
    }
    if (place.region >= 0 && (u64)place.offset + bytes <= job.tensors[place.region].bytes) {
        const Region& region = job.launch.regions[place.region];
        if ((u64)p % alignment) return raise_error(w, access_error(w, MISALIGNED, site, p, bytes, access, place));
        if (access != READ) job.tensors[place.region].dirty = true;
        if (bytes < region.granule) return;
        return check_cells(
            w, job.tensors[place.region], place, p, bytes, access, site, region.expect_written, region.written);
    }
    if (place.region < 0) {
        for (u32 i = 0; i < job.tensors.size(); ++i)  // in the empty space round a tensor?
            if (p >= job.tensors[i].arena && p < job.tensors[i].arena + job.tensors[i].arena_bytes)
                place.region = (int32_t)i, place.offset = p - job.tensors[i].start;
        if (place.region < 0 && in_module(job, p)) return;
    }
    raise_error(w, access_error(w, OUTSIDE_GLOBAL, site, p, bytes, access, place));
}
