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

constexpr u64 MOST_ISSUES = 1 << 20;  // that are known at once, in fifty megabytes

extern "C" {
// The counters of the current thread, one for each counted part of the kernel.
u32* simt_executions(u32 parts) {
    Block& b = *worker->block;
    b.executed.resize((size_t)parts * worker->job->num_threads);
    b.issues.resize(b.warps.size());
    worker->job->issued.resize(parts);
    return b.executed.data() + (size_t)parts * worker->current->id;
}
// The current thread comes to a part of the kernel on a path, on which it comes there once only. Its warp issues the part
// once for all lanes on this path. When all lanes have come, nothing has to be known of it any more.
void simt_issue(u32 part, u64 path) {
    Job& job = *worker->job;
    u32 warp = worker->current->id / 32;
    auto& known = worker->block->issues[warp];
    if (job.num_issues >= MOST_ISSUES) {
        job.too_many_issues = true;
        return;
    }
    auto [found, is_new] = known.try_emplace(path + part, 0);
    job.issued[part] += is_new, job.num_issues += is_new;
    if (++found->second == worker->block->warps[warp].size) known.erase(found), job.num_issues--;
}
// The path on which the current thread calls a function, and on which the function begins.
void simt_enter(u64 path) { worker->current->path = path; }
u64 simt_entered() { return worker->current->path; }
}
