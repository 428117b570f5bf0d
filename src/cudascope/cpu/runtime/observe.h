// Observing: every access becomes an event of its thread block. requests.h counts the events when the block has ended.
#pragma once

#include "check.h"

static void observe(Worker& w, const Announced& a) {
    Thread& me = *w.current;
    Block& b = *w.block;
    Place place = place_of(*w.job, b, a.p);
    if (place.region < 0 && is_index(a.p)) return;
    if (place.region < 0 && (place.space == SHARED || in_module(*w.job, a.p))) place.space = OTHER;
    Event e{};
    e.site = site_number(*w.job, a.site);
    auto& executed = b.executions[me.id];
    if (executed.size() <= e.site) executed.resize(w.job->sites.size() + 16);
    e.execution = a.continues ? executed[e.site] - 1 : executed[e.site]++;
    e.order = (u64)a.p;  // the address, until the thread block has ended
    e.offset = place.offset, e.region = place.region, e.space = place.space;
    e.block = b.number, e.thread = me.id, e.bytes = (u8)a.bytes, e.access = a.access;
    b.events.push_back(e);
}

extern "C" {
// The counters of the current thread, one for each counted part of the kernel.
u32* simt_executions(u32 parts) {
    Block& b = *worker->block;
    b.executed.resize((size_t)parts * worker->job->num_threads);
    b.issues.resize(b.warps.size());
    worker->job->issued.resize(parts);
    return b.executed.data() + (size_t)parts * worker->current->id;
}
// The current thread comes to a part of the kernel on a path. Its warp issues the part once for all lanes on this path.
void simt_issue(u32 part, u64 path) {
    auto& known = worker->block->issues[worker->current->id / 32];
    worker->job->issued[part] += known.insert(path + part).second;
}
// The path on which the current thread calls a function, and on which the function begins.
void simt_enter(u64 path) { worker->current->path = path; }
u64 simt_entered() { return worker->current->path; }
}
