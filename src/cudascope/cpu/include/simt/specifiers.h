// The words of CUDA C++ that say where a function runs and where a variable lies.
#pragma once

#define __global__ __attribute__((flatten, noinline))  // one body per kernel, as nvcc makes it: lines stay exact
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
// one OS thread runs one thread block at a time; a GPU has the first array at an address that is good for wmma as well
#define __shared__ thread_local __attribute__((aligned(32)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

// What else has these names in a system's headers has another meaning there: translate/cuda.py renames the user's.
#define SIMT_NOINLINE __attribute__((noinline))
#define SIMT_ALIGNAS(n) __attribute__((aligned(n)))  // CUDA accepts it between __shared__ and the type, C++ does not
