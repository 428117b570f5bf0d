"""A struct is read and written in pieces of its alignment, as by a GPU: g++'s build counts what NVRTC's PTX counts.

Each kernel copies 32 elements, each by a thread of one warp. A piece is a request. Its sectors are those that the lanes
touch with it: three floats in a row make three requests of the same twelve sectors.
"""

import numpy as np
import pytest
import torch

from cudascope import CudaKernel, check, observe

TYPES = {  # the requests, and the sectors of all of them
    "float": (1, 4),
    "float2": (1, 8),
    "float3": (3, 36),
    "float4": (1, 16),
    "double2": (1, 16),
    "uchar4": (1, 4),
    "Pair": (2, 16),  # two floats: aligned to 4 bytes, unlike float2
    "Aligned": (1, 8),  # two floats, aligned to 8 bytes
    "Complex": (2, 32),  # two doubles
    "Shorts": (4, 32),
    "Long": (6, 144),  # six floats in 24 bytes
    "Wide": (2, 64),  # two float4
}
SOURCE = """
struct Pair { float a, b; };
struct __align__(8) Aligned { float a, b; };
struct Complex { double re, im; };
struct Shorts { short a[4]; };
struct Long { float a[6]; };
struct Wide { float4 a, b; };
struct Point { float x, y, z; };
__global__ void through_shared(const float* x, float* out) {
    __shared__ Point tile[32];
    tile[threadIdx.x] = ((const Point*)x)[threadIdx.x];
    __syncthreads();
    const Point& point = tile[31 - threadIdx.x];
    ((Point*)out)[threadIdx.x] = point;
}
"""
SOURCE += "\n".join(
    f"__global__ void copy_{name}(const float* x, float* out) {{\n"
    f"    {name} value = ((const {name}*)x)[threadIdx.x];\n"
    f"    (({name}*)out)[threadIdx.x] = value;\n"
    f"}}"
    for name in TYPES
)


def aligned(elements: int) -> np.ndarray:
    memory = np.zeros(elements + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + elements]


def counts(kernel: str, through: str = "c++"):
    x, out = aligned(256), aligned(256)
    x[:] = np.arange(256)
    with observe() as report:
        CudaKernel(SOURCE, kernel, through=through)[1, 32](x, out)
    return report, x, out


@pytest.mark.parametrize(("name", "expected"), TYPES.items(), ids=TYPES)
def test_a_struct_is_moved_in_pieces_of_its_alignment(name, expected):
    report, x, out = counts(f"copy_{name}")
    read, written = report.count("read", "global"), report.count("write", "global")
    assert (read.requests, read.sectors) == (written.requests, written.sectors) == expected
    assert written.bytes == read.bytes == 4 * np.count_nonzero(out) + 4
    assert np.array_equal(out[: read.bytes // 4], x[: read.bytes // 4])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float3", "float4", "Pair", "Complex"])
def test_the_counts_are_those_of_the_ptx(name):
    (here, *_), (ptx, *_) = counts(f"copy_{name}"), counts(f"copy_{name}", "ptx")
    for access in ("read", "write"):
        own, other = here.count(access, "global"), ptx.count(access, "global")
        assert own[3:] == other[3:]


def test_structs_in_shared_memory_are_moved_in_pieces_too():
    report, x, out = counts("through_shared")
    assert np.array_equal(out[:96].reshape(32, 3), x[:96].reshape(32, 3)[::-1])
    for access in ("read", "write"):
        assert report.count(access, "shared").requests == report.count(access, "global").requests == 3
        assert report.count(access, "shared").bank_conflicts == 0  # a stride of three words


def test_a_check_still_sees_a_struct_as_a_whole():
    kernel = CudaKernel(SOURCE, "copy_float4")
    with check(stop=False) as report:
        kernel[1, 32](aligned(256), torch.zeros(126))  # an array with ends of its own
    (found,) = report.findings
    assert (found.rule, found.count) == ("out of bounds", 1)
    assert "writes out[124]" in str(found)  # the first of four floats, of which two are inside
