"""`reads_of` counts what the launch counts, and tells two loads in one line apart."""

import torch

import cudascope
from cudascope import CudaKernel
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
