// The switch from one fiber to another, for each machine. runtime.cpp alone includes this file.
//
// simt_switch keeps the registers that a called function must keep: on the stack whose address it stores in *keep. It takes
// the registers of the other fiber from the stack `go_on`. A new stack ends with FRAME words. Word START is where a fiber
// begins.
#pragma once

#include "fibers.h"

#if defined(__x86_64__)
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
#else
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
#endif

static void prepare(Context& context, char* stack, void (*start)()) {
    void** frame = (void**)(stack + STACK) - FRAME;
    for (int word = 0; word < FRAME; ++word) frame[word] = nullptr;
    frame[START] = (void*)start;
    context.sp = frame;
}
