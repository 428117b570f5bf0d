// Rounding: one operation in another mode than to nearest, and to integers as the hardware converts.
#pragma once

#include <cfenv>

#include "simt_language.h"

namespace simt {
template <class T>
SIMT_INLINE T opaque(T x) {  // what the compiler neither computes beforehand nor moves past a change of the mode
    volatile T kept = x;
    return kept;
}

template <int mode, class Op, class... T>
SIMT_INLINE auto rounded(Op op, T... x) {
    if constexpr (mode == FE_TONEAREST) {
        return op(x...);
    } else {
        fesetround(mode);
        auto result = opaque(op(opaque(x)...));
        fesetround(FE_TONEAREST);
        return result;
    }
}

// Saturates. NaN gives 0, and where 64 bits are on either side the pattern 0x80….
template <class To, class From>
SIMT_INLINE To to_integer(From x) {
    if (std::isnan(x)) return sizeof(To) == 8 || sizeof(From) == 8 ? (To)1 << (8 * sizeof(To) - 1) : (To)0;
    constexpr To lowest = std::numeric_limits<To>::lowest(), highest = std::numeric_limits<To>::max();
    if (x <= (From)lowest) return lowest;
    return x >= (From)highest ? highest : (To)x;
}
}  // namespace simt
