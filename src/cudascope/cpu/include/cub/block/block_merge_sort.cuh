#include "block_radix_sort.cuh"
