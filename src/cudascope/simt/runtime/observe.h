// Observing: a thread block's accesses, matched into the requests of its warps and counted.
#pragma once

#include <algorithm>
#include <tuple>

#include "memory.h"

// A thread block's accesses, matched into warp requests and counted.
static void finish_block_events(Worker& w, Block& b) {
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
        c.lanes += last - first;
        for (size_t i = first; i < last; ++i) c.bytes += b.events[order[i]].bytes;
        if (head.space == GLOBAL) {  // 32-byte sectors that the request touches
            sectors.clear();
            for (size_t i = first; i < last; ++i) {
                const Event& e = b.events[order[i]];
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
                    const Event& e = b.events[order[i]];
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
    for (Event e : b.events) {
        e.order = job.num_events++;
        e.site = job.sites[e.site];
        if (job.trace.size() < job.launch.max_events) job.trace.push_back(e);
    }
    b.events.clear();
    for (auto& of_thread : b.executions) std::fill(of_thread.begin(), of_thread.end(), 0);
}

static void observe(Worker& w, const char* p, u32 bytes, Access access, void* site) {
    Thread& me = *w.current;
    Block& b = *w.block;
    Place place = place_of(*w.job, b, p);
    if (place.region < 0 && (place.space == SHARED || in_module(*w.job, p))) place.space = OTHER;
    Event e{};
    e.site = site_number(*w.job, site);
    auto& executed = b.executions[me.id];
    if (executed.size() <= e.site) executed.resize(w.job->sites.size() + 16);
    e.execution = executed[e.site]++;
    e.order = (u64)p;  // the address, until the thread block has ended
    e.offset = place.offset, e.region = place.region, e.space = place.space;
    e.block = b.number, e.thread = me.id, e.bytes = (u8)bytes, e.access = access;
    b.events.push_back(e);
}
