// reduce: every thread of a group gets op over the values of all, in order of rank.
#pragma once

#include "functional.h"

namespace cooperative_groups {
template <class Group, class T, class Op>
__forceinline__ impl::plain<T> reduce(const Group& group, T&& value, Op&& op, int line = __builtin_LINE()) {
    return impl::folded<impl::REDUCE, Group, impl::plain<T>>(group, value, op, line);
}
}  // namespace cooperative_groups
