// The indices of a thread, the functions of the runtime that a kernel calls, barriers and fences, printf and assert.
#pragma once

#include "../../runtime/kinds.h"
#include "language.h"

extern "C" {
// The runtime sets them whenever a fiber goes on. They are variables and no macros, so a kernel may use these names for
// parameters, members and variables of its own.
#define SIMT_INDEX extern __thread __attribute__((tls_model("initial-exec"))) const uint3
SIMT_INDEX threadIdx;
SIMT_INDEX blockIdx;
SIMT_INDEX blockDim;
SIMT_INDEX gridDim;
#undef SIMT_INDEX
unsigned simt_lane() __attribute__((const));

int simt_barrier(bool predicate, int line);  // returns how many threads brought true
void simt_grid_sync(int line);
// Each takes the function that the kernel has called: only lanes in the same function meet (PTX: the same qualifiers).
uint64_t simt_shuffle(simt::Collective function, unsigned mask, uint64_t value, unsigned source);
simt::Votes simt_vote(simt::Collective function, unsigned mask, bool predicate);
unsigned simt_match(simt::Collective function, unsigned mask, uint64_t value);  // the lanes that brought this value
void simt_syncwarp(unsigned mask);
// A meeting of all lanes of `mask`: the last one to arrive runs `complete` over what each brought (payloads[lane]; null
// of a lane that is not there) before any of them goes on. Lanes that name another function or another line of the
// kernel have not come to the same meeting. PRODUCT and MATRIX need all 32 lanes. Orders no memory; returns the lanes.
unsigned simt_meet(
    simt::Collective collective, unsigned mask, void* payload, void (*complete)(void** payloads), int line);
[[noreturn]] void simt_refuse(unsigned lane, const char* message);  // what a lane of this warp has asked for
void simt_access(const volatile void* address, unsigned bytes, simt::Access access);  // tells of one that no hook sees
void simt_touch(const volatile void* address, unsigned bytes, simt::Access access, bool is_volatile);  // and is aligned
void simt_loads(unsigned number);  // the accesses that follow: a load whose value is used by stores only; 0: any access
void simt_stores(uint64_t bits);  // this thread stores what its loads of these numbers have loaded
uint64_t simt_seed();  // of the schedule; 0 without one
unsigned simt_activemask();
void* simt_shared_base();
bool simt_is_shared(const void* address);
bool simt_is_local(const void* address);  // on the stack of a thread
// The `id`-th of a thread block's sixteen barriers frees who waits in it when so many threads have arrived (0: all).
void simt_numbered_barrier(unsigned id, unsigned threads, bool waits);
[[noreturn]] void simt_exit();  // this thread has left the kernel
void simt_returned(unsigned body, unsigned from);  // a `return` of a kernel follows: translate/returns.py
bool simt_carry();  // what this thread's last sum or difference that keeps it left over (PTX: add.cc)
void simt_keep_carry(bool carry);
void simt_fence();
void simt_acquire();  // what happened before the flags that this thread has read happens before what follows
void simt_block_scope(bool begins);  // the atomics and fences that follow hold for one thread block
void simt_yield();
void simt_poll(const volatile void* address, unsigned bytes);  // a volatile read follows, which no hook sees
long long simt_clock();
void simt_atomic(const volatile void* address, int bytes);
void simt_atomic_if(const volatile void* address, int bytes, uint64_t compare);
bool simt_exchange_if(volatile void* address, int bytes, uint64_t* expected, uint64_t desired);
// This thread's asynchronous copies (async_copies.h). A copy moves `bytes` (4, 8, 16) to shared memory. The last `zeros`
// of the bytes become 0.
void simt_copy_async(void* to, const void* from, unsigned bytes, unsigned zeros);
bool simt_copies_async(const void* to, const void* from);  // whether these are shared and global memory
void simt_copies_commit();
void simt_copies_wait(unsigned newest);  // until all batches but the newest so many have landed
void simt_copies_wait_all();  // those that were not committed, too
// A barrier at `at` (8 bytes) that the kernel makes itself: `expected` arrivals end a phase (phases.h).
void simt_phases_init(void* at, unsigned expected);
uint64_t simt_phases_arrive(void* at, unsigned arrivals, unsigned dropped);  // in which phase; then expects fewer
void simt_phases_wait(void* at, uint64_t phase);
bool simt_phases_ended(void* at, uint64_t phase);
void simt_phases_await_copies(void* at);  // what this thread has begun since its last commit belongs to the phase
// The barriers and bulk copies of PTX (bulk_copies.h).
void simt_mbarrier_invalidate(void* at);
void simt_mbarrier_expect(void* at, unsigned bytes);
uint64_t simt_mbarrier_arrive(void* at, unsigned arrivals);
bool simt_mbarrier_ended(void* at, unsigned parity, bool waits);  // may give up
void simt_bulk_load(const simt::BulkCopy* copy, void* at);
void simt_bulk_store(const simt::BulkCopy* copy);
void simt_bulk_commit();
void simt_bulk_wait(unsigned newest);
void simt_proxy_fence();
// Asynchronous products of matrices (products.h).
void simt_product_reads(const char* address, bool share);
void simt_product(const simt::Product* product);
void simt_products_fence();
void simt_products_commit();
void simt_products_wait(unsigned newest, int line);
int simt_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void simt_fail(const char* message);
[[noreturn]] void simt_lacks(const char* message);  // what the runner does not have, and the kernel reached
void* simt_memcpy(void* to, const void* from, size_t bytes);
void* simt_memset(void* to, int value, size_t bytes);
}

constexpr int warpSize = 32;

#define printf simt_printf
namespace std { using ::simt_printf; }
#undef assert
#define SIMT_HAS_ASSERT
#define assert(condition) ((condition) ? (void)0 : simt_fail("assertion failed: " #condition))
#define __trap() simt_fail("__trap()")
#ifdef SIMT_INSTRUMENTED
#define memcpy simt_memcpy
#define memset simt_memset
#endif

// The line of the caller tells one barrier from another, also where the compiler makes one call of two.
SIMT_INLINE void __syncthreads(int line = __builtin_LINE()) { simt_barrier(false, line); }
SIMT_INLINE int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    return simt_barrier(predicate, line);
}
SIMT_INLINE int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    return simt_barrier(!predicate, line) == 0;
}
SIMT_INLINE int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return simt_barrier(predicate, line) != 0;
}
SIMT_INLINE void __threadfence() { simt_fence(); }
namespace simt {
// The atomics and fences of a block of statements have block scope.
struct Scope {
    bool in_block;
    SIMT_METHOD explicit Scope(bool is_block) : in_block(is_block) {
        if (in_block) simt_block_scope(true);
    }
    SIMT_METHOD ~Scope() {
        if (in_block) simt_block_scope(false);
    }
};
}  // namespace simt
SIMT_INLINE void __threadfence_block() {
    simt::Scope scope(true);
    simt_fence();
}
SIMT_INLINE void __threadfence_system() { simt_fence(); }
SIMT_INLINE void __nanosleep(unsigned) { simt_yield(); }
// Launches do not overlap here: what a kernel depends on is done when it starts.
SIMT_INLINE void cudaGridDependencySynchronize() {}
SIMT_INLINE void cudaTriggerProgrammaticLaunchCompletion() {}
SIMT_INLINE long long clock64() { return simt_clock(); }
#define clock clock64
