// Observing: when a thread block has ended, its accesses are matched into the requests of its warps and counted.
#pragma once

#include <algorithm>
#include <tuple>

#include "block.h"

// Note the sectors of 32 bytes that an access to a tensor touches.
static void touch_sectors(Job& job, const Event& e) {
    if (job.touched.empty()) job.touched.resize(job.tensors.size());
    const Shadow& tensor = job.tensors[(size_t)e.region];
    u64 before = (u64)tensor.start % 32, first = (before + (u64)e.offset) / 32;
    auto& sectors = job.touched[(size_t)e.region];
    if (sectors.empty()) sectors.resize((before + tensor.bytes + 31) / 32);
    for (u64 s = first; s <= (before + (u64)e.offset + e.bytes - 1) / 32 && s < sectors.size(); ++s) {
        if (e.access != WRITE) sectors[s] |= TOUCHED_READ | (sectors[s] & TOUCHED_WRITTEN ? 0 : TOUCHED_READ_FIRST);
        if (e.access != READ) sectors[s] |= TOUCHED_WRITTEN;
    }
}

// A warp has executed each counted part of the kernel at least as often as the lane that executed it most.
static void add_executions(Job& job, Block& b) {
    size_t parts = b.executed.size() / job.num_threads;
    if (job.executed.empty()) job.executed.resize(parts);
    for (u32 warp = 0; warp < job.num_threads; warp += 32)
        for (size_t part = 0; part < parts; ++part) {
            u32 most = 0;
            for (u32 thread = warp; thread < std::min(warp + 32, job.num_threads); ++thread)
                most = std::max(most, b.executed[thread * parts + part]);
            job.executed[part] += most;
        }
    std::fill(b.executed.begin(), b.executed.end(), 0);
    for (auto& of_warp : b.issues) {
        job.num_issues -= of_warp.size();
        of_warp.clear();
    }
}

constexpr u64 NO_ADDRESS = ~0ull;

// Whether each lane of a part of a warp has the address of the lane at this distance, as far as both take part.
static bool agree(const u64 (&address)[32], u32 first, u32 lanes, u32 distance) {
    for (u32 lane = first; lane < first + lanes; ++lane) {
        u64 other = address[lane ^ distance];
        if (address[lane] != NO_ADDRESS && other != NO_ADDRESS && address[lane] != other) return false;
    }
    return true;
}

// How many different words the bank with the most of them has. A word that several lanes read is kept once: a broadcast.
static u32 most_in_a_bank(const u64 (&address)[32], u32 first, u32 lanes, u32 bytes, std::vector<u64>& words) {
    words.clear();
    for (u32 lane = first; lane < first + lanes; ++lane) {
        if (address[lane] == NO_ADDRESS) continue;
        for (u64 word = address[lane] / 4; word <= (address[lane] + bytes - 1) / 4; ++word) words.push_back(word);
    }
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    u32 per_bank[32] = {}, most = 0;
    for (u64 word : words) most = std::max(most, ++per_bank[word % 32]);
    return most;
}

struct Turns { u64 all, conflicts; };

// The turns of shared memory for a request: a bank serves one word in a turn. 8 bytes a lane go in halves of a warp and 16
// bytes in quarters. Two halves, or the two quarters of a half, are read together if all lanes agree with a neighbour.
// An H200 does so by ncu's counters (README.md, "Against a GPU").
static Turns turns_of(const u64 (&address)[32], u32 bytes, bool reads, std::vector<u64>& words) {
    u32 lanes = bytes > 8 ? 8 : bytes > 4 ? 16 : 32, together = std::min(2 * lanes, 32u);
    Turns turns{};
    for (u32 first = 0; first < 32; first += together) {
        bool joined = reads && (agree(address, first, together, 1) || agree(address, first, together, 2));
        u32 step = joined ? together : lanes;
        for (u32 part = first; part < first + together; part += step)
            if (u32 most = most_in_a_bank(address, part, step, bytes, words)) {
                turns.all += most;
                turns.conflicts += most - 1;
            }
    }
    return turns;
}

// A thread block's accesses, matched into warp requests and counted.
void finish_block_events(Worker& w, Block& b) {
    Job& job = *w.job;
    std::vector<u32> order(b.events.size());
    for (u32 i = 0; i < order.size(); ++i) order[i] = i;
    auto key = [&](u32 i) {
        const Event& e = b.events[i];
        return std::make_tuple(e.thread / 32, e.site, e.execution, e.access, e.space, e.thread);
    };
    std::sort(order.begin(), order.end(), [&](u32 a, u32 b) { return key(a) < key(b); });
    std::vector<u64> sectors, words;
    for (size_t first = 0, last; first < order.size(); first = last) {
        const Event& head = b.events[order[first]];
        auto same = [&](const Event& e) {
            return e.thread / 32 == head.thread / 32 && e.site == head.site && e.execution == head.execution &&
                   e.access == head.access && e.space == head.space;
        };
        for (last = first; last < order.size() && same(b.events[order[last]]); ++last) {}
        Count& c = job.counts[{job.sites[head.site], head.access, head.space}];
        c.requests++;
        u64 lanes = 0, bytes = 0;
        for (size_t i = first; i < last; ++i) {
            const Event& e = b.events[order[i]];
            lanes += i == first || e.thread != b.events[order[i - 1]].thread;
            bytes += e.bytes;
        }
        c.lanes += lanes, c.bytes += bytes;
        if (head.space == GLOBAL) {  // 32-byte sectors that the request touches
            sectors.clear();
            for (size_t i = first; i < last; ++i) {
                const Event& e = b.events[order[i]];
                u64 address = e.order;
                for (u64 s = address / 32; s <= (address + e.bytes - 1) / 32; ++s) sectors.push_back(s);
            }
            std::sort(sectors.begin(), sectors.end());
            c.sectors += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
        } else if (head.space == SHARED && lanes < last - first) {  // bulk copies, which have no conflicts
            c.wavefronts += (bytes + 127) / 128;
        } else if (head.space == SHARED) {
            u64 address[32];
            std::fill_n(address, 32, NO_ADDRESS);
            for (size_t i = first; i < last; ++i) address[b.events[order[i]].thread % 32] = b.events[order[i]].order;
            Turns turns = turns_of(address, head.bytes, head.access == READ, words);
            c.wavefronts += turns.all, c.conflicts += turns.conflicts;
        }
    }
    if (!b.executed.empty()) add_executions(job, b);
    for (Event e : b.events) {
        if (e.space == GLOBAL && e.region >= 0) touch_sectors(job, e);
        e.order = job.num_events++;
        e.site = job.sites[e.site];
        if (job.trace.size() < job.launch.max_events) job.trace.push_back(e);
    }
    b.events.clear();
    for (auto& of_thread : b.executions) std::fill(of_thread.begin(), of_thread.end(), 0);
}
