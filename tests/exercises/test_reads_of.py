"""`reads_of` counts what the launch counts, and tells two loads in one line apart."""

import torch

import cudascope
from cudascope import CudaKernel
from pagewise.exercises import solutions
from pagewise.exercises.cuda import reads_of

SOURCE = """
__global__ void sums(const float4* x, float* y) {
    const float4 a = x[threadIdx.x], b = x[2 * threadIdx.x];
    y[threadIdx.x] = a.x + b.x;
}
"""


def test_reads_are_those_of_the_launch():
    with cudascope.observe() as report:
        CudaKernel(SOURCE, "sums")[1, 64](torch.ones(128, 4), torch.zeros(64))
    (launch,) = report.launches
    reads, seen = reads_of(launch, "x", itemsize=4), launch.count("read", "global")
    assert (reads.requests, reads.pieces, reads.bytes) == (seen.requests, seen.sectors, seen.bytes) == (4, 96, 2048)
    assert reads_of(launch, "x", itemsize=4, piece=128).pieces == 24


def test_the_whole_kernel_of_lesson_5_reads_only_whole_sectors():
    q, k, v = torch.randn(2, 32), *torch.randn(2, 9, 16, 32)
    tables, lens = torch.tensor([[7, 1, 4], [0, 8, 3]]).int(), torch.tensor([40, 23]).int()
    results = torch.zeros(2), torch.zeros(2), torch.zeros(2, 32)
    with cudascope.observe() as report:
        kernel = CudaKernel(solutions["paged_decode"], "paged_decode")
        kernel[2, 32](q, k, v, tables, lens, *results, 3, 0.25)
    for tensor, slots in {"k": 80, "v": 63}.items():  # K of whole blocks, V of the tokens
        reads = reads_of(report.launches[0], tensor, itemsize=4)
        assert reads.bytes == 32 * reads.pieces == slots * 128
