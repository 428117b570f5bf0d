#include "block_discontinuity.cuh"
