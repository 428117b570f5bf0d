// Part of simt_runtime.cpp: every access of an observed or a checked launch comes through here before it happens.
#pragma once

#include "simt_block.h"
#include "simt_scheduler.h"

// ---------------------------------------------------------------------------------------------- observing

static u16 site_number(Job& job, void* site) {
    auto [found, is_new] = job.site_numbers.try_emplace((u64)site, (u16)job.sites.size());
    if (is_new) job.sites.push_back((u64)site);
    return found->second;
}

struct Place { Space space; int32_t region; int64_t offset; };

// __constant__ and __device__ variables lie in the compiled file.
static bool in_module(Job& job, const char* p) {
    if ((u64)p >> 12 == job.module_page) return true;
    Dl_info info;
    if (!dladdr(p, &info)) return false;
    job.module_page = (u64)p >> 12;
    return true;
}

static Place place_of(Job& job, const char* p) {
    // a checked launch has its tensors elsewhere: what is near the shared arrays strayed from them
    u64 near = job.launch.mode == CHECK && job.launch.num_shared ? 256 << 10 : 0;
    if (p + near >= job.tls && p < job.tls + job.shared.bytes + near) {
        for (u32 i = 0; i < job.launch.num_shared; ++i) {
            const SharedArray& a = job.launch.shared[i];
            if (p >= job.shared.original + a.offset && p < job.shared.original + a.offset + a.bytes)
                return {SHARED, (int32_t)i, p - (job.shared.original + a.offset)};
        }
        return {SHARED, -1, p - job.tls};
    }
    for (u32 i = 0; i < job.global.size(); ++i)
        if (p >= job.global[i].start && p < job.global[i].start + job.global[i].bytes)
            return {GLOBAL, (int32_t)i, p - job.global[i].start};
    return {GLOBAL, -1, (int64_t)p};
}

// A thread block's accesses, matched into warp requests and counted.
static void finish_block_events(Worker& w) {
    Job& job = *w.job;
    std::vector<u32> order(w.events.size());
    for (u32 i = 0; i < order.size(); ++i) order[i] = i;
    auto key = [&](u32 i) {
        const Event& e = w.events[i];
        return std::make_tuple(e.thread / 32, e.site, e.execution, e.access, e.space, e.thread);
    };
    std::sort(order.begin(), order.end(), [&](u32 a, u32 b) { return key(a) < key(b); });
    std::vector<u64> sectors, words;
    for (size_t first = 0, last; first < order.size(); first = last) {
        const Event& head = w.events[order[first]];
        auto same = [&](const Event& e) {
            return e.thread / 32 == head.thread / 32 && e.site == head.site && e.execution == head.execution &&
                   e.access == head.access && e.space == head.space;
        };
        for (last = first; last < order.size() && same(w.events[order[last]]); ++last) {}
        Count& c = job.counts[{job.sites[head.site], head.access, head.space}];
        c.requests++;
        c.lanes += last - first;
        for (size_t i = first; i < last; ++i) c.bytes += w.events[order[i]].bytes;
        if (head.space == GLOBAL) {  // 32-byte sectors that the request touches
            sectors.clear();
            for (size_t i = first; i < last; ++i) {
                const Event& e = w.events[order[i]];
                u64 address = e.order;
                for (u64 s = address / 32; s <= (address + e.bytes - 1) / 32; ++s) sectors.push_back(s);
            }
            std::sort(sectors.begin(), sectors.end());
            c.sectors += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
        } else if (head.space == SHARED) {  // 8 bytes a lane go in halves of a warp, 16 bytes in quarters
            u32 lanes_per_phase = head.bytes > 8 ? 8 : head.bytes > 4 ? 16 : 32;
            for (u32 phase = 0; phase < 32; phase += lanes_per_phase) {
                words.clear();
                for (size_t i = first; i < last; ++i) {
                    const Event& e = w.events[order[i]];
                    if (e.thread % 32 / lanes_per_phase * lanes_per_phase != phase) continue;
                    for (u64 word = e.order / 4; word <= (e.order + e.bytes - 1) / 4; ++word) words.push_back(word);
                }
                std::sort(words.begin(), words.end());
                words.erase(std::unique(words.begin(), words.end()), words.end());  // one word for many: a broadcast
                u32 per_bank[32] = {}, most = 0;
                for (u64 word : words) most = std::max(most, ++per_bank[word % 32]);
                c.conflicts += most ? most - 1 : 0;
            }
        }
    }
    for (Event e : w.events) {
        e.order = job.all_events++;
        e.site = job.sites[e.site];
        if (job.trace.size() < job.launch.max_events) job.trace.push_back(e);
    }
    w.events.clear();
    for (auto& of_thread : w.executions) std::fill(of_thread.begin(), of_thread.end(), 0);
}

static void observe(Worker& w, const char* p, u32 bytes, Access access, void* site) {
    Thread& me = *w.current;
    Place place = place_of(*w.job, p);
    if (place.region < 0 && (place.space == SHARED || in_module(*w.job, p))) place.space = OTHER;
    Event e{};
    e.site = site_number(*w.job, site);
    auto& executed = w.executions[me.id];
    if (executed.size() <= e.site) executed.resize(w.job->sites.size() + 16);
    e.execution = executed[e.site]++;
    e.order = (u64)p;  // the address, until the thread block has ended
    e.offset = place.offset, e.region = place.region, e.space = place.space;
    e.block = w.block_number, e.thread = me.id, e.bytes = (u8)bytes, e.access = access;
    w.events.push_back(e);
}

// ---------------------------------------------------------------------------------------------- checking

static bool happened_before(Worker& w, const Stamp& s, const Thread& me) {
    if (!s.block) return true;
    if (s.block != w.block_number + 1) return w.acquired.count(s.block - 1);
    if (s.thread == me.id) return true;
    if (s.thread / 32 == me.id / 32) return s.clock < w.warps[me.id / 32].known[me.lane][s.thread % 32];
    return s.clock < w.barrier_clock[s.thread];
}

static Error& access_error(Worker& w, What what, void* site, const char* p, u32 bytes, Access access, Place place) {
    Error& e = new_error(w, what, site);
    e.access = access, e.bytes = bytes, e.space = place.space, e.region = place.region, e.offset = place.offset;
    e.address = (u64)p;
    return e;
}

static Dim thread_at(Dim size, u32 id) { return {id % size.x, id / size.x % size.y, id / size.x / size.y}; }

[[gnu::noinline]] static void raise_race(
    Worker& w, const Stamp& s, void* site, const char* p, u32 bytes, Access access, Place place, Access other) {
    Error e = access_error(w, RACE, site, p, bytes, access, place);
    u32 b = s.block - 1;
    e.other_block = {b % w.grid.x, b / w.grid.x % w.grid.y, b / w.grid.x / w.grid.y};
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
            if (i == unwritten && !w.unwritten_read.what) {
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

static void check(Worker& w, const char* p, u32 bytes, Access access, void* site, u32 alignment) {
    Job& job = *w.job;
    Place place = place_of(job, p);
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
    if (place.region >= 0 && (u64)place.offset + bytes <= job.global[place.region].bytes) {
        const Region& region = job.launch.regions[place.region];
        if ((u64)p % alignment) return raise_error(w, access_error(w, MISALIGNED, site, p, bytes, access, place));
        if (access != READ) job.global[place.region].dirty = true;
        if (bytes < region.granule) return;
        return check_cells(
            w, job.global[place.region], place, p, bytes, access, site, region.expect_written, region.written);
    }
    if (place.region < 0) {
        for (u32 i = 0; i < job.global.size(); ++i)  // in the empty space round a tensor?
            if (p >= job.global[i].arena && p < job.global[i].arena + job.global[i].arena_bytes)
                place.region = (int32_t)i, place.offset = p - job.global[i].start;
        if (place.region < 0 && in_module(job, p)) return;
    }
    raise_error(w, access_error(w, OUTSIDE_GLOBAL, site, p, bytes, access, place));
}

static void accessed(const volatile void* address, u32 bytes, Access access, void* site, u32 alignment) {
    Worker* w = worker;
    if (!w || !w->current || !bytes) return;
    const char* p = (const char*)address;
    if (p >= w->stacks && p < w->stacks + STACK * MAX_THREADS) return;  // registers and local memory
    Mode mode = (Mode)w->job->launch.mode;
    if (mode == CHECK) check(*w, p, bytes, access, site, alignment);
    else if (mode == OBSERVE) observe(*w, p, bytes, access, site);
}

static void range_accessed(const void* address, size_t bytes, Access access, void* site) {
    for (size_t done = 0; done < bytes; done += 16)
        accessed((const char*)address + done, (u32)std::min<size_t>(16, bytes - done), access, site, 1);
}

extern "C" {
#define HOOKS(n)                                                                           \
    void __tsan_read##n(void* p) { accessed(p, n, READ, CALLER, n); }                      \
    void __tsan_write##n(void* p) { accessed(p, n, WRITE, CALLER, n); }                    \
    void __tsan_unaligned_read##n(void* p) { accessed(p, n, READ, CALLER, 1); }            \
    void __tsan_unaligned_write##n(void* p) { accessed(p, n, WRITE, CALLER, 1); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read16_by_8(void* p) { accessed(p, 16, READ, CALLER, 8); }
void __tsan_write16_by_8(void* p) { accessed(p, 16, WRITE, CALLER, 8); }
void __tsan_read_range(void* p, size_t bytes) { range_accessed(p, bytes, READ, CALLER); }
void __tsan_write_range(void* p, size_t bytes) { range_accessed(p, bytes, WRITE, CALLER); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

void* simt_memcpy(void* to, const void* from, size_t bytes) {
    range_accessed(from, bytes, READ, CALLER);
    range_accessed(to, bytes, WRITE, CALLER);
    return memcpy(to, from, bytes);
}
void* simt_memset(void* to, int value, size_t bytes) {
    range_accessed(to, bytes, WRITE, CALLER);
    return memset(to, value, bytes);
}

void simt_atomic(const volatile void* address, int bytes) {
    Worker& w = *worker;
    accessed(address, (u32)bytes, ATOMIC, CALLER, (u32)bytes);
    if (w.job->launch.mode == CHECK && place_of(*w.job, (const char*)address).space == GLOBAL) {
        auto& released = w.job->releases;
        auto found = released.find((u64)address);
        if (found != released.end()) w.acquired.insert(found->second.begin(), found->second.end());
        if (w.current->fenced) {
            std::set<u32>& all = released[(u64)address];
            all.insert(w.acquired.begin(), w.acquired.end());
            all.insert(w.block_number);
        }
    }
    spin(w, CALLER);
    if (++w.current->atomics % 256 == 0) let_others_run(w);
}
}
