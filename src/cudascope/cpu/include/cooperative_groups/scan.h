// Reductions and scans of a group: op over the values of all its threads, of the threads up to the own one, or of the
// threads before it, in order of rank. Before the first value there is T(). The operators have names.
#pragma once

#include "../cooperative_groups.h"

namespace cooperative_groups {
#define SIMT_OPERATOR(name, expression)                                 \
    template <class T>                                                  \
    struct name {                                                       \
        SIMT_UNSEEN T operator()(T a, T b) const { return expression; } \
    };
SIMT_OPERATOR(plus, a + b)
SIMT_OPERATOR(less, b < a ? b : a)
SIMT_OPERATOR(greater, a < b ? b : a)
SIMT_OPERATOR(bit_and, a & b)
SIMT_OPERATOR(bit_or, a | b)
SIMT_OPERATOR(bit_xor, a ^ b)
#undef SIMT_OPERATOR

#define SIMT_FOLD(name, fold)                                                                                      \
    template <class Group, class T, class Op>                                                                      \
    __forceinline__ impl::plain<T> name(const Group& group, T&& value, Op&& op, int line = __builtin_LINE()) {     \
        return simt::folded<fold, impl::plain<T>>(simt::EXCHANGE, group.get_mask(), value, op, line);              \
    }
#define SIMT_SCAN(name, fold)                                                                                      \
    SIMT_FOLD(name, fold)                                                                                          \
    template <class Group, class T>                                                                                \
    __forceinline__ impl::plain<T> name(const Group& group, T&& value, int line = __builtin_LINE()) {              \
        return name(group, value, plus<impl::plain<T>>(), line);                                                   \
    }
SIMT_FOLD(reduce, simt::Fold::all)
SIMT_SCAN(inclusive_scan, simt::Fold::inclusive)
SIMT_SCAN(exclusive_scan, simt::Fold::exclusive)
#undef SIMT_SCAN
#undef SIMT_FOLD
}  // namespace cooperative_groups
