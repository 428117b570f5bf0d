// Observing: every access becomes an event of its thread block. requests.h counts the events when the block has ended.
#pragma once

#include "addresses.h"

static void observe(Worker& w, const char* p, u32 bytes, Access access, void* site) {
    Thread& me = *w.current;
    Block& b = *w.block;
    Place place = place_of(*w.job, b, p);
    if (place.region < 0 && is_index(p)) return;
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

extern "C" {
// The counters of the current thread, one for each counted part of the kernel.
u32* simt_executions(u32 parts) {
    Block& b = *worker->block;
    b.executed.resize((size_t)parts * worker->job->num_threads);
    return b.executed.data() + (size_t)parts * worker->current->id;
}
}
