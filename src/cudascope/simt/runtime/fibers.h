// A fiber: a stack and where it stands. switch_to keeps one and goes on with another.
#pragma once

#include <ucontext.h>

#include <cstddef>

// CUDA allows a thread 512 KB of local memory; the rest is for the runtime's own calls and for a signal's frame.
constexpr size_t STACK = 576 << 10, GUARD = 4096;

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
struct Context { void* sp; };
extern "C" void simt_switch(void** keep, void* go_on);
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
static void switch_to(Context& from, Context& to) { simt_switch(&from.sp, to.sp); }
static void prepare(Context& context, char* stack, void (*start)()) {
    void** top = (void**)(stack + STACK);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = (void*)start;
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    context.sp = top;
}
#else
struct Context { ucontext_t context; };
static void switch_to(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
static void prepare(Context& context, char* stack, void (*start)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack + GUARD;
    context.context.uc_stack.ss_size = STACK - GUARD;
    context.context.uc_link = nullptr;
    makecontext(&context.context, start, 0);
}
#endif
