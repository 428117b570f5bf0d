"""cuda::atomic, cuda::atomic_ref and __nv_atomic_*: their values, and what their orders hand over."""

import numpy as np
import pytest
from source_files import file_of

from cudascope import CudaKernel, Finding, check

INCLUDE = "#include <cuda/atomic>\n#include <cuda/std/atomic>\n"
OPERATIONS = (
    INCLUDE
    + """
__device__ cuda::atomic<int, cuda::thread_scope_device> total{5};
__global__ void members(int* out) {
    __shared__ cuda::atomic<unsigned, cuda::thread_scope_block> here;
    here = 12;
    int i = 0, expected = 1;
    out[i++] = here.fetch_add(3) + here.fetch_sub(1, cuda::memory_order_relaxed);
    out[i++] = here.fetch_and(6) + (here |= 9) + (here ^= 1);
    out[i++] = here++ + ++here;
    out[i++] = here.fetch_max(99) + here.fetch_min(7) + here.load(cuda::std::memory_order_acquire);
    cuda::atomic_ref<int> place(out[20]);
    place.store(8);
    out[i++] = place.compare_exchange_strong(expected, 3);
    out[i++] = expected;
    out[i++] = place.compare_exchange_weak(expected, 4);
    out[i++] = place.exchange(6) + place;
    out[i++] = total += 2;
}
__global__ void builtins(int* out) {
    int *at = out + 20, i = 0, seen, value = 8, expected = 1;
    __nv_atomic_store(at, &value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_DEVICE);
    __nv_atomic_load(at, &seen, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_BLOCK);
    out[i++] = seen + __nv_atomic_load_n(at, __NV_ATOMIC_RELAXED);
    __nv_atomic_add(at, 5, __NV_ATOMIC_RELAXED), __nv_atomic_sub(at, 1, __NV_ATOMIC_ACQ_REL);
    out[i++] = __nv_atomic_fetch_min(at, 3, __NV_ATOMIC_SEQ_CST) + __nv_atomic_fetch_max(at, 7, __NV_ATOMIC_RELAXED);
    out[i++] = __nv_atomic_fetch_and(at, 5, __NV_ATOMIC_RELAXED) + __nv_atomic_fetch_or(at, 8, __NV_ATOMIC_RELAXED);
    out[i++] = __nv_atomic_fetch_xor(at, 1, __NV_ATOMIC_RELAXED) + __nv_atomic_exchange_n(at, 2, __NV_ATOMIC_RELAXED);
    out[i++] = __nv_atomic_compare_exchange_n(at, &expected, 9, false, __NV_ATOMIC_RELAXED, __NV_ATOMIC_RELAXED);
    out[i++] = expected;
    out[i++] = __nv_atomic_compare_exchange(at, &expected, &value, true, __NV_ATOMIC_RELAXED, __NV_ATOMIC_RELAXED);
}
"""
)


@pytest.mark.slow
def test_the_members_of_cuda_atomic_give_what_was_there():
    out = np.zeros(24, dtype=np.int32)
    CudaKernel(file_of(OPERATIONS), "members")[1, 1](out)
    assert out[:9].tolist() == [27, 14 + 15 + 14, 14 + 16, 16 + 99 + 7, 0, 8, 1, 10, 7]


def test_the_builtins_of_nvcc_give_what_was_there():
    out = np.zeros(24, dtype=np.int32)
    CudaKernel(file_of(OPERATIONS), "builtins")[1, 1](out)
    assert out[:7].tolist() == [16, 12 + 3, 7 + 5, 13 + 12, 0, 2, 1]
    assert out[20] == 8


HAND_OVER = (
    INCLUDE
    + """
__global__ void members(int* data, int* flag, int* out) {
    cuda::atomic_ref<int, cuda::thread_scope_device> ready(*flag);
    if (blockIdx.x == 0) *data = 7, ready.store(1, cuda::memory_order_RELEASE);
    else { while (ready.load(cuda::memory_order_ACQUIRE) == 0) {} *out = *data; }
}
__global__ void waits(int* data, int* flag, int* out) {
    cuda::atomic_ref<int, cuda::thread_scope_device> ready(*flag);
    if (blockIdx.x == 0) *data = 7, ready.store(1, cuda::memory_order_RELEASE), ready.notify_all();
    else ready.wait(0, cuda::memory_order_ACQUIRE), *out = *data;
}
__global__ void builtins(int* data, int* flag, int* out) {
    if (blockIdx.x == 0) *data = 7, __nv_atomic_store_n(flag, 1, __NV_ATOMIC_RELEASE);
    else { while (__nv_atomic_load_n(flag, __NV_ATOMIC_ACQUIRE) == 0) {} *out = *data; }
}
"""
)
ORDERED = HAND_OVER.replace("order_RELEASE", "order_release").replace("order_ACQUIRE", "order_acquire")
RELAXED = HAND_OVER.replace("order_RELEASE", "order_relaxed").replace("order_ACQUIRE", "order_relaxed")
RELAXED = RELAXED.replace("ATOMIC_RELEASE", "ATOMIC_RELAXED").replace("ATOMIC_ACQUIRE", "ATOMIC_RELAXED")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["members", "waits", "builtins"])
def test_release_and_acquire_hand_over_and_relaxed_does_not(name):
    for seed in (None, *range(6)):  # either thread block may be the first
        data, flag, out = (np.zeros(1, dtype=np.int32) for _ in range(3))
        with check(schedule=seed):
            CudaKernel(file_of(ORDERED), name)[2, 1](data, flag, out)
        assert out[0] == 7
        flag[0] = 0
        with check(schedule=seed), pytest.raises(Finding, match=r"has (written|read)") as raised:
            CudaKernel(file_of(RELAXED), name)[2, 1](data, flag, out)
        assert (raised.value.what, raised.value.tensor) == ("race", "data")
