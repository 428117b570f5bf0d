"""CudaKernel: what it reads from a source, what it lets through to a launch, how it compiles and what it keeps."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda.bindings import nvrtc as bindings

from conftest import all_executed
from cudascope import CompileError, CudaKernel
from cudascope.arguments.binder import Binder
from cudascope.arguments.values import is_understood
from cudascope.cpp.file import read
from cudascope.cpp.signature import Parameter, read_signature
from cudascope.cpp.source import Source
from cudascope.toolchain import nvrtc
from cudascope.toolchain.cache import cache_dir
from cudascope.toolchain.ptxas import Resources

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SCALE = """
template <typename T, int N>
__global__ void __launch_bounds__(2 * N) scale(T* __restrict__ x,  // [n]
                                               int n, float factor, const T* bias = nullptr /* [n] */) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = T(float(x[i]) * factor) + (bias ? bias[i] : T(0.0f));
}
"""


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CUDASCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ------------------------------------------------------------------------------------------------ signatures


def declared(parameters: str, before: str = "", name: str = "f") -> list[str]:
    """The parameters of a kernel as "const float* x"; `before` stands above it."""
    signature = read_signature(read(f"{before}\n__global__ void f({parameters}) {{ }}"), name)
    return [f"{'const ' * p.const}{p.ctype}{'*' * p.pointer} {p.name}" for p in signature.parameters]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", []),
        ("void", []),
        ("float x", ["float x"]),
        ("float *x", ["float* x"]),
        ("const float* __restrict__ const x", ["const float* x"]),
        ("float const * x", ["const float* x"]),
        ("float* const x", ["float* x"]),
        ("float x[128]", ["float* x"]),
        ("float x[]", ["float* x"]),
        ("unsigned n, unsigned long long int m, long k", ["unsigned int n", "unsigned long long m", "long k"]),
        ("short int a, signed char b, char c", ["short a", "signed char b", "char c"]),
        ("int n = 3, float x = f(1, 2), bool b = (1 < 2)", ["int n", "float x", "bool b"]),
        ("std::int64_t n, ::size_t m", ["int64_t n", "size_t m"]),
        ("[[maybe_unused]] int n, alignas(16) float x", ["int n", "float x"]),
        ("half* a, nv_bfloat162* b", ["__half* a", "__nv_bfloat162* b"]),
        ("float* /* a, b) */ x, // int y,\n int n", ["float* x", "int n"]),
        ("int, float*", ["int #0", "float* #1"]),
        ("const __grid_constant__ int n", ["const int n"]),
    ],
)
def test_parameters_are_read_however_they_are_written(written, read):
    assert declared(written) == read


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("f<__half, 64>", ["const __half* x", "float s", "__half* acc"]),
        ("f<float>", ["const float* x", "float s", "float* acc"]),
        ("f<float, 3 + (4 > 2), double>", ["const float* x", "float s", "double* acc"]),
        ("f<unsigned char>", ["const unsigned char* x", "float s", "unsigned char* acc"]),
    ],
)
def test_template_arguments_are_put_in_with_their_defaults(name, read):
    template = "template <typename T, int N = (1 > 0), class Acc = T>"
    assert declared("const T* x, float s, Acc* acc", template, name=name) == read


NAMESPACES = """
namespace a { __global__ void k(float* o, float s) { { } } }
namespace b::c { __global__ void k(float* o, double s) { } }
namespace { __global__ void k(float* o, int s) { } }
namespace d { __global__ void known(float* o, long s) { } } using namespace d;
"""


@pytest.mark.parametrize(
    ("name", "ctype"), [("a::k", "float"), ("::b::c::k", "double"), ("k", "int"), ("known", "long")]
)
def test_a_kernel_is_that_of_its_namespace(name, ctype):
    assert read_signature(read(NAMESPACES), name).parameters[1].ctype == ctype


CHOICE = """
#ifndef F64
__global__ void k(float* o, float s) { }
#else
__global__ void k(float* o, double s) { }
#endif
"""
DEFAULT = "#ifndef F64\n#define F64 0\n#endif\n" + CHOICE.replace("ifndef F64", "if !F64")
CHOSEN_TYPE = "#ifdef F64\n#define T double\n#else\n#define T float\n#endif\n__global__ void k(float* o, T s) { }"


CONDITIONS = ["if !defined(F64)", "if !defined F64 && (A == 2 || 0x10u / 4 >= 4)", "if !(F64 + 1 != 1) || -1 == 2"]


@pytest.mark.parametrize(
    "source",
    [CHOICE, DEFAULT, CHOSEN_TYPE, *(CHOICE.replace("ifndef F64", condition) for condition in CONDITIONS)],
)
@pytest.mark.parametrize(("defines", "ctype"), [([], "float"), (["F64"], "double"), (["F64=1"], "double")])
def test_a_condition_on_defines_chooses_the_declaration(source, defines, ctype):
    assert read_signature(read(source, tuple(defines)), "k").parameters[1].ctype == ctype


@pytest.mark.parametrize("condition", ["if __CUDA_ARCH__ < 900", "ifdef __CUDACC__", "if A(2)", "if (A || 1) && _B"])
def test_a_choice_that_cannot_be_told_is_refused(condition):
    source = CHOICE.replace("ifndef F64", condition)
    with pytest.raises(ValueError, match=r'several kernels .* "k\(float\*, float\)" or "k\(float\*, double\)"'):
        read_signature(read(source), "k")
    parameter = read_signature(read(CHOSEN_TYPE.replace("ifdef F64", condition)), "k").parameters[1]
    assert parameter.ctype == "T"
    assert not is_understood(parameter)


def test_equal_declarations_are_no_choice():
    source = CHOICE.replace("ifndef F64", "if __CUDA_ARCH__ < 900").replace("double s", "const float scale")
    assert [p.ctype for p in read_signature(read(source), "k").parameters] == ["float", "float"]
    redeclared = (
        "template <class T, int N = 2> __global__ void k(T*); template <class U, int M> __global__ void k(U* x) { }"
    )
    (parameter,) = read_signature(read(redeclared), "k<float>").parameters
    assert (parameter.ctype, parameter.name) == ("float", "x")


@pytest.mark.parametrize(
    ("bounds", "threads"), [("128", 128), ("4 * WARP, 2", 128), ("N", 64), ("(N / 2) + 1", 33), ("max(N, 3)", None)]
)
def test_launch_bounds_are_known(bounds, threads):
    source = f"constexpr int WARP = 32; template <int N> __global__ void __launch_bounds__({bounds}) f(int n) {{ }}"
    assert read_signature(read(source), "f<64>").max_threads == threads


OF_TEMPLATE = "template <typename T, int N = 2> __global__ void f(T* x) { }"
OF_NAMESPACES = """
namespace a { template <class T> __global__ void c(T x) { } }
namespace b { template <class T> __global__ void c(T x) { } __global__ void d(int n) { } }
template <int N = 3> __global__ void e(int n) { }
"""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"defines": {"A": 1}}, TypeError,
         r"defines must be a sequence of strings, .* got \{'A': 1\}: pass \['A=1'\]"),
        ({"defines": None}, TypeError, "defines must be a sequence of strings, .* got None"),
        ({"defines": "A=1"}, TypeError, "defines must be a sequence of strings, .* got 'A=1'"),
        ({"options": [3]}, TypeError, r"options must be a sequence of strings, .* got \[3\]"),
        ({"name": 3}, TypeError, "name must be a string, .* got 3"),
        ({"name": "f float"}, ValueError, "name must be a kernel"),
        ({"source": "missing.cu"}, FileNotFoundError, r"no file /.*/missing\.cu: a relative path is looked up from"),
        ({"source": "/nowhere/missing.cu"}, FileNotFoundError, r"no file /nowhere/missing\.cu$"),
        ({"source": OF_NAMESPACES, "name": "c<float>"}, ValueError,
         'no kernel \'c\': name it "a::c<float>" or "b::c<float>"'),
        ({"source": OF_NAMESPACES, "name": "a::d"}, ValueError, "no kernel 'a::d': name it \"b::d\""),
        ({"source": OF_NAMESPACES, "name": "e"}, ValueError, 'name it "e<>"'),
        ({"source": "__global__ void f(int n) { } __global__ void g() { }", "name": "text"}, ValueError,
         "no kernel 'text'; it has f, g"),
        ({"source": OF_TEMPLATE}, ValueError, "lacks a template argument, the kernel takes <typename T, int N = 2>"),
        ({"source": OF_TEMPLATE, "name": "f<float, 1, 2>"}, ValueError, "has 3 template arguments"),
        ({"source": "template <class T> __global__ void f(T& x) { }", "name": "f<float>"}, ValueError,
         "parameter x is declared `T &`, a reference"),
        ({"source": "__global__ void f(float (&x)[8]) { }"}, ValueError,
         "parameter x is declared `float &`, a reference"),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_be_made_is_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        CudaKernel(**{"source": "__global__ void f(int n) { }", "name": "f", **arguments})


# ------------------------------------------------------------------------------------------------ arguments


def binder(*parameters: str) -> Binder:
    return Binder("f", read_signature(read(f"__global__ void f({', '.join(parameters)}) {{}}"), "f").parameters)


@pytest.mark.parametrize(
    ("ctype", "value", "dtype"),
    [
        ("int", -5, np.int32),
        ("unsigned", 2**32 - 1, np.uint32),
        ("long long", -(2**63), np.int64),
        ("int64_t", 2**40, np.int64),
        ("size_t", 2**64 - 1, np.uint64),
        ("uint8_t", 200, np.uint8),
        ("short", -7, np.int16),
        ("float", 0.1, np.float32),
        ("float", 3, np.float32),
        ("float", -np.inf, np.float32),
        ("double", 0.1, np.float64),
        ("__half", 0.1, np.float16),
        ("bool", True, np.bool_),
        ("int", np.int64(7), np.int32),
        ("float", np.float64(0.1), np.float32),
        ("bool", np.bool_(True), np.bool_),
    ],
)
def test_a_scalar_reaches_the_gpu_in_exactly_the_declared_type(ctype, value, dtype):
    bind = binder(f"{ctype} x")
    (carried,) = bind.bind([value]).values
    assert bytes(carried) == np.array(value, dtype).tobytes()
    assert bind.sizes == [np.dtype(dtype).itemsize]


@pytest.mark.parametrize(("ctype", "bits"), [("__half", 0x2E66), ("__nv_bfloat16", 0x3DCD)])
def test_a_half_scalar_is_rounded_to_nearest_whatever_torchs_default_device_is(ctype, bits):
    with torch.device("meta"):
        (carried,) = binder(f"{ctype} a").bind([0.1]).values
    assert carried.value == bits


def test_cuda_core_packs_the_arguments_as_the_kernel_reads_them():
    handler = pytest.importorskip(
        "cuda.core._kernel_arg_handler"
    )  # the part of cuda-core's launch that needs no driver
    x = torch.zeros(3)
    bind = binder("float* x", "int n", "float* bias", "float factor", "bool flag", "int64_t stride")
    holder = handler.ParamHolder(tuple(bind.bind([x, 3, None, 0.5, True, 2**40]).values))
    places = ctypes.cast(holder.ptr, ctypes.POINTER(ctypes.c_void_p))
    packed = [ctypes.string_at(places[i], size) for i, size in enumerate(bind.sizes)]
    expected = (np.uint64(x.data_ptr()), np.int32(3), np.uint64(0), np.float32(0.5), np.bool_(True), np.int64(2**40))
    assert packed == [number.tobytes() for number in expected]


@pytest.mark.parametrize(
    ("ctype", "dtypes"),
    [
        ("float", [torch.float32]),
        ("double", [torch.float64]),
        ("__half", [torch.float16]),
        ("__nv_bfloat16", [torch.bfloat16]),
        ("__nv_fp8_e4m3", [torch.float8_e4m3fn]),
        ("__nv_fp8_e5m2", [torch.float8_e5m2]),
        ("int", [torch.int32]),
        ("long long", [torch.int64]),
        ("int64_t", [torch.int64]),
        ("unsigned char", [torch.uint8]),
        ("int8_t", [torch.int8]),
        ("bool", [torch.bool]),
        ("unsigned int", [torch.uint32, torch.int32]),
        ("float4", [torch.float32]),
        ("half2", [torch.float16]),
        ("uchar4", [torch.uint8]),
        ("void", [torch.float32, torch.int8, torch.bfloat16]),
    ],
)
def test_a_tensor_must_have_the_pointers_dtype(ctype, dtypes):
    bind = binder(f"const {ctype}* x")
    for dtype in dtypes:
        x = torch.zeros(16).to(dtype)
        assert bind.bind([x]).values == [x.data_ptr()]
    for dtype in {torch.float32, torch.float16, torch.int32, torch.uint8, torch.bool} - set(dtypes):
        if ctype != "void":
            name = str(dtype).removeprefix("torch.")
            with pytest.raises(TypeError, match=rf"f: x must be .* \(declared `.*\*`\), got {name}: convert it to"):
                bind.bind([torch.zeros(16).to(dtype)])


PACKED = np.zeros(8, np.dtype([("a", "f4"), ("b", "u1")]))
READ_ONLY = np.frombuffer(bytes(16), np.float32)


@pytest.mark.parametrize(
    ("parameters", "values", "error", "message"),
    [
        ("int x", [1.0], TypeError, "x must be an int .*got float"),
        ("int x", [True], TypeError, "x must be an int .*got bool"),
        ("int x", [None], TypeError, "x must be an int .*got NoneType"),
        ("int x", [torch.tensor(3)], TypeError, r"got Tensor: pass its \.item"),
        ("int x", [2**31], ValueError, "x must fit in `int`, -2147483648 to 2147483647, got 2147483648"),
        ("unsigned x", [-1], ValueError, "x must fit in `unsigned int`, 0 to 4294967295, got -1"),
        ("size_t x", [2**64], ValueError, "x must fit in `size_t`"),
        ("char x", [128], ValueError, "x must fit in `char`, -128 to 127"),
        ("float x", [1e39], ValueError, r"x must fit in `float`, up to 3\.40282e\+38, got 1e\+39"),
        ("__half x", [70000], ValueError, "x must fit in `__half`, up to 65504"),
        ("float x", ["1"], TypeError, "x must be a number .*got str"),
        ("float x", [False], TypeError, "x must be a number .*got bool"),
        ("bool x", [1], TypeError, "x must be True or False .*got int"),
        ("float* x", [3], TypeError, "x must be a tensor float32 or None .*got int"),
        ("float* x", [np.zeros(3)], TypeError, "x must be float32 .*got float64: convert it to float32"),
        ("float* x", [torch.zeros(3).to_sparse()], ValueError, "x must be a dense tensor, got torch.sparse_coo"),
        ("float* x", [torch.zeros(3, device="meta")], ValueError, "x must be on the CPU or a GPU, got meta"),
        ("float4* x", [torch.zeros(9)[1:]], ValueError, "x must be aligned to 16 bytes .*but starts 4 past"),
        ("half2* x", [torch.zeros(9).half()[1:]], ValueError, "x must be aligned to 4 bytes"),
        ("float a", [10**400], ValueError, "a must fit in `float`, up to .*, got a larger int"),
        ("double a", [10**400], ValueError, "a must fit in `double`, up to .*, got a larger int"),
        ("__half a", [10**400], ValueError, "a must fit in `__half`, up to .*, got a larger int"),
        ("const float* x, int n", [None], TypeError, r"kernel f takes 2 arguments \(const float\* x, int n\), got 1"),
        ("float* x, float* y", [torch.zeros(1), torch.zeros(1, device="meta")], ValueError,
         "kernel f: y must be on cpu as x is, got meta"),
        ("float* x, float by, float plus = -0.5f, const int* y = nullptr", [None], TypeError,
         r"takes 4 arguments \(.* float plus = - 0.5f, const int\* y = nullptr\), got 1"),
        ("uint2 v", [(1, 2, 3)], ValueError, "v must be 2 numbers"),
        ("uint2 v", [(1, -1)], ValueError, "v must fit in `unsigned int`"),
        ("float* x", [np.zeros(4, np.float32)[::-1]], ValueError, "kernel f: x must have no negative strides"),
        ("float* x", [PACKED["a"]], ValueError, "x must have strides of whole elements"),
        ("float* x", [np.zeros(4, ">f4")], ValueError, "x must have this machine's byte order, got >f4"),
        ("float* x", [READ_ONLY], ValueError, "x is read-only memory, and the kernel may write there .*pass a copy"),
        ("Config x", [None], CompileError, r"f.cu:1:19: error: .Config. was not declared"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(parameters, values, error, message):
    with pytest.raises(error, match=message):
        CudaKernel(f"__global__ void f({parameters}) {{ }}", "f")[1, 1](*values)


# ------------------------------------------------------------------------------------------------ launches


@pytest.mark.parametrize("device_tensor", [False, True], ids=["no bias", "bias"])
def test_the_same_object_runs_on_either_device(device, device_tensor):
    scale = CudaKernel(SCALE, "scale<float, 64>")
    x, bias = torch.arange(1000.0, device=device), torch.ones(1000, device=device) if device_tensor else None
    expected = x * 0.5 + (1 if device_tensor else 0)
    before = all_executed()["scale (CUDA)"]
    scale[8, 128](x, 1000, 0.5, bias)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert all_executed()["scale (CUDA)"] == before + 1, "conftest counts it"


def test_a_kernel_without_tensors_runs_where_there_is_a_device(capfd):
    CudaKernel('__global__ void hello(int n, float* x) { if (!x) printf("hello %d\\n", n); }', "hello")[1, 1](7, None)
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    ctypes.CDLL(None).fflush(None)  # what a GPU's printf wrote waits in the C library's buffer
    assert capfd.readouterr().out == "hello 7\n"


def test_a_refused_launch_runs_nothing():
    scale, x = CudaKernel(SCALE, "scale<float, 64>"), torch.ones(4)
    before = all_executed()["scale (CUDA)"]
    with pytest.raises(TypeError):
        scale[1, 128](x, 4.0, 2, None)
    with pytest.raises(ValueError, match=r"shared_bytes = 300000, but .* at most 232448 bytes"):
        scale[1, 128, 300_000](x, 4, 2, None)
    assert x.tolist() == [1, 1, 1, 1]
    assert all_executed()["scale (CUDA)"] == before


@pytest.mark.parametrize(
    ("launch", "error", "message"),
    [
        ((1, 1025), ValueError, r"block must be at most \(1024, 1024, 64\), got \(1025, 1, 1\)"),
        ((1, (1, 1, 65)), ValueError, "block must be at most"),
        ((1, (64, 32)), ValueError, r"block \(64, 32, 1\) has 2048 threads, at most 128 \(its __launch_bounds__\)"),
        ((1, 256), ValueError, "has 256 threads, at most 128"),
        ((0, 32), ValueError, "grid must be at least 1 everywhere, got 0"),
        ((1, (0, 1)), ValueError, r"block must be at least 1 everywhere, got \(0, 1\)"),
        (((1, 65536), 32), ValueError, r"grid must be at most \(2147483647, 65535, 65535\)"),
        (((1, 1, 1, 1), 32), ValueError, "grid must be an int or a tuple of 1 to 3"),
        ((-1, 32), ValueError, "grid must not be negative"),
        ((1.0, 32), TypeError, "grid must be made of ints, got 1.0"),
        ((torch.tensor(1), 32), TypeError, "grid must be made of ints"),
        ((1, 32, -4), ValueError, "shared_bytes must not be negative"),
        (1, TypeError, r"launch as kernel\[grid, block\]"),
    ],
)
def test_an_impossible_launch_is_refused_with_its_limit(launch, error, message):
    with pytest.raises(error, match=message):
        CudaKernel(SCALE, "scale<float, 64>")[launch]


def test_without_launch_bounds_a_thread_block_has_as_many_threads_as_cuda_allows():
    kernel = CudaKernel("__global__ void f(int n) { }", "f")
    assert kernel[1, (32, 32)]
    with pytest.raises(ValueError, match=r"block \(32, 33, 1\) has 1056 threads, at most 1024 \(CUDA's limit\)"):
        kernel[1, (32, 33)]


@pytest.mark.parametrize("launch", [(True, 1.0), ((1, True), 1), (1, 1, False)])
def test_a_refused_launch_is_refused_after_an_equal_one(launch):
    kernel = CudaKernel("__global__ void f(int n) { }", "f")
    for allowed in ((1, 1), ((1, 1), 1), (1, 1, 0)):
        assert kernel[allowed] is kernel[allowed]
    with pytest.raises(TypeError, match="must be made of ints"):
        kernel[launch]


def test_grid_and_block_may_be_lists_and_numpy_numbers(device):
    scale, x = CudaKernel(SCALE, "scale<float, 64>"), torch.ones(4, device=device)
    scale[[np.int64(1)], (2, 1)](x, 4, 2, None)
    assert x.tolist() == [2, 2, 1, 1]


def test_asked_for_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        RuntimeError, match="kernel scale: asked to run on cuda, but torch finds no GPU on this machine"
    ):
        CudaKernel(SCALE, "scale<float, 64>").compile("cuda")


def test_source_is_a_file_or_text(tmp_path, monkeypatch):
    (tmp_path / "scale.cu").write_text(SCALE)
    monkeypatch.chdir(tmp_path)
    for source in ("scale.cu", tmp_path / "scale.cu", str(tmp_path / "scale.cu")):
        assert CudaKernel(source, "scale<float, 64>").source.filename == str(tmp_path / "scale.cu")
    assert CudaKernel(SCALE, "scale<float, 64>").source.filename == "scale.cu"


# ------------------------------------------------------------------------------------------------ compiling


@pytest.mark.slow
def test_a_cubin_is_compiled_once(empty_cache):
    CudaKernel(SCALE, "scale<float, 64>").resources("sm_90")
    (cubin,) = empty_cache.glob("cubin/*.cubin")
    inode = cubin.stat().st_ino
    CudaKernel(SCALE, "scale<float, 64>").resources("sm_90")
    assert cubin.stat().st_ino == inode, "it is not written again"
    variants = [
        (CudaKernel(SCALE, "scale<float, 32>"), "sm_90"),
        (CudaKernel(SCALE, "scale<float, 64>"), "sm_80"),
        (CudaKernel(SCALE + " ", "scale<float, 64>"), "sm_90"),
        (CudaKernel(SCALE, "scale<float, 64>", defines=["A"]), "sm_90"),
        (CudaKernel(SCALE, "scale<float, 64>", options=["--use_fast_math"]), "sm_90"),
    ]
    for kernel, arch in variants:
        kernel.resources(arch)
    assert len(list(empty_cache.glob("cubin/*.cubin"))) == 1 + len(variants), "each is another build"


def test_nvrtc_compiles_each_time(empty_cache, monkeypatch):
    """Where a driver is, NVRTC has a cache since 12.9. It gives the code alone, and the resources are in the log."""
    told, real = [], bindings.nvrtcCompileProgram
    monkeypatch.setattr(bindings, "nvrtcCompileProgram", lambda *args: told.extend(args[2]) or real(*args))
    CudaKernel(SCALE, "scale<float, 64>").resources("sm_90")
    assert (b"--no-cache" in told) == (bindings.nvrtcVersion()[1:] >= (12, 9))


def test_a_changed_include_is_another_build(empty_cache, tmp_path):
    (tmp_path / "sizes.cuh").write_text('#include "deeper.cuh"\n')
    (tmp_path / "deeper.cuh").write_text("using real = float; constexpr int N = 32;")
    path = tmp_path / "kernel.cu"
    body = "__shared__ real s[N]; s[threadIdx.x] = *x; __syncthreads(); *x = s[*x > 0];"
    path.write_text(f'#include "sizes.cuh"\n__global__ void f(real* x) {{ {body} }}')
    source = Source(path.read_text(), str(path), tmp_path, (), ())
    assert [file.name for file, _ in source.included()] == ["sizes.cuh", "deeper.cuh"]
    assert CudaKernel(path, "f").resources().shared_bytes == 128
    (tmp_path / "deeper.cuh").write_text("using real = double; constexpr int N = 32;")
    kernel = CudaKernel(path, "f")
    assert kernel.parameters == (Parameter("x", "double", True, False),)
    assert kernel.resources().shared_bytes == 256


def test_a_damaged_cubin_is_compiled_again(empty_cache):
    CudaKernel(SCALE, "scale<float, 64>").resources()
    (file,) = empty_cache.glob("cubin/*.cubin")
    whole = file.read_bytes()
    file.write_bytes(b"")
    CudaKernel(SCALE, "scale<float, 64>").resources()
    assert file.read_bytes().split(b"\n")[0] == whole.split(b"\n")[0]


def test_the_cache_may_be_relative_and_at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for written, meant in ((".", tmp_path), ("here", tmp_path / "here"), ("~/zz", tmp_path / "zz")):
        monkeypatch.setenv("CUDASCOPE_CACHE", written)
        assert cache_dir() == meant
        assert meant.is_dir()
    monkeypatch.delenv("CUDASCOPE_CACHE")
    assert cache_dir() == tmp_path / ".cache" / "cudascope"


@pytest.mark.parametrize("folder", ["file", "file/below", "read_only"])
def test_a_cache_that_cannot_be_written_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "read_only").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    monkeypatch.setenv("CUDASCOPE_CACHE", str(tmp_path / folder))
    with pytest.raises(CompileError, match=f"CUDASCOPE_CACHE: {tmp_path / folder} cannot be written: .*; set it to"):
        cache_dir()


@pytest.mark.slow
def test_resources_are_those_of_the_one_kernel_asked_for():
    source = """
    __global__ void small(int* x) { __shared__ int s[32]; s[threadIdx.x] = *x; __syncthreads(); *x = s[3]; }
    __global__ void large(float* x) {
        __shared__ float s[1000];
        float held[64];
        for (int i = 0; i < 64; ++i) held[i] = x[i];
        for (int i = 0; i < 64; ++i) s[i * threadIdx.x % 1000] = held[i];
        __syncthreads();
        for (int i = 0; i < 64; ++i) x[i] = held[63 - i] * s[i];
    }
    __global__ void indexed(float* x, int n) {  // held cannot lie in registers, but nothing is spilled
        float held[64];
        for (int i = 0; i < 64; ++i) held[i * n % 64] = x[i];
        *x = held[threadIdx.x];
    }"""
    small, large = CudaKernel(source, "small").resources(), CudaKernel(source, "large").resources()
    assert (small.shared_bytes, large.shared_bytes) == (128, 4000)
    assert small.spilled_bytes == large.spilled_bytes == CudaKernel(source, "indexed").resources().spilled_bytes == 0
    assert large.registers > 64 > small.registers > 0
    starved = CudaKernel(source, "large", options=["--maxrregcount=32"]).resources()
    assert starved.registers <= 32
    assert starved.spilled_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("as_file", [False, True], ids=["text", "file"])
def test_a_syntax_error_is_shown_with_file_and_line(tmp_path, as_file):
    broken = SCALE.replace("if (i < n)", "if (i < n")
    line = 1 + broken[: broken.index("if (i < n")].count("\n")
    path = tmp_path / "broken.cu"
    path.write_text(broken)
    kernel = CudaKernel(path if as_file else broken, "scale<float, 64>")
    name = str(path) if as_file else "scale.cu"
    with pytest.raises(CompileError, match=rf'{name}\({line}\): error: expected a "\)"'):
        kernel.resources()
    with pytest.raises(CompileError, match=rf"{Path(name).name}:{line}:\d+: error: expected"):
        kernel.compile("cpu")


def test_an_error_in_an_included_file_names_that_file(tmp_path, empty_cache):
    (tmp_path / "broken.cuh").write_text("\n\nconstexpr int x = ;\n")
    (tmp_path / "kernel.cu").write_text('#include "broken.cuh"\n__global__ void f(int n) { n = x; }')
    with pytest.raises(CompileError, match=rf"{tmp_path}/broken.cuh\(3\): error"):
        CudaKernel(tmp_path / "kernel.cu", "f").resources()


@pytest.mark.slow
def test_what_a_plain_cu_file_includes_is_there():
    nvidia = ["cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"]
    host = ["stdint", "float", "math", "limits", "stdio", "assert", "stddef"]
    headers = [*nvidia, *(f"{name}.h" for name in host), *(f"c{name}" for name in host)]
    includes = "".join(f"#include <{header}>\n" for header in headers)
    body = 'assert(n); printf("%d", n); *x = FLT_MAX + INT_MAX + INFINITY + int64_t(n) + fmaxf(M_PI, *x);'
    kernel = CudaKernel(f"{includes}__global__ void f(float* x, int n) {{ {body} }}", "f")
    assert kernel.resources().registers > 0
    kernel.compile("cpu")


def test_an_unknown_option_is_refused(empty_cache):
    with pytest.raises(ValueError, match="options: '--warp-speed' is not known here; known are -I<folder>, --std"):
        CudaKernel(SCALE, "scale<float, 64>", options=["--warp-speed"]).resources()


def test_without_the_bindings_of_nvrtc_the_error_says_what_to_install(empty_cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc._environment.cache_clear()
    with pytest.raises(RuntimeError, match=r"needs cuda-bindings .*pip install 'cudascope\[cuda\]'"):
        CudaKernel(SCALE, "scale<float, 64>").resources()


def test_without_a_host_compiler_the_error_says_so(empty_cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError, match=r"needs a C\+\+ compiler, and there is no g\+\+ on the PATH: install one"):
        CudaKernel(SCALE, "scale<float, 64>").compile("cpu")


# ------------------------------------------------------------------------------------------------ only with a GPU

if torch.cuda.is_available():

    def test_a_launch_goes_to_torchs_current_stream_and_into_a_graph():
        scale, x = CudaKernel(SCALE, "scale<float, 64>"), torch.ones(1000, device="cuda")
        scale.compile("cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scale[8, 128](x, 1000, 2.0, None)
        assert x.max() == 1, "captured, not run"
        graph.replay()
        graph.replay()
        assert x.unique().tolist() == [4]

    def test_more_than_48_kb_of_shared_memory_is_opted_into():
        source = """__global__ void f(int* x, int n) {
            extern __shared__ int s[];
            for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = i;
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = s[n - 1 - i];
        }"""
        n = 15_000  # 60 KB: a T4 has 64 KB
        x = torch.zeros(n, dtype=torch.int32, device="cuda")
        CudaKernel(source, "f")[1, 256, 4 * n](x, n)
        assert torch.equal(x, torch.arange(n, dtype=torch.int32, device="cuda").flip(0))
        with pytest.raises(
            ValueError, match="shared_bytes = 500000, but a thread block of this kernel can have at most"
        ):
            CudaKernel(source, "f")[1, 256, 500_000](x, n)

    def test_parameter_sizes_that_the_compiler_saw_otherwise_are_refused(monkeypatch):
        kernel = CudaKernel(SCALE, "scale<float, 64>")
        monkeypatch.setattr(kernel._binder, "sizes", [8, 8, 4, 8])
        with pytest.raises(CompileError, match=r"read from the source as \[8, 8, 4, 8\] bytes, but compiled to"):
            kernel.compile("cuda")


@pytest.mark.parametrize(
    ("registers", "threads", "blocks"),
    [(32, 128, 16), (64, 128, 8), (65, 128, 7), (168, 128, 3), (255, 1024, 0), (32, 1024, 2)],
)
def test_thread_blocks_that_fit_an_sm(registers, threads, blocks):
    """65536 registers, given out in units of 256 per warp: 65 per thread are 2304 per warp."""
    assert Resources(registers, 0, 0).thread_blocks_per_sm(threads) == blocks
