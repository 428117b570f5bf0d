"""The reader of CUDA C++: its lexer, the branches of #if that it takes, and the outline of a file."""

import functools

import numpy as np
import pytest

import cudascope.cpp.file
from cudascope import CompileError, CudaKernel, check
from cudascope.cpp.file import Statements, read
from cudascope.cpp.signature import read_signature
from cudascope.cpp.tokens import lexemes_of, partners, tokens_of


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a/*b*/c//d\n e", "a|c|e"),
        ("a //b \\\n c\n d", "a|d"),
        ("a\\\n = b", "a|=|b"),
        ("x = \"a//b\\\"\" + '\"' + '\\'';", "x|=|\"a//b\\\"\"|+|'\"'|+|'\\''|;"),
        ('s = R"(})" u8R"x(a)"b)x" R"(\n#if\n)" R;', 's|=|R"(})"|u8R"x(a)"b)x"|R"(\n#if\n)"|R|;'),
        ('PRIR"x" R("y")', 'PRIR|"x"|R|(|"y"|)'),
        ("1'000'000u 1.5e-3f .5 0x1p+4 x1 1-1", "1'000'000u|1.5e-3f|.5|0x1p+4|x1|1|-|1"),
        ("a::b->c ... a<=b >>= <<<1>>> a&&b||!c", "a|::|b|->|c|...|a|<=|b|>>=|<|<|<|1|>|>|>|a|&&|b||||!|c"),
        ("#define A \\\n b /* c\n d */ e\nf", "#define A \\\n b /* c\n d */ e|f"),
        ("  # if 0 // '\"\na\n/* */ #endif\nb", "# if 0 // '\"|a|#endif|b"),
        ("/*\n#if\n*/ a # b\n", "a|#|b"),
        ("#error don't \"\na", "#error don't \"|a"),
        ("don't\nb", "don|'|t|b"),
        ("\n\n  a\n\t\n  #x\n\n  b", "a|#x|b"),
        ("größe = ü", "größe|=|ü"),
    ],
)
def test_tokens_and_directives_are_found_in_their_places(text, tokens):
    found, places = lexemes_of(text)
    assert "|".join(found) == tokens
    assert all(text.startswith(token, place) for token, place in zip(found, places, strict=True))


def kernels(source: str, *defines: str) -> list[str]:
    """The kernels of `source` with the parameters of their templates and their own, without spaces."""
    return [
        f"{'::'.join((*each.namespace, each.function))}<{''.join(each.template or [])}>({''.join(each.parameters)})"
        for each in read(source, defines).kernels
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("#if 0\n__global__ void k(int n) { this is ( no code }\n#endif\n__global__ void k(long n) {}", ["k<>(longn)"]),
        ("#if 0\n__global__ void k(int n) {}\n#elif 1\n__global__ void k(long n) {}\n#else\n#endif", ["k<>(longn)"]),
        ("#if A(1)\nnamespace n {\n#endif\n__global__ void k(int n) {}\n#if A(1)\n}\n#endif\n__global__ void l();",
         ["n::k<>(intn)", "l<>()"]),
        ("#if A(1)\n__global__ void k(int n) {\n#else\n__global__ void k(long n) {\n#endif\n}\n__global__ void l();",
         ["k<>(intn)", "k<>(longn)", "l<>()"]),
        ("namespace n {\n#if 1\n__global__ void k(int n) {\n#else\n__global__ void k(long n) {\n#endif\n}\n"
         "__global__ void l(); }", ["n::k<>(intn)", "n::l<>()"]),
        ("namespace a { inline namespace b { namespace { __global__ void k(); } } struct S { int n; }; }\n"
         'namespace [[deprecated("x")]] c::d { extern "C" { __global__ void l(); } } __global__ void m();',
         ["a::b::k<>()", "c::d::l<>()", "m<>()"]),
        ("TUNED(T) __global__ void k(); template <class T> TUNED(T) __global__ void l(T n) {}",
         ["k<>()", "l<classT>(Tn)"]),
        ("__global__ void __launch_bounds__(N) k(int n); __global__ void __attribute__((x(1))) l() {}",
         ["k<>(intn)", "l<>()"]),
        ("template <int N, bool B = (N < 4)> __global__ void k(A<N> a, B<C<N>> b) {}",
         ["k<intN,boolB=(N<4)>(A<N>a,B<C<N>>b)"]),
        ("template <int N, bool B = N <= 4, class T = V<N>> __global__ void k(T a) {}",
         ["k<intN,boolB=N<=4,classT=V<N>>(Ta)"]),
        ("template <class T> __global__ void k(T n) {} template <> __global__ void k<int>(int n) {}\n"
         "template __global__ void k<long>(long);", ["k<classT>(Tn)"]),
        ('const char* s = R"(__global__ void no() {)"; /* __global__ void no(); */ __global__ void k();', ["k<>()"]),
        ("int main() { k<<<dim3(1), 2>>>(x); return a < b; } __global__ void k();", ["k<>()"]),
        ("__global__ void k(\\\n int\\\n n);", ["k<>(intn)"]),
        ('extern "C" void __global__ k(void) { } template <class T> static __global__ void l(T n) { }',
         ["k<>(void)", "l<classT>(Tn)"]),
        ("X", []),
        ("using", []),
    ],
)  # fmt: skip
def test_kernels_are_found_with_their_namespaces_and_parameters(source, found):
    assert kernels(source) == found


@pytest.mark.parametrize(
    ("source", "names", "is_function"),
    [
        ("__device__ int n = f(2), m{3};", "n m", False),
        ("constexpr auto f = [](int x) { return x; };", "f", False),
        ("constexpr int a[2] = {f(1), g<2>(3)};", "a", False),
        ("__device__ float (*f)(float) = g;", "f", False),
        ("__device__ V V::operator+(V other) { return other; }", "V", True),
        ("__device__ n::V<int> n::W<int>::operator()(int i) const { return i; }", "W", True),
        ("__device__ V operator+(V a, V b) { return a; }", "operator", True),
        ("template <class T> __device__ auto f(T x) -> decltype(g(x)) { return g(x); }", "f", True),
        ("__device__ S<int>::S(int n) : a(n), b{n} { f(); }", "S", True),
    ],
)
def test_a_declaration_is_a_function_or_a_variable_with_its_names(source, names, is_function):
    piece, rest = read(f"{source} int rest;").pieces
    assert (piece.is_function, piece.is_variable) == (is_function, not is_function)
    assert piece.names >= set(names.split())  # and perhaps others, which keeps too much
    assert rest.names == {"rest"}


@pytest.mark.parametrize(
    ("statement", "reached"),
    [
        ("x = 1;", True),
        ("if (a) x = 1;", False),
        ("if (a) b(); else x = 1;", False),
        ("if constexpr (a) { b(); } else if (c) { d(); x = 1; }", False),
        ("for (int i = 0; i < n; ++i) { b(); x = 1; }", False),
        ("do x = 1; while (a);", False),
        ("switch (a) { case 1: b(); default: x = 1; }", False),
        ("if (a) { b(); } else c(); x = 1;", True),
        ("while (a) b(); x = 1;", True),
    ],
)
def test_the_smallest_statement_round_a_token_is_found(statement, reached):
    tokens = tokens_of(f"{{ a(); {statement} b(); }}")
    statements = Statements(tokens, partners(tokens))
    start, end = statements.around(0, tokens.index("x"))
    assert tokens[start:end] == ["x", "=", "1", ";"]
    assert statements.is_always_reached(0, start) == reached


def test_the_condition_of_a_do_belongs_to_its_statement():
    tokens = tokens_of("{ a(); do b(); while (x); c(); }")
    start, end = Statements(tokens, partners(tokens)).around(0, tokens.index("x"))
    assert "".join(tokens[start:end]) == "dob();while(x);"


@pytest.mark.parametrize(
    ("before", "ctype"),
    [
        ("#define T long // int\n", "long"),
        ("#define T \\\n long\n", "long"),
        ("typedef long T;\n", "long"),
        ("using A = long; typedef A T;\n", "long"),
        ("namespace n { using T = long; } using namespace n;\n", "long"),
        ("using T = long; /* using T = int; */ // typedef int T;\n", "long"),
        ('const char* url = "https://no comment"; using T = long;\n', "long"),
        ('extern "C" { typedef long T; }\n', "long"),
        ("/* */ #define T long\n", "long"),
        ("#define T() long\ntypedef int T;\n", "int"),
        ("typedef struct { int x; } T;\n", "T"),
        ("template <class> using T = int;\n", "T"),
        ("#define A 1\n#undef A\n#ifdef A\nusing T = int;\n#else\nusing T = long;\n#endif\n", "long"),
        ("#if 0\n#define T int\n#endif\nusing T = long;\n", "long"),
        ("#if 1 && !defined(A) || 0\nusing T = int;\n#else\nusing T = long;\n#endif\n", "int"),
        ("namespace n { struct S { using T = int; }; } using T = long; void f() { using T = int; }\n", "long"),
        ("template <class T = int> constexpr int N = 3;\nusing T = long;\n", "long"),
        ("#ifndef N\n#define N 1\n#endif\n#if N == 1\nusing T = int;\n#else\nusing T = long;\n#endif\n", "int"),
        (
            "#ifndef N\n#define N 1\n#endif\n#if N == 1\nusing T = int;\n#else\nusing T = long;\n#endif\n#define N 2\n",
            "T",
        ),
        ("#ifdef N\nusing T = int;\n#else\nusing T = long;\n#endif\n#define N\n", "T"),
    ],
)
def test_a_name_means_what_the_live_text_says(before, ctype):
    parameters = read_signature(read(f"{before}__global__ void k(T x, T* y);"), "k").parameters
    assert [each.ctype for each in parameters] == [ctype, ctype]


def test_the_command_line_does_not_override_a_definition_of_the_file():
    assert read("#define T long\n", ("T=int", "U=int")).named == {"T": ["long"], "U": ["int"]}


def test_kernels_of_headers_of_templates_and_of_branches_that_cannot_be_told_are_not_plain():
    header = "__global__ void a() {}\n"
    source = """#ifndef GUARD
        #define GUARD
        template <class T> __global__ void t(T* x) { }
        extern "C" __global__ void __launch_bounds__(128) b(float* x) { if (x) { } }
        namespace n { __global__ void m() {} }
        #if A(1)
        __global__ void c() {}
        #endif
        static __global__ void d(int n) {}
        __global__ void declared();
        #endif"""
    assert read(header + source, (), len(header)).plain_kernels == ["b", "d"]


def test_an_if_among_the_parameters_is_left_to_the_preprocessor():
    source = (
        "__global__ void k(float* x,\n#if __CUDA_ARCH__ < 800\nint n,\n#else\nlong n,\n#endif\nfloat y) { *x = y + n; }"
    )
    with pytest.raises(ValueError, match="kernel k: an #if among its parameters cannot be told"):
        read_signature(read(source), "k")
    x = np.zeros(1, np.float32)
    kernel = CudaKernel(source, "k")
    assert [each.ctype for each in kernel.parameters] == ["float", "long", "float"]
    kernel[1, 1](x, 2, 3.0)
    assert x == 5


def test_a_kernel_with_a_struct_compiles_nothing_before_its_launch(monkeypatch):
    source = "struct S { int a; };\n__global__ void k(S s, int n) {}"
    with monkeypatch.context() as nowhere:
        nowhere.setenv("PATH", "")
        nowhere.delenv("CXX", raising=False)
        kernel = CudaKernel(source, "k")
        with pytest.raises(ValueError, match="the source has no kernel 'l'; it has k"):
            CudaKernel(source, "l")
        with pytest.raises(CompileError, match=r"needs a C\+\+ compiler"):
            kernel[1, 1](bytes(4), 1)
    assert kernel.parameters[0].bytes == 4


def test_a_source_is_read_once(monkeypatch):
    source = "__device__ int calls;\n__global__ void k(long* x) { x[threadIdx.x] = 7; }"
    texts = []

    @functools.wraps(lexemes_of)
    def counted(text):
        texts.append(text)
        return lexemes_of(text)

    monkeypatch.setattr(cudascope.cpp.file, "lexemes_of", counted)
    kernel, x = CudaKernel(source, "k"), np.zeros(1, np.int64)
    kernel[1, 1](x)
    with check():
        kernel[1, 1](x)
    CudaKernel(source, "k")
    assert texts == [source]
