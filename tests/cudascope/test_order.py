"""The order that `cudascope.check()` sees, in any schedule; and accesses past local memory and freed memory."""

import pytest
import torch
from source_files import file_of
from torch import Tensor

import cudascope
from cudascope import CudaKernel

SCHEDULES = (None, 0, 1, 2, 3)


def integers(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32)


def found(source: str, name: str, shape: tuple[int, int], *args, seed: int | None = None) -> list[tuple]:
    """Return the rule and the tensor of each finding."""
    with cudascope.check(schedule=seed, stop=False) as report:
        CudaKernel(file_of(source), name)[shape](*args)
    return [(finding.rule, finding.tensor) for finding in report.findings]


# ------------------------------------------------------------------------------------------------ waits by an atomic

WAITERS = ["atomicAdd", "atomicCAS", "ld.acquire", "volatile"]  # of each `way`
GRID_BARRIER = r"""
__device__ int acquired(const int* p) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
__global__ void neighbours(int* arrived, int* data, int* out, int way, bool fence) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    data[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (fence) __threadfence();
        atomicAdd(arrived, 1);
        if (way == 0) while (atomicAdd(arrived, 0) < gridDim.x) {}
        if (way == 1) while (atomicCAS(arrived, 0, 0) < gridDim.x) {}
        if (way == 2) while (acquired(arrived) < gridDim.x) {}
        if (way == 3) while (*(volatile int*)arrived < gridDim.x) {}
        __threadfence();
    }
    __syncthreads();
    out[i] = data[(i + blockDim.x) % n];
}
"""


@pytest.mark.parametrize("wait", WAITERS)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_whoever_waits_by_an_atomic_comes_after_the_others_even_if_it_began_first(wait, seed):
    data, out = integers(128), integers(128)
    args = integers(1), data, out, WAITERS.index(wait), True
    assert not found(GRID_BARRIER, "neighbours", (4, 32), *args, seed=seed)
    assert torch.equal(out, data.roll(-32))


@pytest.mark.parametrize("wait", WAITERS)
def test_a_barrier_of_the_grid_without_a_fence_orders_nothing(wait):
    args = integers(1), integers(128), integers(128), WAITERS.index(wait), False
    assert ("race", "data") in found(GRID_BARRIER, "neighbours", (4, 32), *args)


# ------------------------------------------------------------------------------------------------ atomic and plain

SET_AND_COUNT = """
__global__ void set_and_count(int* out, bool barrier) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    if (barrier) __syncthreads();
    atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = count;
}
__global__ void count_and_wait(int* out, bool barrier) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    if (barrier) __syncthreads();
    if (threadIdx.x == 0 || threadIdx.x >= 32) atomicAdd(&count, 1);
    if (threadIdx.x) return;
    while (*(volatile int*)&count < 33) {}
    out[0] = 64;
}
__global__ void count_and_look(int* out, bool barrier) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    int seen = 0;
    if (threadIdx.x == blockDim.x - 1) seen = count;  // the first to go on after the barrier
    if (barrier) __syncthreads();
    atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = count + seen;
}
"""


@pytest.mark.parametrize("name", ["set_and_count", "count_and_wait", "count_and_look"])
@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_plain_access_races_with_atomics_after_an_atomic_of_its_own_thread(name, seed):
    """In the default order thread 0 is the first to count: its own atomic hides neither its store nor its load."""
    out = integers(1)
    assert not found(SET_AND_COUNT, name, (1, 64), out, True, seed=seed)
    assert out.item() == 64
    with cudascope.time_limit(0.3):  # the store of thread 0 may undo additions, and then the wait has no end
        findings = found(SET_AND_COUNT, name, (1, 64), out, False, seed=seed)
    assert ("race", "count") in findings or ("uninitialised", "count") in findings


def test_a_barrier_that_is_used_before_its_initialisation_is_ordered_is_a_race():
    source = """
        #include <cuda/barrier>
        __global__ void arrive(int* out, bool barrier) {
            __shared__ cuda::barrier<cuda::thread_scope_block> all;
            if (threadIdx.x == 0) init(&all, blockDim.x);
            if (barrier) __syncthreads();
            all.arrive_and_wait();
            out[threadIdx.x] = 1;
        }
    """
    assert not found(source, "arrive", (1, 64), integers(64), True)
    assert found(source, "arrive", (1, 64), integers(64), False) == [("race", "all")]


# ------------------------------------------------------------------------------------------------ volatile data

LAST_BLOCK = """
__global__ void last_block(const float* in, volatile float* parts, unsigned* count, float* out, bool fence,
                           bool barrier) {
    __shared__ bool is_last;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    parts[i] = in[i];
    if (fence) __threadfence();
    if (barrier) __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(count, gridDim.x) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    float sum = 0;
    for (int k = threadIdx.x; k < gridDim.x * blockDim.x; k += blockDim.x) sum += parts[k];
    out[threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize(("fence", "barrier"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("seed", SCHEDULES)
def test_volatile_parts_that_the_last_thread_block_sums_need_a_fence_and_a_barrier(fence, barrier, seed):
    args = torch.ones(256), torch.zeros(256), integers(1), torch.zeros(64), fence, barrier
    expected = [] if fence and barrier else [("race", "parts")]
    assert found(LAST_BLOCK, "last_block", (4, 64), *args, seed=seed) == expected


FLAGS = """
__global__ void in_turn(int* tickets, volatile int* serving, int* sum) {
    if (threadIdx.x) return;
    for (int i = 0; i < 3; ++i) {
        int mine = atomicAdd(tickets, 1);
        while (*serving != mine) {}
        __threadfence();
        *sum += 1;
        __threadfence();
        *serving = mine + 1;
    }
}
__global__ void looks_once(int* done, volatile int* ready, int* data) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        *data = 7;
        __threadfence();
        *ready = 1;
        atomicAdd(done, 1);
    } else {
        while (atomicAdd(done, 0) == 0) {}
        if (*ready && blockIdx.x == 1) ++*data;
    }
}
__global__ void search(int* next, volatile int* found, int* steps) {
    for (;;) {
        if (*found) return;
        int i = atomicAdd(next, 1);
        if (i >= 1000) return;
        if (i == 300) *found = 1;
        atomicAdd(steps, 1);
    }
}
"""


@pytest.mark.parametrize("name", ["in_turn", "looks_once", "search"])
@pytest.mark.parametrize("seed", SCHEDULES)
def test_volatile_flags_that_are_polled_or_follow_a_fence_may_be_read_beside_other_atomics(name, seed):
    assert not found(FLAGS, name, (4, 32), integers(1), integers(1), integers(1), seed=seed)


# ------------------------------------------------------------------------------------------------ loops of atomicCAS

CAS_LOOPS = """
__device__ double add(double* address, double value) {  // the programming guide's
    unsigned long long* p = (unsigned long long*)address;
    unsigned long long old = *p, assumed;
    do {
        assumed = old;
        old = atomicCAS(p, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
__global__ void sum(double* x) {
    if (threadIdx.x % 2) add(x, 1);
    else add(x, 2);
}
__global__ void largest(int* x) {
    int value = (threadIdx.x * 37 + blockIdx.x * 11) % 64, old = *x;
    while (value > old) {
        int assumed = old;
        old = atomicCAS(x, assumed, value);
    }
}
__global__ void looks(int* x, int* out) {
    int old = *x;
    atomicCAS(out, 0, old);
    atomicCAS(x, 0, 1);
}
__global__ void locked(int* lock, int* n) {
    if (threadIdx.x) return;
    do {
        while (*lock) {}
    } while (atomicCAS(lock, 0, 1));
    __threadfence();
    ++*n;
    __threadfence();
    atomicExch(lock, 0);
}
"""


@pytest.mark.parametrize("seed", SCHEDULES)
def test_the_first_read_of_a_loop_of_compare_and_swap_is_no_race(seed):
    x, largest = torch.zeros(1, dtype=torch.float64), integers(1)
    assert not found(CAS_LOOPS, "sum", (3, 64), x, seed=seed)
    assert x.item() == 3 * (32 + 2 * 32)
    assert not found(CAS_LOOPS, "largest", (3, 64), largest, seed=seed)
    assert largest.item() == 63


@pytest.mark.parametrize(("name", "tensor"), [("looks", "x"), ("locked", "lock")])
@pytest.mark.parametrize("seed", SCHEDULES)
def test_any_other_plain_read_of_what_is_compared_and_swapped_is_a_race(name, tensor, seed):
    assert ("race", tensor) in found(CAS_LOOPS, name, (3, 64), integers(1), integers(1), seed=seed)


# ------------------------------------------------------------------------------------------------ local memory, heap

LOCAL = """
struct Two { int first[4], second[4]; };
__global__ void reads(int* out, int n) {
    int a[8];
    for (int i = 0; i < 8; ++i) a[i] = i;
    out[0] = a[n];
}
__global__ void writes(int* out, int n) {
    int a[2][4];
    for (int i = 0; i <= n; ++i) a[0][i] = i;
    out[0] = a[out[0] % 2][3];
}
__global__ void member(int* out, int n) {
    Two two;
    for (int i = 0; i < 4; ++i) two.first[i] = two.second[i] = i;
    out[0] = two.second[n - 4];
}
"""


@pytest.mark.parametrize("name", ["reads", "writes", "member"])
def test_an_index_past_the_end_of_a_local_array_ends_the_launch(name):
    assert found(LOCAL, name, (1, 1), integers(1), 7) == []
    assert found(LOCAL, name, (1, 1), integers(1), 8) == [("out of local bounds", None)]


@pytest.mark.parametrize("free", ["free(p)", "delete[] p"])
def test_memory_that_is_freed_twice_ends_the_launch(free):
    make = "(int*)malloc(4)" if free == "free(p)" else "new int[1]"
    source = f"""__global__ void twice(int* out, int n) {{
        int *p = {make}, *other = {make};
        *(volatile int*)p = *(volatile int*)other = n;
        for (int i = 0; i < n; ++i) {free};
        out[0] = *(volatile int*)other;
        {free.replace("p", "other")};
    }}"""
    kernel, out = CudaKernel(file_of(source), "twice"), integers(1)
    kernel[1, 1](out, 1)
    assert out.item() == 1
    with pytest.raises(RuntimeError, match="that was freed before"):
        kernel[1, 1](out, 2)
    assert found(source, "twice", (1, 1), out, 1) == []
    assert found(source, "twice", (1, 1), out, 2) == [("assertion", None)]


# ------------------------------------------------------------------------------------------------ scopes and acquire

HAND_OVER = r"""
#include <cuda/atomic>
__device__ void release(int* flag, int way) {
    using cuda::memory_order_release;
    if (way == 0) cuda::atomic_ref<int, cuda::thread_scope_device>(*flag).store(1, memory_order_release);
    if (way == 1) cuda::atomic_ref<int, cuda::thread_scope_block>(*flag).store(1, memory_order_release);  // atomic_ref
    if (way == 2) { __threadfence(); atomicExch(flag, 1); }
    if (way == 3) { __threadfence(); atomicExch_block(flag, 1); }  // _block
    if (way == 4) { __threadfence_block(); atomicExch(flag, 1); }
    if (way == 5) asm volatile("st.release.gpu.global.s32 [%0], 1;" :: "l"(flag) : "memory");
    if (way == 6) asm volatile("st.release.cta.global.s32 [%0], 1;" :: "l"(flag) : "memory");  // ptx
}
__device__ int seen(int* flag, int way) {
    int value;
    if (way == 0) return cuda::atomic_ref<int, cuda::thread_scope_device>(*flag).load(cuda::memory_order_acquire);
    if (way == 1) return cuda::atomic_ref<int, cuda::thread_scope_device>(*flag).load(cuda::memory_order_relaxed);
    if (way == 2) return atomicAdd(flag, 0);
    if (way == 3) return *(volatile int*)flag;
    if (way == 4) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    if (way == 5) asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    if (way == 6) asm volatile("ld.acquire.cta.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");  // read
    return value;
}
__global__ void hand_over(int* flag, int* data, int* out, int writes, int reads, bool fence, bool far) {
    if (threadIdx.x % 32) return;
    bool is_first = blockIdx.x * blockDim.x + threadIdx.x == 0;
    bool is_second = far ? blockIdx.x == 1 && threadIdx.x == 0 : blockIdx.x == 0 && threadIdx.x == 32;
    if (is_first) {
        *data = 7;
        release(flag, writes);
    }
    if (!is_second) return;
    while (!seen(flag, reads)) {}
    if (fence) __threadfence();
    *out = *data;  // data
}
"""
ORDERED_WRITES, WRITES_IN_BLOCK = (0, 2, 5), {1: "atomic_ref", 3: "_block", 4: None, 6: "ptx"}
ORDERED_READS, RELAXED_READS = (0, 4), (1, 2, 3, 5)


def handed_over(writes, reads, *, fence=False, far=True, seed=None, also=("no acquire",)) -> dict[str, str]:
    """The findings: what the comment of the line says, by the rule."""
    out, lines = integers(1), HAND_OVER.split("\n")
    with cudascope.check(schedule=seed, stop=False, also=also) as report:
        CudaKernel(file_of(HAND_OVER), "hand_over")[2, 64](integers(1), integers(1), out, writes, reads, fence, far)
    assert out.item() == 7
    return {each.rule: lines[each.line - 1].partition("// ")[2] for each in report.findings}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_hand_over_with_acquire_and_release_between_thread_blocks_is_no_finding(seed):
    for writes in ORDERED_WRITES:
        for reads in ORDERED_READS:
            assert not handed_over(writes, reads, seed=seed)
        for reads in RELAXED_READS:
            assert not handed_over(writes, reads, fence=True, seed=seed)
            assert not handed_over(writes, reads, also=(), seed=seed)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_hand_over_of_block_scope_holds_in_a_thread_block_only(seed):
    for writes, line in WRITES_IN_BLOCK.items():
        assert not handed_over(writes, 0, far=False, seed=seed)
        assert not handed_over(writes, 6, far=False, seed=seed)
        found = handed_over(writes, 0, seed=seed)
        assert found["race"] == "data"
        assert ("small scope" in found) == (line is not None), "a fence alone shows at the data"
    assert not handed_over(0, 6, far=False, seed=seed)
    assert {"race": "data", "small scope": "read"}.items() <= handed_over(0, 6, seed=seed).items()


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_flag_that_is_read_without_acquire_is_found_if_asked_for(seed):
    for writes in ORDERED_WRITES:
        for reads in RELAXED_READS:
            assert handed_over(writes, reads, seed=seed) == {"no acquire": "data"}
