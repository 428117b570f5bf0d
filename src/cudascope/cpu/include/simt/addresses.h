// What memory an address belongs to. One of shared memory is also a number of 32 bits that counts from the thread
// block's own. It is never 0, and it is aligned as the address is, to 1024 bytes at most.
#pragma once

#include "threads.h"

SIMT_INLINE size_t __cvta_generic_to_shared(const void* address) {
    return (uint32_t)((const char*)address - (const char*)simt_shared_base() + 1024);
}
SIMT_INLINE void* __cvta_shared_to_generic(size_t address) { return (char*)simt_shared_base() + (int32_t)address - 1024; }
SIMT_INLINE size_t __cvta_generic_to_global(const void* address) { return (size_t)address; }
SIMT_INLINE void* __cvta_global_to_generic(size_t address) { return (void*)address; }
SIMT_INLINE size_t __cvta_generic_to_local(const void* address) { return (size_t)address; }
SIMT_INLINE void* __cvta_local_to_generic(size_t address) { return (void*)address; }
SIMT_INLINE unsigned __isShared(const void* address) { return simt_is_shared(address); }
SIMT_INLINE unsigned __isGlobal(const void* address) { return !simt_is_shared(address) && !simt_is_local(address); }
SIMT_INLINE unsigned __isLocal(const void* address) { return simt_is_local(address); }
