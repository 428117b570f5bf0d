// Once the assert of simt_threads.h is there, it stays.
#ifndef assert
#include_next <assert.h>
#endif
