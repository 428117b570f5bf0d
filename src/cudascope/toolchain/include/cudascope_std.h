// What CUDA's headers always include of C++'s standard library: CCCL has it for a GPU. A source that says std:: gets it.
#pragma once
#undef INFINITY  // CCCL defines them in its own way
#undef NAN
#include <cuda/std/cmath>
#undef INFINITY
#undef NAN
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#include <cuda/std/__algorithm/clamp.h>
#include <cuda/std/__algorithm/max.h>
#include <cuda/std/__algorithm/min.h>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstdlib>
#include <cuda/std/cstring>
#include <cuda/std/functional>
#include <cuda/std/limits>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
namespace std {
using namespace cuda::std;
using ::abs, ::erf, ::erfc, ::fdim, ::fma, ::fmod, ::modf, ::printf, ::remainder, ::remquo;  // not in cuda::std
}
