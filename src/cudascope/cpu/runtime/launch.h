// A launch as Python asks for it and what comes back. cpu/abi.py reads this file, so the declarations stay plain.
#pragma once

#include <cstdint>

#include "kinds.h"

using namespace simt;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

enum FindingKind : unsigned { SIMT_FINDINGS };  // cpu/rules.py has the table

struct Dim { u32 x, y, z; };

struct Region {  // a tensor, or overlapping tensors together; or a variable of the compiled file
    u64 start, bytes;
    u32 granule;  // bytes of an element: races are looked for element by element
    u32 expect_written;  // reading an element before it is written is an error
    // The kernel promises not to write it; it cannot be moved: 1, a variable of the compiled file, or 2, other memory.
    u32 constant, in_place;
    u8* written;  // [bytes / granule], in and out; may be null
};

struct SharedArray { int64_t offset; u64 bytes; };  // offset from the start of the thread block's shared memory

struct Waiter { u64 site; u32 collective, mask, count, running, line; Dim thread; };  // line 0: that of the site

struct Error {
    u32 finding, access, space, bytes;
    Dim block, thread, other_block, other_thread;
    u64 site, other_site, address, barrier_site;  // of a race: where the thread has passed its last barrier
    int32_t region;  // index of a Region or SharedArray, -1: none
    u32 other_access;
    int64_t offset;  // bytes from its start
    u32 lane, num_waiters, apart;  // of a race, the farthest threads: 0 in a warp, 1 in a thread block, 2 in the grid
    Waiter waiters[8];
    char text[256];
    u64 count;  // how often it was found, with other threads or elements
};

struct Count { u64 site; u32 access, space; u64 requests, lanes, bytes, sectors, conflicts, wavefronts; };

struct Event {
    u64 site, order;
    int64_t offset;
    u32 block, execution;
    int32_t region;
    u16 thread;
    u8 bytes, access, space, pad[3];
};

struct Launch {
    void (*entry)(void**);
    void** arguments;
    u32 grid[3], block[3];
    u32 mode, workers, shuffled, keep_going;
    u64 seed, time_limit;  // nanoseconds
    u64 ignored;  // one bit for each FindingKind that is none
    Region* regions;
    SharedArray *shared, *guards;  // a guard says whether an array's constructor has run: no access of the kernel
    SharedArray* variables;  // of the compiled file, by address: those that may hold pointers
    SharedArray* objects;  // all constants and variables of an instrumented file, by address, in this order
    u64 shared_segment;  // bytes of a thread block's shared memory, all arrays and gaps together
    int64_t dynamic_offset;  // of the dynamic part, -1 without one
    u64 dynamic_bytes;
    u32 num_regions, num_shared, num_guards, num_variables, num_objects, num_pointers;
    u32* pointers;  // the arguments that point into a region
    u32* pointer_regions;  // which
    u64 max_events;
    u32 max_blocks;  // how many thread blocks a GPU holds at once
    u32 has_scopes;  // this kernel has atomics or fences of block scope
    u32 may_return;  // a thread of this kernel may leave by a `return` that does not tell (simt_returned)
    u64 host_start, host_end;  // the variables of a program's host code, which its kernels must not touch
    // results
    u32 num_errors;
    Error* errors;
    Count* counts;
    u64 num_counts;
    Event* events;
    u64 num_events;
    char* output;
    u64 num_output;
    // of an observed launch: how often the warps executed at least, and issued, each counted part of the kernel; and the
    // sectors of tensors
    u64 *executed, *issued;
    u64 num_executed, sectors_read, sectors_read_first, sectors_written;  // each sector once; first: before any write
    u64 too_many_issues;  // `issued` is not complete
};
