// fastAtomicAdd. A GPU adds pairs of halves at once; the sums are the same.
#pragma once

#include "../../cuda/Atomic.cuh"

namespace at::native {
template <class T, class Index>
__device__ __forceinline__ void fastAtomicAdd(T* tensor, Index index, const Index numel, T value, bool fast) {
    gpuAtomicAddNoReturn(tensor + index, value);
}
}  // namespace at::native
