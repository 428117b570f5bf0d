// The integers of <stdint.h> with the types that they have for nvcc on Linux.
#pragma once
#define CUDASCOPE_INTEGERS(bits, type, fast, fast_u)                             \
    typedef signed type int##bits##_t, int_least##bits##_t;                      \
    typedef unsigned type uint##bits##_t, uint_least##bits##_t;                  \
    typedef fast int_fast##bits##_t;                                             \
    typedef fast_u uint_fast##bits##_t;
CUDASCOPE_INTEGERS(8, char, signed char, unsigned char)
CUDASCOPE_INTEGERS(16, short, long, unsigned long)
CUDASCOPE_INTEGERS(32, int, long, unsigned long)
#ifdef CUDASCOPE_LONG_LONG  // as headers of NVIDIA's declare them too: nvrtc.py
CUDASCOPE_INTEGERS(64, long long, long, unsigned long)
#else
CUDASCOPE_INTEGERS(64, long, long, unsigned long)
#endif
typedef int64_t intptr_t, intmax_t;
typedef uint64_t uintptr_t, uintmax_t;
typedef long ptrdiff_t, ssize_t;
typedef unsigned short ushort;
typedef unsigned int uint, u_int32_t;
typedef unsigned long ulong;

#define INT8_MAX 127
#define INT16_MAX 32767
#define INT32_MAX 2147483647
#define INT64_MAX 9223372036854775807L
#define INT8_MIN (-INT8_MAX - 1)
#define INT16_MIN (-INT16_MAX - 1)
#define INT32_MIN (-INT32_MAX - 1)
#define INT64_MIN (-INT64_MAX - 1)
#define UINT8_MAX 255
#define UINT16_MAX 65535
#define UINT32_MAX 4294967295u
#define UINT64_MAX 18446744073709551615UL
#define INTPTR_MAX INT64_MAX
#define INTPTR_MIN INT64_MIN
#define UINTPTR_MAX UINT64_MAX
#define INTMAX_MAX INT64_MAX
#define INTMAX_MIN INT64_MIN
#define UINTMAX_MAX UINT64_MAX
#define PTRDIFF_MAX INT64_MAX
#define PTRDIFF_MIN INT64_MIN
#define SIZE_MAX UINT64_MAX
#define INT8_C(x) x
#define INT16_C(x) x
#define INT32_C(x) x
#define INT64_C(x) x##L
#define UINT8_C(x) x
#define UINT16_C(x) x
#define UINT32_C(x) x##U
#define UINT64_C(x) x##UL
#define INTMAX_C(x) x##L
#define UINTMAX_C(x) x##UL
