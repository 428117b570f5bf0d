"""Explicit specialisations: the function that nvcc takes for the arguments is launched, with its own declaration."""

import numpy as np
import pytest

from cudascope import CudaKernel
from cudascope.cpp.file import read
from cudascope.cpp.signature import read_signature

SOURCE = """
template <class T> __device__ T two(T x) { return 1; }
template <> __device__ float two(float x) { return 2; }
template <> __device__ double two<double>(double x) { return 3; }

template <class T> __global__ void deduced(T* x) { x[0] = 4; }
template <> __global__ void deduced(float* x) { x[0] = two(x[0]) + two(1.0) + two(1); }

template <class T, int N = 4> __global__ void given(T* x) { x[0] = 7; }
template <> __global__ void given<float, 4>(float* x) { x[0] = 8; }
template <> __global__ void given<int>(int* x) { x[0] = 9; }

namespace n { template <class T> __global__ void outside(T* x) { x[0] = 10; } }
template <> __global__ void n::outside(float* x) { x[0] = 11; }

template <class T> __global__ void empty(T* x) { x[0] = 12; }
template <> __global__ void empty<>(float* x) { x[0] = 13; }

__global__ void other(float* x) { x[0] = 14; }
"""


@pytest.mark.parametrize("through", ["c++", "ptx"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deduced<float>", 6),
        ("deduced<int>", 4),
        ("given<float>", 8),
        ("given<float, 2 + 2>", 8),
        ("given<float, 5>", 7),
        ("given<int>", 9),
        ("n::outside<float>", 11),
        ("n::outside<int>", 10),
        ("empty<float>", 13),
        ("other", 14),
    ],
)
def test_the_specialisation_runs_that_nvcc_takes(name, value, through):
    x = np.zeros(1, np.int32 if "int" in name else np.float32)
    CudaKernel(SOURCE, name, through=through)[1, 1](x)
    assert x.tolist() == [value]


TEMPLATE = "template <class T, int N = 1> __global__ void __launch_bounds__(32 * N) k(T* x, T y = 5)"
BOUNDED = "template <> __global__ void __launch_bounds__(8) k"


@pytest.mark.parametrize(
    ("special", "name", "own", "threads"),
    [
        (f"{BOUNDED}(float* u, float v)", "k<float>", "uv", 8),
        (f"{BOUNDED}(float* u, float v)", "k<float, 2>", "xy", 64),
        (f"{BOUNDED}<float>(float* u, float v)", "k<float>", "uv", 8),
        (f"{BOUNDED}<float, 1 + 1>(float* u, float v)", "k<float, 2>", "uv", 8),
        (f"{BOUNDED}<float, 1 + 1>(float* u, float v)", "k<float, 3>", "xy", 96),
        ("template <> __global__ void k<float>(float* u, float v)", "k<float>", "uv", 32),
        ("template <> __global__ void k<float, 3>(float* u, float v)", "k<float, 3>", "uv", 96),
        ("template <> __global__ void k(int* u, int v)", "k<float>", "xy", 32),
        ("using F = float; template <> __global__ void k<F, N>(F* u, F v)", "k<float, 2>", "uv", 64),
        ("template <> __global__ void k<float*>(float** u, float* v)", "k<int*>", "xy", 32),
        ("template <> __global__ void k<float*>(float** u, float* v)", "k<float*>", "uv", 32),
        ("template <> __global__ void l<float>(float* u, float v)", "k<float>", "xy", 32),
        ("template __global__ void k<float>(float* u, float v)", "k<float>", "xy", 32),
        ("extern template __global__ void k(float* u, float v)", "k<float>", "xy", 32),
    ],
)
def test_names_and_bounds_are_those_of_the_specialisation(special, name, own, threads):
    """nvcc gives a specialisation without bounds those of its template."""
    signature = read_signature(read(f"constexpr int N = 2;\n{TEMPLATE};\n{special};"), name)
    assert "".join(each.name for each in signature.parameters) == own
    assert signature.max_threads == threads
    assert [each.default is not None for each in signature.parameters] == [False, True]


@pytest.mark.parametrize(
    ("name", "own"),
    [("k<float>", "uv"), ("k<float, 1, int>", "uv"), ("k<float, 2, int>", "xy"), ("k<float, 1, float>", "xy")],
)
def test_an_argument_that_the_parameters_do_not_tell_is_the_default(name, own):
    template = "template <class T, int N = 1, class U = int> __global__ void k(T* x, U y)"
    source = f"{template}; template <> __global__ void k(float* u, int v);"
    assert "".join(each.name for each in read_signature(read(source), name).parameters) == own


@pytest.mark.parametrize(("name", "own"), [("k<float, 4>", "u"), ("k<float>", "u"), ("k<float, 8>", "x")])
def test_a_default_may_depend_on_an_argument(name, own):
    source = "template <class T, int N = sizeof(T)> __global__ void k(T* x); template <> __global__ void k(float* u);"
    assert [each.name for each in read_signature(read(source), name).parameters] == [own]


@pytest.mark.parametrize(("name", "own"), [("k<float, int>", "u"), ("k<float, I>", "u"), ("k<float, long>", "x")])
def test_a_type_that_no_parameter_has_is_compared(name, own):
    template = "using I = int; template <class T, class U> __global__ void k(T* x);"
    source = f"{template} template <> __global__ void k<float, int>(float* u);"
    assert [each.name for each in read_signature(read(source), name).parameters] == [own]


@pytest.mark.parametrize(("name", "own"), [("n::k<float>", "u"), ("n::k<int>", "v"), ("n::k<long>", "x")])
def test_a_specialisation_may_be_outside_of_the_namespace(name, own):
    template = "namespace n { template <class T> __global__ void k(T* x); } template <class T> __global__ void k(T* y);"
    special = "template <> __global__ void n::k(float* u); namespace n { template <> __global__ void k<int>(int* v); }"
    source = f"{template} {special} template <> __global__ void k(long* w);"
    assert [each.name for each in read_signature(read(source), name).parameters] == [own]


@pytest.mark.parametrize(("name", "own"), [("k<int, float>", ["u", "v"]), ("k<int, int>", ["x0", "x1"])])
def test_a_pack_is_told_by_the_parameters(name, own):
    source = "template <class... T> __global__ void k(T... x); template <> __global__ void k(int u, float v);"
    assert [each.name for each in read_signature(read(source), name).parameters] == own


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (f"{TEMPLATE};\ntemplate <> __global__ void k(float* x, float y);", "k", "'k' lacks a template argument"),
        ("template <> __global__ void k(float* x);", "k<float>", "has no kernel 'k'"),
        ("extern template __global__ void k(float* x);", "k", "has no kernel 'k'"),
    ],
)
def test_a_specialisation_is_no_kernel_without_its_template(source, name, message):
    with pytest.raises(ValueError, match=message):
        read_signature(read(source), name)
