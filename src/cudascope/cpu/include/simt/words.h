// Two halves or four bytes in a word, each for itself: __vadd2, __vadd4 and their like.
#pragma once

#include "integers.h"

namespace simt {
// Lane by lane, the result of op cut to a lane; op sees the lanes as numbers with or without a sign.
template <int bytes, bool is_signed, class Op>
SIMT_INLINE unsigned lanewise(unsigned a, unsigned b, Op op) {
    unsigned out = 0, mask = (1u << 8 * bytes) - 1;
    for (int i = 0; i < 4 / bytes; ++i)
        out |= ((unsigned)op(lane_of<is_signed>(a, bytes, i), lane_of<is_signed>(b, bytes, i)) & mask) << 8 * bytes * i;
    return out;
}
template <int bytes, bool is_signed>
SIMT_INLINE int clamped(int x) {
    constexpr int bits = 8 * bytes, low = is_signed ? -(1 << (bits - 1)) : 0;
    return std::max(low, std::min(x, low + (1 << bits) - 1));
}
}  // namespace simt

#define SIMT_WORDS_OF(parts, name, is_signed, expression)                                                      \
    SIMT_INLINE unsigned name##parts(unsigned a, unsigned b) {                                                 \
        constexpr int bytes = 4 / parts;                                                                       \
        return simt::lanewise<bytes, is_signed>(a, b, [](int x, int y) -> int { (void)bytes; return expression; }); \
    }
#define SIMT_WORDS(name, is_signed, expression) \
    SIMT_WORDS_OF(2, name, is_signed, expression) SIMT_WORDS_OF(4, name, is_signed, expression)
#define SIMT_WORDS_SU(name, expression) \
    SIMT_WORDS(name##s, true, expression) SIMT_WORDS(name##u, false, expression)

#define SIMT_SATURATED(is_signed, expression) (simt::clamped<bytes, is_signed>(expression))
SIMT_WORDS(__vadd, false, x + y)
SIMT_WORDS(__vsub, false, x - y)
SIMT_WORDS(__vaddss, true, SIMT_SATURATED(true, x + y))
SIMT_WORDS(__vaddus, false, SIMT_SATURATED(false, x + y))
SIMT_WORDS(__vsubss, true, SIMT_SATURATED(true, x - y))
SIMT_WORDS(__vsubus, false, SIMT_SATURATED(false, x - y))
SIMT_WORDS(__vavgs, true, (x + y + (x + y >= 0)) >> 1)
SIMT_WORDS(__vavgu, false, (x + y + 1) >> 1)
SIMT_WORDS(__vhaddu, false, (x + y) >> 1)
SIMT_WORDS_SU(__vabsdiff, x < y ? y - x : x - y)
SIMT_WORDS_SU(__vmax, x > y ? x : y)
SIMT_WORDS_SU(__vmin, x < y ? x : y)
SIMT_WORDS(__vcmpeq, false, -(x == y)) SIMT_WORDS(__vseteq, false, x == y)
SIMT_WORDS(__vcmpne, false, -(x != y)) SIMT_WORDS(__vsetne, false, x != y)
SIMT_WORDS_SU(__vcmpge, -(x >= y)) SIMT_WORDS_SU(__vsetge, x >= y)
SIMT_WORDS_SU(__vcmpgt, -(x > y)) SIMT_WORDS_SU(__vsetgt, x > y)
SIMT_WORDS_SU(__vcmple, -(x <= y)) SIMT_WORDS_SU(__vsetle, x <= y)
SIMT_WORDS_SU(__vcmplt, -(x < y)) SIMT_WORDS_SU(__vsetlt, x < y)
#define SIMT_WORDS_OF_ONE(name, expression) \
    SIMT_WORDS(name, true, expression)      \
    SIMT_INLINE unsigned name##2(unsigned a) { return name##2(a, 0); } \
    SIMT_INLINE unsigned name##4(unsigned a) { return name##4(a, 0); }
SIMT_WORDS_OF_ONE(__vabs, x < 0 ? -x : x)
SIMT_WORDS_OF_ONE(__vneg, -x)
SIMT_WORDS_OF_ONE(__vabsss, SIMT_SATURATED(true, x < 0 ? -x : x))
SIMT_WORDS_OF_ONE(__vnegss, SIMT_SATURATED(true, -x))
#undef SIMT_WORDS_OF_ONE
#undef SIMT_SATURATED
#undef SIMT_WORDS_SU
#undef SIMT_WORDS
#undef SIMT_WORDS_OF

// Sums of the absolute differences.
SIMT_FUNCTION(unsigned, __vsadu4, (unsigned a, unsigned b), simt::dot4<false, false>(__vabsdiffu4(a, b), 0x01010101, 0))
SIMT_FUNCTION(unsigned, __vsads4, (unsigned a, unsigned b), simt::dot4<false, false>(__vabsdiffs4(a, b), 0x01010101, 0))
SIMT_FUNCTION(unsigned, __vsadu2, (unsigned a, unsigned b), simt::dot2<false, false>(__vabsdiffu2(a, b), 0x01010101, 0))
SIMT_FUNCTION(unsigned, __vsads2, (unsigned a, unsigned b), simt::dot2<false, false>(__vabsdiffs2(a, b), 0x01010101, 0))
#undef SIMT_FUNCTION
