"""Asynchronous copies, cuda::pipeline and cuda::barrier on the CPU: when copies land, what they cost, and mistakes."""

from pathlib import Path

import pytest
import torch
from planted import SCHEDULES, Planted, assert_found, assert_twin_is_clean

import cudascope
from cudascope import CudaKernel

FOLDER = Path(__file__).parent
FILE = FOLDER / "async_copies.cu"
THREADS = 64


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(0)).float()


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1.0)


# ------------------------------------------------------------------------------------------------ what they do


@pytest.mark.slow
@pytest.mark.parametrize("columns", [4, 100, 128, 1000])
def test_rows_that_come_in_stages_are_summed_right(columns):
    x, sums = whole(3, columns), empty(3)
    for seed in SCHEDULES[:5]:
        with cudascope.check(schedule=seed, outputs=[sums]):
            CudaKernel(FILE, "row_sums")[3, 32](x, sums, columns)
        assert torch.equal(sums, x.sum(1))


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [0, 1, 4, 6, 16])
def test_what_is_filled_with_zeros_is_not_read(zeros):
    x, out = whole(4 * THREADS), empty(4 * THREADS)
    expected = x.view(torch.uint8).clone().view(THREADS, 16)
    expected[:, 16 - zeros :] = 0
    CudaKernel(FILE, "filled")[1, THREADS](x, out, zeros)
    assert torch.equal(out.view(torch.uint8).view(THREADS, 16), expected)


def test_before_the_wait_the_target_holds_nans_even_in_a_plain_launch():
    x, out = whole(THREADS), empty(THREADS)
    CudaKernel(FILE, "too_early")[1, THREADS](x, out)
    assert out.isnan().all()


@pytest.mark.slow
def test_a_copy_is_counted_once_as_a_read_and_once_as_a_write():
    memory, out = whole(4 * THREADS + 8), empty(4 * THREADS)
    start = -memory.data_ptr() % 32 // 4
    x = memory[start : start + 4 * THREADS]
    with cudascope.observe() as report:
        CudaKernel(FILE, "filled")[1, THREADS](x, out, 0)
    line = next(c.line for c in report.launches[0].lines if c.access == "write" and c.space == "shared")
    read, write = report.count("read", "global", line), report.count("write", "shared", line)
    # 2 warps, each 32 lanes × 16 bytes = 512 bytes = 16 sectors; a quarter of a warp writes 32 words to 32 banks
    assert (read.requests, read.bytes, read.sectors) == (2, 1024, 32)
    assert (write.requests, write.bytes, write.bank_conflicts) == (2, 1024, 0)


FILLS = """
#include <cuda_pipeline.h>
__global__ void fill_the_rest(const float* x, float* out, int n) {
    __shared__ float row[3 * 32];
    for (int tile = 0; tile < 3; ++tile) {
        const int i = 32 * tile + threadIdx.x;
        __pipeline_memcpy_async(row + i, x + i, 4, i < n ? 0 : 4);  // the copy
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    for (int tile = 0; tile < 3; ++tile) out[32 * tile + threadIdx.x] = row[32 * tile + threadIdx.x];
}"""


@pytest.mark.slow
def test_lanes_that_fill_with_zeros_are_in_the_request_of_those_that_copy():
    x, out, n = whole(96), empty(96), 40
    with cudascope.observe() as report:
        CudaKernel(FILLS, "fill_the_rest")[1, 32](x, out, n)
    assert torch.equal(out, torch.where(torch.arange(96) < n, x, 0))
    read, write = report.count("read", "global"), report.count("write", "shared")
    assert (read.requests, read.lanes) == (2, n)  # the last tile reads nothing
    assert (write.requests, write.lanes) == (3, 96)


# ------------------------------------------------------------------------------------------------ planted bugs


def reversed_row():
    x, out = whole(THREADS), empty(THREADS)
    return (x, out), out, x.flip(0)


def reversed_sum(rows: int):
    x, out = whole(rows, THREADS), empty(THREADS)
    return (x, out), out, x.sum(0).flip(0)


def every_other():
    x, out = whole(THREADS), empty(THREADS)
    expected = torch.where(torch.arange(THREADS) % 2 == 0, x, 1.0)
    return (x, out), out, expected.flip(0)


def pairs():
    x, out = whole(2 * THREADS + 1), empty(THREADS)
    return (x, out), out, x[1:].view(THREADS, 2).sum(1)


def triples():
    x, out = whole(3 * THREADS), empty(THREADS)
    return (x, out), out, x.view(THREADS, 3).sum(1)


def padded():
    x, out = whole(4 * THREADS - 7), empty(4 * THREADS)
    return (x, out, len(x)), out, torch.cat([x, torch.zeros(7)])


BUGS = {
    "missing_commit": Planted("race", (1, THREADS), reversed_row, "row"),
    "wait_too_small": Planted("race", (1, THREADS), lambda: reversed_sum(2), "rows"),
    "never_waited": Planted("copy", (1, THREADS), reversed_row, "row"),
    "others_copy": Planted("race", (1, THREADS), reversed_row, "row"),
    "barrier_too_early": Planted("race", (1, THREADS), reversed_row, "row"),
    "source_overwritten": Planted("race", (1, THREADS), reversed_row, "x"),
    "target_overwritten": Planted("race", (1, THREADS), every_other, "row"),
    "reused_too_early": Planted("race", (1, THREADS), lambda: reversed_sum(4), "row"),
    "unaligned_pair": Planted("misaligned", (1, THREADS), pairs, "x"),
    "twelve_bytes": Planted("argument", (1, THREADS), triples),
    "within_shared": Planted("argument", (1, THREADS), reversed_row),
    "past_the_end": Planted("out of bounds", (1, THREADS), padded, "x"),
}


def rows_of(columns: int, *, reverse: bool):
    x, out = whole(5, columns), empty(columns)
    total = x.sum(0)
    return (x, out, len(x)), out, total.flip(0) if reverse else total


def doubled():
    args, out, expected = reversed_row()
    return args, out, 2 * expected


IN_PIPELINES = {
    "thread_pipeline": Planted("race", (1, THREADS), lambda: rows_of(THREADS, reverse=False), "stages"),
    "block_pipeline": Planted("deadlock", (1, THREADS), lambda: rows_of(THREADS, reverse=True)),
    "producer_and_consumer": Planted("race", (1, THREADS), lambda: rows_of(32, reverse=True), "stages"),
    "arrive_then_wait": Planted("race", (1, THREADS), doubled, "row"),
    "barrier_awaits_copies": Planted("race", (1, THREADS), reversed_row, "row"),
    "one_too_few": Planted("deadlock", (1, THREADS), reversed_row),
    "not_initialised": Planted("uninitialised", (1, THREADS), reversed_row, "barrier"),
}
MISTAKES = [("async_copies.cu", name) for name in BUGS] + [("pipelines.cu", name) for name in IN_PIPELINES]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), MISTAKES)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_planted_bug_is_found_in_its_line(file, name, seed):
    assert_found(FOLDER / file, name, (BUGS | IN_PIPELINES)[name], seed)


@pytest.mark.parametrize(("file", "name"), MISTAKES)
def test_the_correct_twin_is_clean_under_any_schedule(file, name):
    assert_twin_is_clean(FOLDER / file, name, (BUGS | IN_PIPELINES)[name])


@pytest.mark.slow
def test_who_waits_at_a_barrier_for_ever_is_told():
    args, _, _ = reversed_row()
    with pytest.raises(cudascope.Finding, match=r"63 more in line [0-9]+ in a cuda::barrier"):
        CudaKernel(FOLDER / "pipelines.cu", "one_too_few")[1, THREADS](*args, True)


def test_a_race_with_a_copy_names_both_lines():
    (x, out), _, _ = reversed_row()
    with (
        pytest.raises(cudascope.Finding, match=r"while the asynchronous copy .* may still write it") as caught,
        cudascope.check(),
    ):
        CudaKernel(FILE, "missing_commit")[1, THREADS](x, out, True)
    lines = FILE.read_text().splitlines()
    assert "__pipeline_memcpy_async(&row[i], x + i, 4)" in lines[caught.value.other_line - 1]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_are_cuda_too(arch):
    assert CudaKernel(FILE, "row_sums").resources(arch).shared_bytes == 4 * 32 * 16


@pytest.mark.slow
def test_pipelines_are_cuda_too():
    # two stages of floats, and two barriers of 8 bytes for each
    assert CudaKernel(FOLDER / "pipelines.cu", "block_pipeline").resources().shared_bytes >= 4 * 2 * THREADS + 8 * 4
