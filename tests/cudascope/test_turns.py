"""Thread blocks that wait for each other take turns, also where a loop polls through a barrier (bar.sync)."""

import contextlib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from covering import is_full, one_in_three
from source_files import file_of
from torch import Tensor

import cudascope
from cudascope import CudaKernel, check, schedule, time_limit, triton_compiled

SOURCE = Path(__file__).parent / "turns.cu"
SCHEDULES = (None, 0, 1, 2, 3) if is_full() else (None, 0, 1)
BLOCKS = 4
MODES = {"plain": contextlib.nullcontext, "check": check}
WAYS = {"atomic": 0, "volatile": 1, "acquire": 2}


def integers(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32)


def kernel(name: str, path: str) -> CudaKernel:
    return CudaKernel(SOURCE, name, through="ptx", arch="sm_80") if path == "ptx" else CudaKernel(SOURCE, name)


@pytest.fixture(autouse=True)
def patience():
    with time_limit(60):
        yield


def numbers(threads: int) -> Tensor:
    return torch.arange(BLOCKS * threads, dtype=torch.int32)


EXPECTED: dict[str, Callable[[int], Tensor]] = {
    "grid_barrier": lambda threads: torch.cat([numbers(threads).roll(-threads) + step for step in range(2)]),
    "chained_scan": lambda threads: numbers(threads).view(BLOCKS, -1).flip(0).cumsum(0).int().flip(0).flatten(),
    "fix_up": lambda threads: numbers(threads).view(BLOCKS, -1).sum(0).int(),
    "to_the_last": lambda threads: torch.cat([torch.arange(threads).int() + 10 * step for step in range(3)]),
    "to_the_first": lambda threads: torch.cat([torch.arange(threads).int() + 10 * step for step in range(3)]),
    "lock": lambda threads: torch.tensor([BLOCKS]).int(),
    "with_a_deadline": lambda threads: torch.ones(BLOCKS * threads).int(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path", "mode"), one_in_three(list(product(EXPECTED, ["g++", "ptx"], MODES))))
def test_a_thread_block_waits_through_a_barrier_for_a_later_one(name, path, mode):
    waits = kernel(name, path)
    for threads in (32, 128):
        expected = EXPECTED[name](threads)
        for seed in SCHEDULES:
            for way, number in WAYS.items():
                out = integers(2 * BLOCKS * threads)
                with schedule(seed), MODES[mode]():
                    waits[BLOCKS, threads](integers(BLOCKS + 1), integers(2 * BLOCKS * threads), out, number)
                assert torch.equal(out[: expected.numel()], expected), (threads, seed, way)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["g++", "ptx"])
@pytest.mark.parametrize("threads", [32, 128])
def test_a_wait_without_end_through_a_barrier_is_found_at_once_and_names_the_line(threads, path, mode):
    lines = SOURCE.read_text().split("\n")
    waits = kernel("for_ever", path)
    for seed in SCHEDULES:
        for way, number in WAYS.items():
            with schedule(seed), MODES[mode](), pytest.raises(cudascope.Finding) as found:
                waits[BLOCKS, threads](integers(1), integers(1), integers(1), number)
            assert found.value.rule == "spin", (seed, way)
            unseen = (path, mode, way) == ("g++", "plain", "volatile")  # no hook sees the read: a barrier is named
            assert lines[found.value.line - 1].endswith("// LOOP" if unseen else f"// {way}"), str(found.value)


@pytest.mark.parametrize("mode", MODES)
def test_a_barrier_of_more_thread_blocks_than_a_gpu_holds_tells_how_many_have_not_started(mode):
    on_each_sm, threads = 120_000, 32  # bytes of shared memory: an SM has room for one such thread block
    data, out = integers(2 * 140 * threads), integers(2 * 140 * threads)
    with (
        MODES[mode](),
        pytest.raises(cudascope.Finding, match="8 thread blocks have not started: an H100 holds 132") as found,
    ):
        kernel("grid_barrier", "g++")[140, threads, on_each_sm](integers(1), data, out, 0)
    assert found.value.rule == "spin"
    with MODES[mode]():
        kernel("grid_barrier", "g++")[132, threads, on_each_sm](integers(1), data, out, 0)


WITHOUT_ATOMICS = """
__global__ void in_turn(volatile int* flags, int* out, int first) {
    __shared__ int seen;
    do {
        __syncthreads();
        if (threadIdx.x == 0) seen = flags[blockIdx.x + 1];
        __syncthreads();
    } while (!seen && blockIdx.x != first);
    __threadfence();
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) flags[blockIdx.x] = 1;
}
"""


def test_thread_blocks_on_several_cores_wait_for_each_other():
    """A plain launch without atomics runs on all cores. No core by itself knows that a wait is in vain."""
    in_turn = CudaKernel(file_of(WITHOUT_ATOMICS), "in_turn")
    for seed in SCHEDULES:
        out = integers(8 * 32)
        with schedule(seed):
            in_turn[8, 32](integers(9), out, 7)
        assert out.all()
    for blocks in (2, 3, 8):
        with pytest.raises(cudascope.Finding) as found:
            in_turn[blocks, 32](integers(9), out, -1)
        assert found.value.rule == "spin"


ROUNDS = """
__global__ void rounds(int* out, int n) {
    for (int i = 0; i < n; ++i) __syncthreads();
    out[threadIdx.x] = n;
}
"""


def test_a_thread_block_may_end_with_the_last_round_of_its_turn():
    """A turn has 65536 rounds, and a round in which no thread waits counts as 256."""
    rounds = CudaKernel(file_of(ROUNDS), "rounds")
    for n in (65536 - 257, 65536 - 256, 65536 - 1, 65536):
        rounds[1, 2](out := integers(2), n)
        assert out.tolist() == [n, n]


# ------------------------------------------------------------------------------------------------ from Triton


@triton.jit
def meet(count, n):
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release")
    while tl.atomic_add(count, 0, sem="acquire") < n:  # POLL
        pass
    tl.debug_barrier()


@triton.jit
def grid_barrier_kernel(count, data, out, SIZE: tl.constexpr):
    block, n = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, SIZE)
    tl.store(data + block * SIZE + cols, block * SIZE + cols)
    meet(count, n)
    tl.store(out + block * SIZE + cols, tl.load(data + (block + 1) % n * SIZE + cols))


@triton.jit
def chained_scan_kernel(flags, data, out, SIZE: tl.constexpr):
    block, n = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, SIZE)
    total = block * SIZE + cols
    if block < n - 1:
        while tl.load(flags + block + 1, volatile=True) == 0:
            pass
        tl.atomic_add(flags + block + 1, 0, sem="acquire")
        tl.debug_barrier()
        total += tl.load(data + (block + 1) * SIZE + cols)
    tl.store(data + block * SIZE + cols, total)
    tl.debug_barrier()
    tl.atomic_xchg(flags + block, 1, sem="release")
    tl.store(out + block * SIZE + cols, total)


@triton.jit
def lock_kernel(flags, data, out, SIZE: tl.constexpr):
    block, n = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, SIZE)
    if block < n - 1:
        while tl.atomic_cas(flags + 1, 1, 1, sem="acquire") == 0:  # the last program has the lock first
            pass
    while tl.atomic_cas(flags, 0, 1, sem="acquire") == 1:
        pass
    tl.debug_barrier()
    total = tl.load(data + cols) + 1
    tl.store(data + cols, total)
    tl.store(out + cols, total)
    tl.debug_barrier()
    if block == n - 1:
        tl.atomic_xchg(flags + 1, 1, sem="release")
    tl.atomic_xchg(flags, 0, sem="release")


@triton.jit
def for_ever_kernel(count, data, out, SIZE: tl.constexpr):
    meet(count, tl.num_programs(0) + 1)


SIZE = 128
IN_TRITON = {
    "grid_barrier": (grid_barrier_kernel, EXPECTED["grid_barrier"](SIZE)[: BLOCKS * SIZE]),
    "chained_scan": (chained_scan_kernel, EXPECTED["chained_scan"](SIZE)),
    "lock": (lock_kernel, torch.full((SIZE,), BLOCKS).int()),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_warps", "mode"), one_in_three(list(product(IN_TRITON, [1, 4], MODES))))
def test_a_program_of_triton_waits_for_a_later_one(name, num_warps, mode):
    waits, expected = IN_TRITON[name]
    for seed in SCHEDULES:
        out = integers(BLOCKS * SIZE)
        with triton_compiled("sm_80"), schedule(seed), MODES[mode]():
            waits[BLOCKS,](integers(BLOCKS), integers(BLOCKS * SIZE), out, SIZE=SIZE, num_warps=num_warps)
        assert torch.equal(out[: expected.numel()], expected), seed


@pytest.mark.slow
@pytest.mark.parametrize(("num_warps", "mode"), one_in_three(list(product([1, 4], MODES))))
def test_a_wait_without_end_in_triton_names_the_line_of_the_loop(num_warps, mode):
    lines = Path(__file__).read_text().split("\n")
    for seed in SCHEDULES:
        with triton_compiled("sm_80"), schedule(seed), MODES[mode](), pytest.raises(cudascope.Finding) as found:
            for_ever_kernel[BLOCKS,](integers(1), integers(1), integers(1), SIZE=SIZE, num_warps=num_warps)
        assert found.value.rule == "spin"
        assert lines[found.value.line - 1].endswith("# POLL"), (seed, str(found.value))


@triton.jit
def handed_over_kernel(flag, data, out, SCOPE: tl.constexpr, READS: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(data, 7)
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope=SCOPE)  # WRITES
    else:
        while tl.atomic_add(flag, 0, sem=READS) == 0:  # READS
            pass
        tl.debug_barrier()
        tl.store(out, tl.load(data))  # DATA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "reads", "found"),
    [
        ("gpu", "acquire", {}),
        ("cta", "acquire", {"small scope": ("READS", "WRITES"), "race": ("DATA",)}),
        ("gpu", "relaxed", {"no acquire": ("DATA",)}),
    ],
)
def test_a_hand_over_between_programs_needs_the_scope_of_the_gpu_and_an_acquire(scope, reads, found):
    lines = Path(__file__).read_text().split("\n")
    for seed in SCHEDULES:
        out = integers(1)
        with triton_compiled("sm_80"), check(schedule=seed, stop=False, also=("no acquire",)) as report:
            handed_over_kernel[2,](integers(1), integers(1), out, SCOPE=scope, READS=reads, num_warps=1)
        assert out.item() == 7
        assert {each.rule for each in report.findings} == set(found), (seed, str(report))
        for each in report.findings:
            assert lines[each.line - 1].endswith(tuple(f"# {mark}" for mark in found[each.rule])), str(each)
