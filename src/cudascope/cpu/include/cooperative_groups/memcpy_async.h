// A group's asynchronous copies: each memcpy_async is a batch of its own in every thread of the group.
#pragma once

#include "../cooperative_groups.h"
#include "../simt/copies.h"

namespace cooperative_groups {
template <class Group, class T, class Bytes>
__forceinline__ void memcpy_async(const Group& group, T* to, const T* from, const Bytes& bytes) {
    simt::copy_share((unsigned)group.thread_rank(), (unsigned)group.size(), to, from, (size_t)bytes);
    simt_copies_commit();
}
// With a number of elements for each side: as many as both have.
template <class Group, class T, class ToLayout, class FromLayout>
__forceinline__ void memcpy_async(const Group& group, T* to, const ToLayout& to_elements, const T* from,
                                  const FromLayout& from_elements) {
    size_t elements = (size_t)to_elements < (size_t)from_elements ? (size_t)to_elements : (size_t)from_elements;
    memcpy_async(group, to, from, elements * sizeof(T));
}

// All copies of the group but the newest have arrived, for all of its threads to see.
template <unsigned newest, class Group>
__forceinline__ void wait_prior(const Group& group, int line = __builtin_LINE()) {
    simt_copies_wait(newest);
    sync(group, line);
}
template <class Group>
__forceinline__ void wait(const Group& group, int line = __builtin_LINE()) { wait_prior<0>(group, line); }
}  // namespace cooperative_groups
