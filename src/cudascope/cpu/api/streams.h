// Streams and events. Every launch and every copy is done when its call returns, so there is nothing to wait for. The time
// between two events is the time that the CPU took.
#pragma once

#include <time.h>

#include <set>

#include "launches.h"

struct Stream { unsigned flags; int priority; };
struct Event { bool is_recorded, has_time; timespec at; };
static std::set<void*> streams, events;

static bool is_stream(cudaStream_t s) { return (u64)s <= 2 || streams.count(s); }  // 0 to 2 are the default streams
static cudaError_t checked(cudaStream_t s) { return returned(is_stream(s) ? cudaSuccess : cudaErrorInvalidResourceHandle); }
static Stream options_of(cudaStream_t s) { return streams.count(s) ? *(Stream*)s : Stream{0, 0}; }
static Event* event_of(cudaEvent_t event) { return events.count(event) ? (Event*)event : nullptr; }
static cudaError_t checked(cudaEvent_t e) { return returned(event_of(e) ? cudaSuccess : cudaErrorInvalidResourceHandle); }

static cudaError_t created(cudaStream_t* stream, unsigned flags, int priority) {
    if (!stream) return returned(cudaErrorInvalidValue);
    *stream = (cudaStream_t) new Stream{flags, priority};
    streams.insert(*stream);
    return returned(cudaSuccess);
}

extern "C" {
API(cudaStreamCreate, (cudaStream_t* stream), created(stream, 0, 0))
API(cudaStreamCreateWithFlags, (cudaStream_t* stream, unsigned flags), created(stream, flags, 0))
API(cudaStreamCreateWithPriority, (cudaStream_t* stream, unsigned flags, int priority),
    created(stream, flags, std::max(-5, std::min(priority, 0))))
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    Call call;
    if (!streams.erase(stream)) return returned(cudaErrorInvalidResourceHandle);
    delete (Stream*)stream;
    return returned(cudaSuccess);
}
API(cudaStreamSynchronize, (cudaStream_t stream), checked(stream))
API(cudaStreamQuery, (cudaStream_t stream), checked(stream))
API(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned),
    event_of(event) ? checked(stream) : returned(cudaErrorInvalidResourceHandle))
API(cudaStreamAttachMemAsync, (cudaStream_t stream, void*, size_t, unsigned), checked(stream))
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
    Call call;
    if (!callback || !is_stream(stream)) return returned(cudaErrorInvalidResourceHandle);
    callback(stream, sticky, data);
    return returned(cudaSuccess);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    Call call;
    if (!function || !is_stream(stream)) return returned(cudaErrorInvalidResourceHandle);
    function(data);
    return returned(cudaSuccess);
}
API(cudaStreamGetFlags, (cudaStream_t stream, unsigned* flags),
    is_stream(stream) ? stored(flags, options_of(stream).flags) : returned(cudaErrorInvalidValue))
API(cudaStreamGetPriority, (cudaStream_t stream, int* priority),
    is_stream(stream) ? stored(priority, options_of(stream).priority) : returned(cudaErrorInvalidValue))
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    Call call;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return returned(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    Call call;
    if (!event) return returned(cudaErrorInvalidValue);
    *event = (cudaEvent_t) new Event{false, !(flags & cudaEventDisableTiming), {}};
    events.insert(*event);
    return returned(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Call call;
    Event* e = event_of(event);
    if (!e || !is_stream(stream)) return returned(cudaErrorInvalidResourceHandle);
    e->is_recorded = true;
    clock_gettime(CLOCK_MONOTONIC, &e->at);
    return returned(cudaSuccess);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API(cudaEventSynchronize, (cudaEvent_t event), checked(event))
API(cudaEventQuery, (cudaEvent_t event), checked(event))
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    Call call;
    Event *a = event_of(start), *b = event_of(end);
    if (!milliseconds) return returned(cudaErrorInvalidValue);
    if (!a || !b || !a->is_recorded || !b->is_recorded || !a->has_time || !b->has_time)
        return returned(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)((double)(b->at.tv_sec - a->at.tv_sec) * 1e3 + (double)(b->at.tv_nsec - a->at.tv_nsec) / 1e6);
    return returned(cudaSuccess);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Call call;
    if (!events.erase(event)) return returned(cudaErrorInvalidResourceHandle);
    delete (Event*)event;
    return returned(cudaSuccess);
}
}
