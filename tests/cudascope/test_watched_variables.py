"""cudascope.check() watches the variables of a file as it watches tensors, where they lie."""

import pytest
import torch

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
    kernel, out = CudaKernel(SOURCE, "correct"), torch.zeros(32)
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
        CudaKernel(SOURCE, name)[1, 32](torch.zeros(32), 3)
    error = caught.value
    assert (error.what, error.tensor) == (what, variable)
    assert line_of(name) in (error.line, error.other_line), error
