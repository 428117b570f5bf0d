// A fiber: a stack and where it stands. switch_to keeps one and goes on with another.
#pragma once

#include "machine.h"

struct Context { void* sp; };
static void switch_to(Context& from, Context& to) { simt_switch(&from.sp, to.sp); }
static void prepare(Context& context, char* stack, void (*start)()) {
    void** frame = (void**)(stack + STACK) - FRAME;
    for (int word = 0; word < FRAME; ++word) frame[word] = nullptr;
    frame[START] = (void*)start;
    context.sp = frame;
}
