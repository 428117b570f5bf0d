"""cudascope.check() watches the variables of a file as it watches tensors, where they lie."""

import contextlib

import pytest
import torch
from source_files import file_of

import cudascope
from cudascope import CudaKernel

SOURCE = """
__device__ int counter;
__device__ float row[32];
__constant__ float weights[4];

__global__ void correct(float* out, int n) {
    atomicAdd(&counter, n);
    row[threadIdx.x] = weights[threadIdx.x % 4];
    __syncthreads();
    out[threadIdx.x] = row[31 - threadIdx.x];
}
__global__ void no_barrier(float* out, int n) {
    row[threadIdx.x] = n;  // FOUND no_barrier
    out[threadIdx.x] = row[31 - threadIdx.x];
}
__global__ void plain_count(float* out, int n) {
    counter += n;  // FOUND plain_count
    out[threadIdx.x] = n;
}
__global__ void past_the_end(float* out, int n) {
    row[threadIdx.x + n] = 1;  // FOUND past_the_end
    out[threadIdx.x] = n;
}
"""


def line_of(name: str) -> int:
    lines = SOURCE.splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"// FOUND {name}"))


def test_a_correct_kernel_is_clean_under_every_schedule():
    kernel, out = CudaKernel(file_of(SOURCE), "correct"), torch.zeros(32)
    kernel.variable("weights")[:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    kernel.variable("counter").fill_(5)
    for seed in range(20):
        with cudascope.check(outputs=[out], schedule=seed):
            kernel[1, 32](out, 2)
    assert out[:8].tolist() == [4.0, 3.0, 2.0, 1.0, 4.0, 3.0, 2.0, 1.0]
    assert kernel.variable("counter").item() == 5 + 20 * 32 * 2


@pytest.mark.parametrize(
    ("name", "what", "variable"),
    [("no_barrier", "race", "row"), ("plain_count", "race", "counter"), ("past_the_end", "out of bounds", "row")],
)
def test_a_mistake_is_found_on_its_line_with_the_variables_name(name, what, variable):
    with pytest.raises(cudascope.Finding) as caught, cudascope.check():
        CudaKernel(file_of(SOURCE), name)[1, 32](torch.zeros(32), 3)
    error = caught.value
    assert (error.what, error.tensor) == (what, variable)
    assert line_of(name) in (error.line, error.other_line), error


# ------------------------------------------------------------------------------------------------ pointers in variables

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
