"""`cudascope.reachable`: memory that a pointer in a struct or in a table of pointers leads to."""

import contextlib
import ctypes

import numpy as np
import pytest
import torch

from cudascope import CudaKernel, Finding, check, observe, reachable
from cudascope.arguments.arrays import Array

IN_A_STRUCT = CudaKernel(
    """
struct Params { const float* x; float* out; int n; };
__global__ void scale(Params p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.out[i] = 2 * p.x[i];
}
""",
    "scale",
)
IN_A_TABLE = CudaKernel(
    """
__global__ void add(float** rows, float* sum) {
    for (int row = 0; row < 3; ++row)
        sum[threadIdx.x] += rows[row][threadIdx.x];
}
""",
    "add",
)


class Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_int))


def made(n: int = 100):
    x, out = torch.arange(float(n)), torch.zeros(n)
    return x, out, Params(x.data_ptr(), out.data_ptr(), n)


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_memory_behind_a_struct_is_no_false_finding(make):
    x, out = make(100.0), make(100.0)
    x, out = (x, out) if make is torch.arange else (x.astype(np.float32), out.astype(np.float32))
    address = [a.data_ptr() if make is torch.arange else a.ctypes.data for a in (x, out)]
    with reachable(x=x, out=out), check(outputs=[out]) as report:
        IN_A_STRUCT[4, 32](Params(*address, 100))
    assert out.tolist() == [2.0 * i for i in range(100)]
    assert report.findings == []
    assert len(report.unwritten(out)) == 0


def test_memory_that_is_not_named_is_a_finding_that_says_how_to_name_it():
    x, out, params = made()
    sentence = r"reads address 0x\w+, which belongs to no tensor of this launch \(if .* with cudascope.reachable\(\)\)"
    with pytest.raises(Finding, match=sentence), check(), reachable(out=out):
        IN_A_STRUCT[4, 32](params)
    del x


@pytest.mark.parametrize("mode", [contextlib.nullcontext, observe, check])
def test_an_argument_that_a_table_leads_to_is_seen_by_both_ways(mode):
    rows, total = [torch.ones(32) for _ in range(2)], torch.zeros(32)
    table = torch.tensor([row.data_ptr() for row in (*rows, total)])
    with reachable(a=rows[0], b=rows[1]), mode():
        IN_A_TABLE[1, 32](table, total)
    assert total.tolist() == [4.0] * 32


def test_one_element_past_the_end_is_named_as_that_of_an_argument():
    x, out, params = made()
    params.n = 101
    past = r"reads x\[100\], past its end \(100 elements\)"
    with pytest.raises(Finding, match=past) as error, reachable(x=x, out=out), check():
        IN_A_STRUCT[4, 32](params)
    assert (error.value.what, error.value.tensor, error.value.element) == ("out of bounds", "x", 100)


def test_an_access_past_the_end_is_not_carried_out_when_the_launch_goes_on():
    memory, x = torch.zeros(128), torch.ones(128)
    out = torch.from_dlpack(memory[:100])  # with ends of its own
    with reachable(x=x, out=out), check(stop=False) as report:
        IN_A_STRUCT[4, 32](Params(x.data_ptr(), out.data_ptr(), 128))
    assert [(found.rule, found.tensor, found.count) for found in report.findings] == [("out of bounds", "out", 28)]
    assert memory.tolist() == [2.0] * 100 + [0.0] * 28


def test_a_race_is_found_and_names_the_element():
    kernel = CudaKernel("struct P { int* a; }; __global__ void k(P p) { p.a[3] = threadIdx.x; }", "k")
    a = np.zeros(8, np.int32)
    written = r"writes cells\[3\], which thread .* has written in line 1"
    with pytest.raises(Finding, match=written) as error, reachable(cells=a), check():
        kernel[1, 8](a.ctypes.data.to_bytes(8, "little"))
    assert error.value.rule == "race"


def test_observed_accesses_carry_the_name():
    x, out, params = made()
    with reachable(x=x, out=out), observe() as report:
        IN_A_STRUCT[4, 32](params)
    launch = report.launches[0]
    assert launch.tensors == ("x", "out")
    assert sorted(launch.accesses("x")["element"]) == list(range(100))
    assert set(launch.accesses("out")["access"]) == {"write"}


@pytest.mark.parametrize("n", [64, 1 << 18])  # a small argument is copied for a launch, the pages of a large one move
@pytest.mark.parametrize("mode", [contextlib.nullcontext, check, observe])
def test_an_argument_that_is_also_in_a_struct_keeps_its_address(n, mode):
    kernel = CudaKernel(
        "struct P { float* a; }; __global__ void k(float* a, P p) "
        "{ int i = blockIdx.x * blockDim.x + threadIdx.x; a[i] += 1; p.a[i] *= 2; }",
        "k",
    )
    a = torch.zeros(n)
    with reachable(a=a), mode():
        kernel[n // 64, 64](a, a.data_ptr().to_bytes(8, "little"))
    assert a.unique().tolist() == [2.0]


def test_contexts_add_up_and_end():
    x, out, params = made()
    with check():
        with reachable(x=x):
            with reachable(out=out):
                IN_A_STRUCT[4, 32](params)
            with pytest.raises(Finding, match="writes address"):
                IN_A_STRUCT[4, 32](params)
        with pytest.raises(Finding, match="reads address"):
            IN_A_STRUCT[4, 32](params)


@pytest.mark.slow
def test_a_variable_of_the_same_name_as_an_argument_is_other_memory():
    source = "__device__ int w[4]; __device__ void note(int i) { w[i] = i; } __global__ void k(int* w) "
    kernel = CudaKernel(source + "{ w[threadIdx.x] = 7; note(threadIdx.x); }", "k")
    memory = torch.zeros(4, dtype=torch.int32)
    with observe(), reachable(w=memory):
        kernel[1, 4](memory)
    with check(), reachable(w=memory):
        kernel[1, 4](memory)
    with check():
        kernel[1, 4](memory)
    assert memory.tolist() == [7] * 4
    assert kernel.variable("w").tolist() == [0, 1, 2, 3]
    with pytest.raises(Finding, match=r"writes ::w\[4\], past its end") as error, check():
        kernel[1, 5](torch.zeros(5, dtype=torch.int32))
    assert error.value.tensor == "::w"


FIXED = np.zeros(3)
FIXED.flags.writeable = False
ON_GPU = Array(4096, (3,), (1,), "float32", 4, "cuda:0")


@pytest.mark.parametrize(
    ("arrays", "error", "sentence"),
    [
        ({"x": [1.0]}, TypeError, "reachable: x must be a tensor or an array, got list"),
        ({"x": FIXED}, ValueError, "reachable: x is read-only memory"),
        ({"x": np.zeros(3)[::-1]}, ValueError, "reachable: x must have no negative strides"),
        ({"x": np.zeros(3), "y": ON_GPU}, ValueError, "reachable: y must be on cpu, got cuda:0"),
        ({"taken": np.zeros(3)}, ValueError, "reachable: taken already names other memory: choose another name"),
    ],
)
def test_bad_memory_is_refused(arrays, error, sentence):
    with reachable(taken=np.zeros(3)), pytest.raises(error, match=sentence), reachable(**arrays):
        pass


def test_a_name_that_an_argument_has_must_be_the_same_memory():
    rows, total = torch.zeros(32), torch.zeros(32)
    table = torch.tensor([rows.data_ptr()] * 3)
    with reachable(sum=rows), pytest.raises(ValueError, match=r"kernel add: its argument sum and sum in .* different"):
        IN_A_TABLE[1, 32](table, total)
    with reachable(sum=total), reachable(row=rows), check():
        IN_A_TABLE[1, 32](table, total)


def test_a_kernel_without_arrays_runs_where_the_named_memory_is(monkeypatch):
    x, out, params = made()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with reachable(x=x, out=out):
        IN_A_STRUCT[4, 32](params)
    assert out[99] == 198
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with reachable(x=ON_GPU), pytest.raises(RuntimeError, match="kernel scale: asked to run on cuda:0"):
        IN_A_STRUCT[4, 32](params)


def test_a_write_before_the_first_variable_is_not_blamed_on_named_memory():
    kernel = CudaKernel("__device__ int w[4]; __global__ void k(int i) { w[i] = 1; }", "k")
    with pytest.raises(Finding, match="writes address"), reachable(x=np.zeros(3)), check():
        kernel[1, 1](-64)
