// Memory from the system.
#pragma once

#include <sys/mman.h>

#include "block.h"

static char* reserve(u64 bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (char*)p;
}
static u64 up(u64 bytes, u64 unit) { return (bytes + unit - 1) / unit * unit; }
