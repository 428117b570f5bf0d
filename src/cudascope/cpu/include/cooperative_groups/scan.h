// Scans: op over the values of a group's threads up to the own one, or before it (nothing before it is T()).
#pragma once

#include "functional.h"

namespace cooperative_groups {
#define SIMT_SCAN(name, fold)                                                                                       \
    template <class Group, class T, class Op>                                                                       \
    __forceinline__ impl::plain<T> name(const Group& group, T&& value, Op&& op, int line = __builtin_LINE()) {      \
        return impl::folded<impl::fold, Group, impl::plain<T>>(group, value, op, line);                             \
    }                                                                                                               \
    template <class Group, class T>                                                                                 \
    __forceinline__ impl::plain<T> name(const Group& group, T&& value, int line = __builtin_LINE()) {               \
        return name(group, value, plus<impl::plain<T>>(), line);                                                    \
    }
SIMT_SCAN(inclusive_scan, INCLUSIVE)
SIMT_SCAN(exclusive_scan, EXCLUSIVE)
#undef SIMT_SCAN
}  // namespace cooperative_groups
