// As C wants, each #include of this file defines assert anew: NDEBUG switches it off.
#ifndef SIMT_HAS_ASSERT
#include_next <assert.h>
#else
#undef assert
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition) ((condition) ? (void)0 : simt_fail("assertion failed: " #condition))
#endif
#endif
