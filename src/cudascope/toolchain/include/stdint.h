#pragma once
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
#ifdef CUDASCOPE_LONG_LONG  // as headers of NVIDIA's declare them too: nvrtc.py
typedef long long int64_t, intptr_t;
typedef unsigned long long uint64_t, uintptr_t;
#else
typedef long int64_t, intptr_t;
typedef unsigned long uint64_t, uintptr_t;
#endif
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long ptrdiff_t;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
