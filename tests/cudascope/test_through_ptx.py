"""Kernels of CUDA sources as NVRTC compiles them, executed on the CPU: `CudaKernel(..., through="ptx")`."""

import ctypes
import importlib
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from covering import is_full
from paged_cases import paged_inputs

import cudascope
from cudascope import CompileError, CudaKernel, Finding
from pagewise.flash_attention import in_cuda as flash
from pagewise.options import ScoreOptions
from pagewise.paged_attention import in_cuda as paged
from pagewise.paged_attention import paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.paged_blocks.cache import to_vllm_layout

gemm = importlib.import_module("pagewise.flash_decoding_plus_plus.flat_gemm")

# ------------------------------------------------------------------------------------------------ the project's kernels


def of_flash(forward: Callable) -> Callable[[], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 32, generator=generator) for heads, tokens in ((2, 40), (1, 70), (1, 70)))
    return lambda: [*forward(q, k, v, ScoreOptions(causal=True))]


def of_pages(version: Callable, cache: torch.dtype | None) -> Callable[[], list[torch.Tensor]]:
    sizes = {"block_size": 16, "dtype": torch.float16, "cache_dtype": cache}
    q, k, v, *rest = paged_inputs([0, 1, 17, 600], 4, 2, 32, device="cpu", **sizes)
    return lambda: [*version(q, *to_vllm_layout(k, v), *rest, return_lse=True)]


def of_product(product: Callable, M: int, dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 136, generator=generator).to(dtype) for rows in (M, 20))
    return lambda: [product(x, w)]


OURS = [
    ("v1", "sm_75", of_pages(paged_attention_v1, None), 1e-3),
    ("flat_gemm", "sm_80", of_product(gemm.on_tensor_cores, 9, torch.float16), 0),
]
if is_full():
    OURS += [
        ("flash", "sm_80", of_flash(flash.forward), 2e-6),
        ("flash", "sm_90", of_flash(flash.forward), 2e-6),
        ("v2", "sm_80", of_pages(paged_attention_v2, None), 1e-3),
        ("grouped", "sm_90", of_pages(paged_attention_grouped, torch.float8_e4m3fn), 1e-3),
        ("gemv", "sm_75", of_product(gemm.on_cuda_cores, 1, torch.float16), 0),
        ("gemv", "sm_90", of_product(gemm.on_cuda_cores, 1, torch.float16), 0),
    ]


@pytest.fixture
def kernels_through_ptx(monkeypatch):
    """A function that makes the project's kernels of CUDA C++ go through PTX for an architecture from then on."""

    def choose(arch: str) -> None:
        monkeypatch.setattr(paged, "CudaKernel", partial(CudaKernel, through="ptx", arch=arch))
        for module in (flash, paged, gemm):
            monkeypatch.setattr(module, "cuda_kernel", module.cuda_kernel.__wrapped__)

    return choose


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "run", "tolerance"), OURS, ids=[f"{name}-{arch}" for name, arch, *_ in OURS])
def test_our_kernels_give_what_their_cpp_gives_and_a_check_finds_nothing(
    name, arch, run, tolerance, kernels_through_ptx
):
    expected = run()
    kernels_through_ptx(arch)
    with cudascope.check(stop=False) as report:
        out = run()
    assert not report.findings, str(report)
    for through_ptx, through_cpp in zip(out, expected, strict=True):
        torch.testing.assert_close(through_ptx, through_cpp, atol=tolerance, rtol=tolerance)


# ------------------------------------------------------------------------------------------------ NVRTC's arithmetic

ARITHMETIC = """
__global__ void arithmetic(const float* x, float* sums, float* powers, float* sines, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    sums[i] = x[i] * x[i] - 1.0f;
    powers[i] = __expf(x[i]);
    sines[i] = __sinf(x[i]);
}
"""


def computed(x: np.ndarray, **how) -> list[np.ndarray]:
    out = [np.zeros_like(x) for _ in range(3)]
    CudaKernel(ARITHMETIC, "arithmetic", **how)[-(-len(x) // 128), 128](x, *out, len(x))
    return out


@pytest.mark.slow
def test_a_product_and_a_sum_become_one_fma():
    x = np.array([1 + 2**-12], np.float32)  # the square is 1 + 2⁻¹¹ + 2⁻²⁴, whose last bit one product rounds away
    once, twice = np.float32(2**-11 + 2**-24), np.float32(2**-11)
    assert computed(x)[0] == twice
    assert computed(x, through="ptx")[0] == once
    assert computed(x, through="ptx", options=["--fmad=false"])[0] == twice


def test_fast_functions_are_as_near_as_the_programming_guide_says():
    x = np.random.default_rng(0).uniform(-3, 3, 1000).astype(np.float32)
    _, powers, sines = computed(x, through="ptx")
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(powers - exact) <= (2 + np.floor(np.abs(1.173 * x))) * np.spacing(exact.astype(np.float32))).all()
    assert (np.abs(sines - np.sin(x.astype(np.float64))) <= 2.0**-21.41).all()


# ------------------------------------------------------------------------------------------------ the language

LANGUAGE = """
#include <cassert>
#include <cstdio>
namespace ns { __device__ int counter; }
__constant__ float weights[3];
__device__ int numbers[4] = {1, 2, 3, 4};
__device__ int* third = numbers + 2;
typedef int (*Function)(int);
struct Pair { double x; int y; };
struct Shape { __device__ virtual int size(int n) const = 0; };
struct Square : Shape { __device__ int size(int n) const override { return n * n; } };
struct Line : Shape {
    int k;
    __device__ Line(int k) : k(k) {}
    __device__ int size(int n) const override { return n + k; }
};

__device__ __noinline__ int one_more(int n) { return n + 1; }
__device__ __noinline__ int doubled(int n) { return 2 * n; }
__device__ Function functions[2] = {one_more, doubled};
__device__ __noinline__ int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1) + n % 2; }
__device__ __noinline__ Pair paired(int n, Pair* copy) {
    Pair pair = {0.5 * n, n};
    *copy = pair;
    return pair;
}

template <class T>
__global__ void language(T* out, Pair given, int n, int which) {
    extern __shared__ int dynamic[];
    __shared__ T row[64];
    int i = threadIdx.x;
    assert(n > 0);
    dynamic[i] = i;
    row[i] = i * n;
    __syncthreads();
    int local[16];
    for (int j = 0; j < 16; ++j) local[j * 7 % 16] = functions[(which + j) % 2](j);
    Pair copy, pair = paired(i, &copy);
    Square square;
    Line line(n);
    const Shape* shape = i % 2 ? (const Shape*)&square : (const Shape*)&line;
    int* heap = (int*)malloc(8);
    heap[1] = factorial(n);
    atomicAdd(&ns::counter, 1);
    if (i == 0) printf("%s %d%% %5.2f %lld|%*d\\n", "text", n, 1.5, 1ll << 40, 4, 7);
    out[i] = row[63 - i] + dynamic[i ^ 1] + local[i % 16] + pair.x + copy.y + shape->size(i) + heap[1] + *third
           + weights[i % 3] + given.x * given.y;
    free(heap);
}
"""


class Pair(ctypes.Structure):
    _fields_ = (("x", ctypes.c_double), ("y", ctypes.c_int))


@pytest.mark.slow
def test_calls_variables_printing_and_the_heap_are_as_in_cpp(capsys):
    results = []
    for through in ("c++", "ptx"):
        kernel = CudaKernel(LANGUAGE, "language<float>", through=through)
        kernel.variable("weights")[:] = torch.tensor([0.25, 0.5, 1.0])
        kernel.variable("numbers")[2] = 100
        out = torch.zeros(64)
        kernel[1, 64, 256](out, Pair(1.5, 3), 5, 1)
        with cudascope.check():
            kernel[1, 64, 256](out, Pair(1.5, 3), 5, 1)
        results.append((out.tolist(), int(kernel.variable("ns::counter")), capsys.readouterr().out))
    assert results[0] == results[1]
    assert results[1][1:] == (128, 2 * "text 5%  1.50 1099511627776|   7\n")


@pytest.mark.slow
def test_an_assertion_names_its_line_of_the_source():
    with pytest.raises(Finding, match=r"assertion failed: n > 0") as found:
        CudaKernel(LANGUAGE, "language<float>", through="ptx")[1, 64, 256](torch.zeros(64), Pair(), 0, 1)
    assert LANGUAGE.split("\n")[found.value.line - 1].strip() == "assert(n > 0);"


# ------------------------------------------------------------------------------------------------ findings

REVERSE = """
__device__ float twice(const float* row, int i) {
    return 2 * row[127 - i];
}
__global__ void reverse(const float* in, float* out, int n) {
    __shared__ float row[128];
    row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = twice(row, threadIdx.x);
}
"""


@pytest.mark.slow
def test_a_missing_barrier_is_found_at_the_lines_of_the_source(tmp_path):
    file = tmp_path / "reverse.cu"
    file.write_text(REVERSE.replace("    __syncthreads();\n", "\n"))
    x, out = torch.arange(128.0), torch.empty(128)
    with cudascope.check(stop=False) as report:
        CudaKernel(file, "reverse", through="ptx")[1, 128](x, out, 128)
    (found,) = report.findings
    assert (found.rule, found.tensor, found.file, found.other_file) == ("race", "row", str(file), str(file))
    assert {found.line, found.other_line} == {3, 7}
    assert "`row[threadIdx.x] = in[threadIdx.x];`" in str(found) or "`return 2 * row[127 - i];`" in str(found)


@pytest.mark.slow
def test_findings_and_counts_are_those_of_the_cpp():
    x, out = torch.arange(128.0), torch.empty(100)
    seen = []
    for through in ("c++", "ptx"):
        kernel = CudaKernel(REVERSE, "reverse", through=through)
        with cudascope.observe() as report:
            kernel[1, 128](x, out, 100)
        lines = [(each.line, each.access, each.space, each.requests) for each in report.launches[0].lines]
        with cudascope.check(stop=False) as report:
            kernel[1, 128](x, out, 128)
        seen.append((lines, [(f.rule, f.file, f.line, f.tensor, f.count) for f in report.findings]))
    assert seen[0] == seen[1]
    assert seen[1][1] == [("out of bounds", "reverse.cu", 9, "out", 28)]


# ------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_go_through_ptx_is_refused_at_once():
    texture = """__global__ void f(float* x, cudaTextureObject_t t) {
        x[0] = tex1Dfetch<float>(t, 1);
    }"""
    scan = """#include <thrust/scan.h>
        __global__ void f(int* x) { thrust::inclusive_scan(thrust::seq, x, x + 4, x); }"""
    launch = "__global__ void g() {}\n__global__ void f() { g<<<1, 1>>>(); }"
    refused = [
        (
            lambda: CudaKernel(REVERSE, "reverse", through="sass"),
            ValueError,
            'through must be "c.." or "ptx", got .sass',
        ),
        (lambda: CudaKernel(REVERSE, "reverse", through="ptx", arch="sm_1"), CompileError, "compile for sm_1\n.*arch"),
        (lambda: CudaKernel(texture, "f", through="ptx"), CompileError, r"f\.cu, line 2: .*does not know tex\.1d"),
        (lambda: CudaKernel(launch, "f", through="ptx"), CompileError, r"f\.cu\(2\): error: .*launch"),
        (
            lambda: CudaKernel(scan, "f", through="ptx"),
            CompileError,
            r"f\.cu\(2\): error: .*\n(.*\n)*<thrust/scan\.h>: empty here, because NVRTC compiles no host code",
        ),
        (lambda: CudaKernel("__global__ void f(int* x) { y; }", "f", through="ptx"), CompileError, '"y" is undefined'),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
