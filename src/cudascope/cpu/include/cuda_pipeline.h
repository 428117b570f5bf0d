// Asynchronous copies as C calls them: cp.async through __pipeline_memcpy_async, _commit and _wait_prior.
#pragma once

#include "simt/threads.h"

SIMT_INLINE void __pipeline_memcpy_async(void* to, const void* from, size_t size_and_align, size_t zfill = 0) {
    simt_copy_async(to, from, (unsigned)size_and_align, (unsigned)zfill);
}
SIMT_INLINE void __pipeline_commit() { simt_copies_commit(); }
SIMT_INLINE void __pipeline_wait_prior(size_t prior) { simt_copies_wait((unsigned)prior); }
