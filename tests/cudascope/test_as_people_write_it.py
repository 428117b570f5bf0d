"""CUDA as people write it: of a file with host code, only what a kernel needs is built, for the CPU and for a GPU."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from cudascope import CompileError, CudaKernel, Finding, check
from cudascope.arguments.values import rule_for
from cudascope.cpp.device_code import needed_by, only
from cudascope.cpp.file import Statements, read
from cudascope.cpp.signature import Parameter
from cudascope.cpp.tokens import partners, tokens_of

FILE = Path(__file__).parent / "as_people_write_it.cu"

# ------------------------------------------------------------------------------------------------ the cutter


def needed(source: str, name: str = "k") -> str:
    """Return the tokens of `source` that kernel `name` needs."""
    file = read(source)
    return " ".join(tokens_of(only(file, needed_by(file, name))))


KERNEL = "__global__ void k ( float * x ) { %s }"


@pytest.mark.parametrize(
    ("before", "body", "kept"),
    [
        ("void host(); int main() { k<<<1, 1>>>(x); }", "", ""),
        ("__device__ float f(); __device__ float g();", "f ( ) ;", "__device__ float f ( ) ;"),
        ("constexpr int N = 3; const int M = 4; int h = 5;", "N + M + h ;", "constexpr int N = 3 ; const int M = 4 ;"),
        ("using A = int; using B = A; typedef B C; typedef float D;", "C c ;",
         "using A = int ; using B = A ; typedef B C ;"),
        ("template <class T> using A = T; template <class T> using B = T;", "A < int > a ;",
         "template < class T > using A = T ;"),
        ("typedef void (*F)(int); typedef int (*G)();", "F f ;", "typedef void ( * F ) ( int ) ;"),
        ("enum { RED, GREEN }; enum class Tree { OAK };", "RED ;", "enum { RED , GREEN } ;"),
        ("struct S { int a; } s, *t; struct U;", "S s ;", "struct S { int a ; } s , * t ;"),
        ("template <class T, int N = (4 > 3)> struct V { T x[N]; };", "V < int > v ;",
         "template < class T , int N = ( 4 > 3 ) > struct V { T x [ N ] ; } ;"),
        ("template <class T> struct P; template <> struct P<float> { };", "P < float > p ;",
         "template < class T > struct P ; template < > struct P < float > { } ;"),
        ("REGISTER(k) __device__ int f() { }", "f ( ) ;", "__device__ int f ( ) { }"),
        ("TEST(a, b) { k<<<1, 1>>>(x); } TEST(c, d);", "", ""),
        ('extern "C" { __device__ int f(); int g(); }', "f ( ) ;", 'extern "C" { __device__ int f ( ) ; }'),
        ("namespace a::b { __device__ int f(); int g(); }", "a :: b :: f ( ) ;",
         "namespace a :: b { __device__ int f ( ) ; }"),
        ("__device__ int f(int); template <class T> __device__ int f(T); int f();", "f ( 1 ) ;",
         "__device__ int f ( int ) ; template < class T > __device__ int f ( T ) ;"),
        ("struct A { }; struct B { }; __device__ A operator+(A, A); __device__ B operator+(B, B); A operator-(A, A);",
         "A a ;", "struct A { } ; __device__ A operator + ( A , A ) ;"),
        ("struct S { __device__ S(int n) : a{n}, b(n) { } int a, b; }; S make();", "S s ( 1 ) ;",
         "struct S { __device__ S ( int n ) : a { n } , b ( n ) { } int a , b ; } ;"),
        ("struct S { S(int n) : a{n}, b(n) { } ~S() { } int a, b; virtual void v(); S() = default; void h(); };",
         "S s ;", "struct S { explicit S ( int n ) = delete ; int a , b ; virtual void v ( ) ; S ( ) = default ; } ;"),
        ("struct S { struct R { void h(); __device__ void d(); }; };", "S s ;",
         "struct S { struct R { __device__ void d ( ) ; } ; } ;"),
        ("template <class T> struct S { __device__ T f(); T g(); }; template <class T> __device__ T S<T>::f() { } "
         "template <class T> T S<T>::g() { }", "S < int > ( ) . f ( ) ;",
         "template < class T > struct S { __device__ T f ( ) ; } ; "
         "template < class T > __device__ T S < T > :: f ( ) { }"),
        ("template __global__ void k<float>(float*); static_assert(sizeof(int) == 4, \"\");", "", ""),
        ("__device__ int a = (1, 2), b[] = {3, 4}; int c = a;", "a ;",
         "__device__ int a = ( 1 , 2 ) , b [ ] = { 3 , 4 } ;"),
    ],
)  # fmt: skip
def test_a_kernel_keeps_what_it_needs_and_no_more(before, body, kept):
    assert needed(f"{before}\n{KERNEL % body}").split() == f"{kept} {KERNEL % body}".split()


def test_what_is_left_out_leaves_its_lines():
    source = "int main() {\n#if A\n  f<<<1, 1>>>();\n#endif\n#pragma unroll\n}\n__global__ void k() { }\n"
    file = read(source, None)
    assert only(file, needed_by(file, "k")) == "\n#if A\n\n#endif\n\n\n__global__ void k() { }\n"


@pytest.mark.parametrize(
    ("target", "statement"),
    [
        ("a", "a ( ) ;"),
        ("b", "if ( b ) { c ( ) ; d ( ) ; } else if ( e ) f ( ) ; else g ( ) ;"),
        ("d", "d ( ) ;"),
        ("e", "if ( e ) f ( ) ; else g ( ) ;"),
        ("g", "g ( ) ;"),
        ("i", "for ( ; i ; ) do h ( ) ; while ( j ) ;"),
        ("h", "h ( ) ;"),
        ("l", "l = { 1 , [ ] { m ( ) ; } } ;"),
        ("o", "o ( ) ;"),
    ],
)
def test_the_smallest_statement_round_a_token_is_found(target, statement):
    tokens = tokens_of(
        "{ a(); if (b) { c(); d(); } else if (e) f(); else g(); for (; i;) do h(); while (j);"
        "l = {1, [] { m(); }}; switch (n) { case 1: o(); break; default: p(); } }"
    )
    start, end = Statements(tokens, partners(tokens)).around(0, tokens.index(target))
    assert " ".join(tokens[start:end]) == statement


# ------------------------------------------------------------------------------------------------ kernels of a file


@pytest.mark.slow
def test_an_untouched_file_runs_and_is_checked():
    x, out = torch.arange(100.0), torch.zeros(1)
    kernel = CudaKernel(FILE, "reduce<float>")
    kernel[1, 64](x, out, 100)
    assert out.item() == 4950
    with check(outputs=[out]):
        kernel[1, 64](x, out, 100)


@pytest.mark.slow
def test_an_operator_is_needed_where_its_operands_are():
    z = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    CudaKernel(FILE, "square")[1, 2](z, 2)  # (1 + 2i)² = -3 + 4i, i² = -1
    assert z.tolist() == [[-3.0, 4.0], [-1.0, 0.0]]


@pytest.mark.slow
def test_one_of_several_kernels_is_named_by_its_parameters():
    x = torch.ones(2)
    with pytest.raises(ValueError, match=re.escape('name one, "scale(float*, int)" or "scale(float*, float, float)"')):
        CudaKernel(FILE, "scale")
    CudaKernel(FILE, "scale(float*, int)")[1, 2](x, 3)
    assert x.tolist() == [3.0, 3.0]


@pytest.mark.slow
def test_trailing_arguments_with_a_default_may_be_left_out():
    kernel = CudaKernel(
        "__global__ void f(float* x, float by, float plus = -0.5f, const int* y = nullptr) { *x = by + plus; }", "f"
    )
    x = torch.zeros(1)
    kernel[1, 1](x, 2.0)
    assert x.item() == 1.5
    kernel[1, 1](x, 2.0, 1.0)
    assert x.item() == 3.0


@pytest.mark.slow
def test_a_macro_makes_kernels():
    x = torch.tensor([1, 2], dtype=torch.int32)
    CudaKernel(FILE, "add_int")[1, 2](x, 5)
    assert x.tolist() == [6, 7]


class Params(ctypes.Structure):
    _fields_ = (("factor", ctypes.c_float), ("offset", ctypes.c_double), ("bias", ctypes.c_void_p))


@pytest.mark.slow
def test_structs_vectors_and_enums_are_passed_by_value():
    x, bias = torch.ones(4), torch.tensor([0.0, 10.0, 20.0, 30.0])
    kernel = CudaKernel(FILE, "affine")
    kernel[1, 4](Params(2.0, 0.5, bias.data_ptr()), (1, 2, 3, 4), x, 1)  # -(1·2 + 0.5 + bias + lane)
    assert x.tolist() == [-3.5, -14.5, -25.5, -36.5]
    with pytest.raises(ValueError, match=r"params must be 24 bytes .declared `Params`., got 8"):
        kernel[1, 4](bytes(8), (1, 2, 3, 4), x, 1)
    with pytest.raises(TypeError, match=r"params must be a ctypes.Structure or bytes .declared `Params`., got dict"):
        kernel[1, 4]({"factor": 2.0}, (1, 2, 3, 4), x, 1)


def test_a_vector_by_value_is_as_many_numbers():
    rule = rule_for("f", Parameter("v", "uint2", False, False))
    assert bytes(rule((1, 2**32 - 1))) == b"\1\0\0\0\xff\xff\xff\xff"


def test_a_pointer_to_structs_takes_whole_structs_of_any_dtype():
    rule = rule_for("f", Parameter("p", "Particle", True, False, bytes=20, alignment=4))
    particles = torch.zeros(3, 5)
    assert rule(particles).address == particles.data_ptr()
    assert rule(particles.view(torch.uint8)[:, :20]).address == particles.data_ptr()
    with pytest.raises(
        ValueError, match=r"p must hold whole structs of 20 bytes .declared `Particle\*`., got 12 bytes"
    ):
        rule(torch.zeros(3))


@pytest.mark.slow
def test_a_pointer_to_pointers_takes_addresses():
    x = torch.zeros(2)
    kernel = CudaKernel("__global__ void f(float** rows, int n) { rows[n][1] = 7; }", "f")
    kernel[1, 1](torch.tensor([0, x.data_ptr()]), 1)
    assert x.tolist() == [0.0, 7.0]


@pytest.mark.slow
def test_the_architecture_is_that_of_an_h100():
    out = torch.zeros(1, dtype=torch.int32)
    CudaKernel(FILE, "arch")[1, 1](out)
    assert out.item() == 900


# ------------------------------------------------------------------------------------------------ variables


@pytest.mark.slow
def test_variables_are_set_and_read_and_the_same_in_every_mode():
    kernel, x, out = CudaKernel(FILE, "filter::convolve"), torch.arange(6.0), torch.zeros(4)
    taps = kernel.variable("filter::taps")
    assert (taps.dtype, taps.shape) == (torch.float32, (3,))
    taps.copy_(torch.tensor([1.0, 0.0, 50.0]))
    kernel[1, 4](x, out, 4)
    assert out.tolist() == [100.0, 100.0, 100.0, 100.0]  # 0 + 50·2, 1 + 50·3, … but at most 100
    kernel.variable("filter::bounds")[1] = 1000.0  # a float2: its lanes
    with check():
        kernel[1, 4](x, out, 4)
    assert out.tolist() == [100.0, 151.0, 202.0, 253.0]
    assert kernel.variable("filter::calls").item() == 2
    with pytest.raises(
        ValueError, match="no variable 'taps' that can be set: filter::taps, filter::calls, filter::bounds"
    ):
        kernel.variable("taps")


# ------------------------------------------------------------------------------------------------ what is not there


@pytest.mark.slow
def test_a_missing_header_stops_the_kernel_where_it_is_needed_and_names_itself():
    kernel, x = CudaKernel(FILE, "with_a_missing_header"), torch.ones(1)
    kernel[1, 1](x, 0)
    assert x.item() == 2
    with pytest.raises(Finding, match=r"line \d+ `Accumulator sum;|`x\[0\] = sum.add.*<nowhere/tensor.h>"):
        kernel[1, 1](x, 1)
    with pytest.raises(Finding, match=r".nowhere. .* may come from <nowhere/tensor.h> or <nowhere/block_reduce.cuh>"):
        kernel[1, 1](x, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "after", "message"),
    [
        ("always_needs_a_missing_header", "float* x) {", ".nowhere. .* which is missing"),
        ("mistyped", "float* x) {", "expected .;. before"),
        ("launches_another", "", "a kernel launches another .* runs on a GPU only"),
        ("reads_a_texture", "", "a texture runs on a GPU only"),
    ],
)
def test_what_can_never_run_is_an_error_with_file_and_line(name, after, message):
    lines = FILE.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, start=1) if f"void {name}(" in text) + bool(after)
    with pytest.raises(CompileError, match=rf"as_people_write_it\.cu:{line}:[ \d:]*error: {message}"):
        CudaKernel(FILE, name).compile()


# ------------------------------------------------------------------------------------------------ NVRTC


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduce<float>", "scale(float*, int)", "add_int", "affine", "filter::convolve"])
def test_nvrtc_gets_the_same_device_code(name):
    assert CudaKernel(FILE, name).resources("sm_80").registers > 0


@pytest.mark.slow
def test_nvrtcs_errors_have_the_files_lines():
    line = FILE.read_text().splitlines().index("    x[0] = 1.0f") + 2  # where the ; is missed
    with pytest.raises(CompileError, match=rf"as_people_write_it\.cu\({line}\): error: expected a"):
        CudaKernel(FILE, "mistyped").resources()
