"""Variables of a file that point at the arguments of a launch."""

import contextlib

import pytest
import torch
from source_files import file_of

import cudascope
from cudascope import CudaKernel

POINTERS = """
struct Range { int *first, *last; };
__device__ int* kept;
__device__ Range range;
__device__ float unrelated[1024];
__global__ void keep(int* x, long long* table) {
    kept = x;
    range = {x, x + 4};
    table[1] = (long long)(x + 1);
}
__global__ void use(int* x, int* out) {
    out[0] = kept[0];
    kept[1] = 9;
    out[1] = x[1];
    x[2] = 3;
    out[2] = kept[2];
    out[3] = range.last - range.first;
}
"""
MODES = {"plain": contextlib.nullcontext, "observe": cudascope.observe, "check": cudascope.check}


@pytest.mark.parametrize("mode", MODES)
def test_a_variable_or_a_table_that_a_kernel_points_at_an_argument_holds_its_address_after_the_launch(mode):
    x, table = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    keep = CudaKernel(file_of(POINTERS), "keep")
    with MODES[mode]():
        keep[1, 1](x, table)
    assert keep.variable("kept").item() == x.data_ptr()
    assert keep.variable("range").view(torch.int64).tolist() == [x.data_ptr(), x.data_ptr() + 16]
    assert table.tolist() == [0, x.data_ptr() + 4]


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_reaches_an_argument_by_a_variable_as_well(mode):
    """The launch must not copy the argument: the kernel would see the copy by one of the two ways alone."""
    x, out = torch.tensor([5, 0, 0, 0], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    use = CudaKernel(file_of(POINTERS), "use")
    use.variable("kept").fill_(x.data_ptr())
    use.variable("range").view(torch.int64)[:] = torch.tensor([x.data_ptr(), x.data_ptr() + 16])
    with MODES[mode]():
        use[1, 1](x, out)
    assert (x.tolist(), out.tolist()) == ([5, 9, 3, 0], [5, 9, 3, 4])
