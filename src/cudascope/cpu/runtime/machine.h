// Everything that differs between the machines: pages, signals, and memory order. switch.h has the registers,
// toolchain/compiler.py the part of the compiler, and translate/assembly.py the part of the assembler.
#pragma once

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

// CUDA allows a thread 512 KB of local memory; the rest is for the runtime's own calls and for a signal's frame. The lowest
// GUARD bytes of a stack cannot be touched. They are a multiple of the size of a page, and no smaller than -fstack-clash-
// protection expects.

#if defined(__x86_64__)

constexpr uint64_t PAGE = 4096;
constexpr size_t STACK = 576 << 10, GUARD = 4096;

static uint64_t program_counter(void* state) { return (uint64_t)((ucontext_t*)state)->uc_mcontext.gregs[REG_RIP]; }

constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
static bool is_division(int number, void*) { return number == SIGFPE; }
static bool is_trap(int number) { return number == SIGILL; }

// Other cores see this core's stores in order, and the call of simt_fence keeps the compiler from another order.
static void order_memory() {}

#elif defined(__aarch64__)

static const uint64_t PAGE = (uint64_t)sysconf(_SC_PAGESIZE);  // 4, 16 or 64 KB
constexpr size_t STACK = 640 << 10, GUARD = 64 << 10;

static uint64_t program_counter(void* state) { return (uint64_t)((ucontext_t*)state)->uc_mcontext.pc; }

// `brk` raises SIGTRAP: __builtin_trap executes one, and translate/assembly.py puts one in front of each division.
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
static bool is_division(int number, void* state) {
    constexpr uint32_t BRK = 0xd4200000 | 0xd1f << 5;
    return number == SIGTRAP && *(const uint32_t*)program_counter(state) == BRK;
}
static bool is_trap(int number) { return number == SIGILL || number == SIGTRAP; }

static void order_memory() { std::atomic_thread_fence(std::memory_order_seq_cst); }

#else
#error "cudascope runs kernels on x86-64 and on aarch64"
#endif
