// What PTX instructions are called with: registers as bits, which each instruction reads as the type it names.
#pragma once

#include "rounding.h"
#include "threads.h"

namespace simt::ptx {

using pred = bool;
using b8 = uint8_t; using b16 = uint16_t; using b32 = uint32_t; using b64 = uint64_t; using b128 = unsigned __int128;
using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using s8 = int8_t; using s16 = int16_t; using s32 = int32_t; using s64 = int64_t;
using f16 = __half; using f16x2 = __half2; using bf16 = __nv_bfloat16; using bf16x2 = __nv_bfloat162;
using f32 = float; using f64 = double;
struct tf32 { float value; };
template <class H>
struct integers { H x, y; };
using s16x2 = integers<s16>; using u16x2 = integers<u16>;
struct f32x2 {  // sm_100 and later
    float x, y;
    f32x2() = default;
    SIMT_METHOD f32x2(float x, float y) : x(x), y(y) {}
};
template <__nv_fp8_interpretation_t of>
struct fp8x2 {
    static constexpr auto kind = of;
    uint16_t bits;
};
using e4m3x2 = fp8x2<__NV_E4M3>; using e5m2x2 = fp8x2<__NV_E5M2>;

enum Flag : unsigned {  // the modifiers of an instruction
    RN = 1, RZ = 2, RM = 4, RP = 8, RNI = 0x10, RZI = 0x20, RMI = 0x40, RPI = 0x80, RNA = 0x100,
    FTZ = 0x200, SAT = 0x400, SATFINITE = 0x800, RELU = 0x1000, NAN_WINS = 0x2000, XORSIGN = 0x4000,
    HI = 0x8000, LO = 0x10000, WIDE = 0x20000, CLAMP = 0x40000, WRAP = 0x80000, SHIFTAMT = 0x100000, CC = 0x200000,
};

template <class T>
constexpr bool is_pair = std::is_same_v<T, f16x2> || std::is_same_v<T, bf16x2> || std::is_same_v<T, f32x2>;
template <class T>
constexpr bool is_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
constexpr bool is_integer = std::is_integral_v<T> || std::is_same_v<T, b128>;

template <class To, class From>
SIMT_INLINE To cast_bits(const From& from) {
    To to{};
    __builtin_memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
    return to;
}

// The value of an operand, in the type of whatever parameter it is passed to.
template <class R>
struct Register {
    R bits;
    template <class T>
    SIMT_METHOD operator T() const { return cast_bits<T>(bits); }
};
template <class R>
SIMT_INLINE Register<R> in(R bits) { return {bits}; }
struct Integer {
    uint64_t value;
    template <class T>
    SIMT_METHOD operator T() const {
        if constexpr (std::is_floating_point_v<T>) return (T)(int64_t)value;
        else return cast_bits<T>(value);
    }
};
template <class F>
struct Real {
    F value;
    template <class T>
    SIMT_METHOD operator T() const {
        if constexpr (std::is_floating_point_v<T>) return (T)value;
        else return cast_bits<T>(value);
    }
};

template <class R, class T>
SIMT_INLINE void out(R& reg, const T& value) {  // a narrower integer is extended by its sign
    if constexpr (is_integer<T> && is_integer<R>) reg = (R)value;
    else reg = cast_bits<R>(value);
}

// The operands of an asm statement: C++ values on their way into registers and back.
template <class R, class T>
SIMT_INLINE R input(const T& value) {
    if constexpr (sizeof(R) == sizeof(T)) return cast_bits<R>(value);
    else return (R)value;
}
template <class T, class R>
SIMT_INLINE void output(T& value, const R& reg) { value = cast_bits<std::remove_cv_t<T>>(reg); }

template <class T, int N>
struct __align__(sizeof(T) * N) Vector { T x[N]; };

// The accesses of a kernel of PTX. SIMT_PTX: its build has no hook that the compiler puts before each access.
SIMT_INLINE void touch(const char* address, unsigned bytes, simt::Access access, bool is_volatile = false) {
#if defined(SIMT_PTX) && defined(SIMT_INSTRUMENTED)
    simt_touch(address, bytes, access, is_volatile);
#endif
}
// Around a load of this number, whose value is used by stores only; before a store of what loads of these bits loaded.
#if defined(SIMT_PTX) && defined(SIMT_INSTRUMENTED)
#define SIMT_LOADS(number) simt_loads(number)
#define SIMT_STORES(bits) simt_stores(bits)
#else
#define SIMT_LOADS(number)
#define SIMT_STORES(bits)
#endif
template <class T, bool is_volatile = false>
SIMT_INLINE T read(const char* address) {
    touch(address, sizeof(T), simt::READ, is_volatile);
    return *(const T*)address;
}
template <class T, bool is_volatile = false>
SIMT_INLINE void write(char* address, const T& value) {
    touch(address, sizeof(T), simt::WRITE, is_volatile);
    *(T*)address = value;
}
}  // namespace simt::ptx
