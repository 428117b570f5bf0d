// Asynchronous copies of any number of bytes, shared out among the threads of a group.
#pragma once

#include "../simt.h"

namespace cuda {
template <size_t alignment>
struct aligned_size_t {  // so many bytes, at addresses that are multiples of `alignment`
    static constexpr size_t align = alignment;
    size_t value;
    __forceinline__ constexpr explicit aligned_size_t(size_t bytes) : value(bytes) {}
    __forceinline__ constexpr operator size_t() const { return value; }
};
}  // namespace cuda

namespace simt {
// The share of thread `rank` of `threads`: pieces of 16, 8 or 4 bytes, as wide as both addresses allow, in turns. What
// is less than a piece, or does not go from global to shared memory, is copied at once.
SIMT_INLINE void copy_share(unsigned rank, unsigned threads, void* to, const void* from, size_t bytes) {
    uint64_t low = (uint64_t)to | (uint64_t)from;
    unsigned piece = low % 16 == 0 ? 16 : low % 8 == 0 ? 8 : 4;
    size_t whole = low % 4 == 0 && simt_copies_async(to, from) ? bytes / piece * piece : 0;
    for (size_t at = (size_t)rank * piece; at < whole; at += (size_t)threads * piece)
        simt_copy_async((char*)to + at, (const char*)from + at, piece, 0);
    for (size_t at = whole + rank; at < bytes; at += threads) ((char*)to)[at] = ((const char*)from)[at];
}
}  // namespace simt
