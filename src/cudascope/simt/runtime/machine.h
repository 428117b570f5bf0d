// Everything that differs between the machines: pages, registers, signals, and memory order. simt/machine.py has the part of
// the compiler, and simt/assembly.py the part of the assembler.
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
//
// simt_switch keeps the registers that a called function must keep: on the stack whose address it stores in *keep. It takes
// the registers of the other fiber from the stack `go_on`. A new stack ends with FRAME words. Word START is where a fiber
// begins.
extern "C" void simt_switch(void** keep, void* go_on);

#if defined(__x86_64__)

constexpr uint64_t PAGE = 4096;
constexpr size_t STACK = 576 << 10, GUARD = 4096;
constexpr int FRAME = 8, START = 6;  // the last word keeps the stack aligned as after a call
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch,.-simt_switch
)");

static uint64_t program_counter(void* state) { return (uint64_t)((ucontext_t*)state)->uc_mcontext.gregs[REG_RIP]; }

constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
static bool is_division(int number, void*) { return number == SIGFPE; }
static bool is_trap(int number) { return number == SIGILL; }

// Other cores see this core's stores in order, and the call of simt_fence keeps the compiler from another order.
static void order_memory() {}

#elif defined(__aarch64__)

static const uint64_t PAGE = (uint64_t)sysconf(_SC_PAGESIZE);  // 4, 16 or 64 KB
constexpr size_t STACK = 640 << 10, GUARD = 64 << 10;
constexpr int FRAME = 20, START = 1;
asm(R"(
.text
.globl simt_switch
.type simt_switch,%function
simt_switch:
    hint 34  // bti c: a call may come through a pointer
    stp x29, x30, [sp, -160]!
    stp x19, x20, [sp, 16]
    stp x21, x22, [sp, 32]
    stp x23, x24, [sp, 48]
    stp x25, x26, [sp, 64]
    stp x27, x28, [sp, 80]
    stp d8, d9, [sp, 96]
    stp d10, d11, [sp, 112]
    stp d12, d13, [sp, 128]
    stp d14, d15, [sp, 144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, 16]
    ldp x21, x22, [sp, 32]
    ldp x23, x24, [sp, 48]
    ldp x25, x26, [sp, 64]
    ldp x27, x28, [sp, 80]
    ldp d8, d9, [sp, 96]
    ldp d10, d11, [sp, 112]
    ldp d12, d13, [sp, 128]
    ldp d14, d15, [sp, 144]
    ldp x29, x30, [sp], 160
    ret
.size simt_switch,.-simt_switch
)");

static uint64_t program_counter(void* state) { return (uint64_t)((ucontext_t*)state)->uc_mcontext.pc; }

// `brk` raises SIGTRAP: __builtin_trap executes one, and simt/assembly.py puts one in front of each division.
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
