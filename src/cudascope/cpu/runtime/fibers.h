// A fiber is a stack, and the place on it where its registers are kept while another fiber runs.
#pragma once

#include "machine.h"

struct Context { void* sp; };
extern "C" [[gnu::visibility("hidden")]] void simt_switch(void** keep, void* go_on);  // switch.h
static void switch_to(Context& from, Context& to) { simt_switch(&from.sp, to.sp); }
