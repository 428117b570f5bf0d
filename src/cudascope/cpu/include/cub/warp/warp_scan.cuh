#include "warp_reduce.cuh"
