"""cuda::pipeline and cuda::barrier on the CPU: each kernel right under every schedule, and with its mistake found."""

from pathlib import Path

import pytest
import torch
from planted import Planted, assert_found, assert_twin_is_clean

import cudascope
from cudascope import CudaKernel

FILE = Path(__file__).parent / "pipelines.cu"
THREADS, WARP = 64, 32


def rows_of(columns: int, *, reverse: bool):
    x = torch.randint(-99, 99, (5, columns), generator=torch.Generator().manual_seed(0)).float()
    out, total = torch.full((columns,), -1.0), x.sum(0)
    return (x, out, len(x)), out, total.flip(0) if reverse else total


def row(factor: int):
    x = torch.randint(-99, 99, (THREADS,), generator=torch.Generator().manual_seed(0)).float()
    out = torch.full((THREADS,), -1.0)
    return (x, out), out, factor * x.flip(0)


BUGS = {
    "thread_pipeline": Planted("race", (1, THREADS), lambda: rows_of(THREADS, reverse=False), "stages"),
    "block_pipeline": Planted("deadlock", (1, THREADS), lambda: rows_of(THREADS, reverse=True)),
    "producer_and_consumer": Planted("race", (1, THREADS), lambda: rows_of(WARP, reverse=True), "stages"),
    "arrive_then_wait": Planted("race", (1, THREADS), lambda: row(2), "row"),
    "barrier_awaits_copies": Planted("race", (1, THREADS), lambda: row(1), "row"),
    "one_too_few": Planted("deadlock", (1, THREADS), lambda: row(1)),
    "not_initialised": Planted("uninitialised", (1, THREADS), lambda: row(1), "barrier"),
}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_planted_bug_is_found_in_its_line(name, seed):
    assert_found(FILE, name, BUGS[name], seed)


@pytest.mark.parametrize("name", BUGS)
def test_the_correct_twin_is_clean_under_any_schedule(name):
    assert_twin_is_clean(FILE, name, BUGS[name])


def test_who_waits_at_a_barrier_for_ever_is_told():
    args, _, _ = row(1)
    with pytest.raises(cudascope.Finding, match=r"63 more in line [0-9]+ in a cuda::barrier"):
        CudaKernel(FILE, "one_too_few")[1, THREADS](*args, True)


@pytest.mark.slow
def test_the_kernels_are_cuda_too():
    # two stages of floats, and two barriers of 8 bytes for each
    assert CudaKernel(FILE, "block_pipeline").resources("sm_90").shared_bytes >= 4 * 2 * THREADS + 8 * 4
