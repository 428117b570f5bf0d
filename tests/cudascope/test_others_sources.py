"""Constructs of other people's sources: each of them runs, or a sentence says why it does not."""

import re

import numpy as np
import pytest

from cudascope import CompileError, CudaKernel, Finding

pytestmark = pytest.mark.slow  # a build of large headers
HOST = "\nvoid host() { k<<<1, 1>>>(0); }\n"  # no compiler takes it: only what the kernel needs is compiled


def run(source: str, name: str = "k", *arguments: object, dtype: str = "int64") -> list:
    x = np.zeros(12, dtype=dtype)
    CudaKernel(f"{source}\n", name)[1, 1](x, *arguments)
    return x.tolist()


RUNS = {  # the source, and x[0], x[1], … after the launch
    "words that a file defines if nobody has": (
        "#ifndef __NVCC__\n#error nvcc is wanted\n#endif\n"
        "#ifndef __host__\n#define __host__\n#define __device__\n#define __global__\n#define __launch_bounds__(n)\n"
        "#endif\nstruct S { int a; __host__ __device__ S(int v) : a(v) {} __device__ int get() { return a; } };\n"
        "__global__ __launch_bounds__(32) void k(long* x) { x[0] = S(7).get(); }",
        [7],
    ),
    "umin, llmin and ullmin": (
        "__global__ void k(long* x) {\n    x[0] = umin(~0u, 4u) + (long)umax(1u, ~0u);\n"
        "    x[1] = llmin(-1ll, 2ll) + llmax(-1ll, 9ll), x[2] = ullmin(~0ull, 2ull) + ullmax(5ull, 4ull);\n}",
        [4 + 2**32 - 1, 8, 7],
    ),
    "a member and a local warpSize, and cuda_device_runtime_api.h": (
        "#include <cuda_device_runtime_api.h>\n"
        "struct P { int warpSize; };\n__device__ int f(int warpSize) { return warpSize; }\n"
        "__device__ long local() { const int warpSize = 33; return warpSize; }\n"
        "__global__ void k(long* x) { P p{3}; x[0] = warpSize + p.warpSize + f(5), x[1] = local(); }",
        [40, 33],
    ),
    "things of its own with the names of a thread's indices": (
        "struct P { int gridDim; float threadIdx; dim3 blockDim; };\n"
        "struct Grid {\n    dim3 blockDim;\n"
        "    __device__ unsigned threads() const { return blockDim.x * blockDim.y; }\n};\n"
        "__device__ unsigned f(dim3 blockDim) { return blockDim.x; }\n"
        "__device__ unsigned g(const uint3& threadIdx, float warpSize) { return threadIdx.x + warpSize; }\n"
        "template <int warpSize>\n__device__ int h() { return warpSize; }\n"
        "__global__ void k(long* x) {\n    P p{3, 0.5f, dim3(7)};\n    const dim3 gridDim(11, 12);\n"
        "    x[0] = p.gridDim, x[1] = p.threadIdx * 2, x[2] = p.blockDim.x, x[3] = gridDim.y;\n"
        "    x[4] = Grid{dim3(3, 4)}.threads(), x[5] = f(dim3(5)), x[6] = f(blockDim), x[7] = g(threadIdx, 1);\n"
        "    x[8] = h<5>();\n    int blockIdx = 9;\n    x[9] = blockIdx;\n}",
        [3, 1, 7, 12, 12, 5, 1, 1, 5, 9],
    ),
    "a global warpSize": ("constexpr int warpSize = 32;\n__global__ void k(long* x) { x[0] = warpSize; }", [32]),
    "an array of arrays and a typedef of uint64_t": (
        "typedef unsigned long long uint64_t;\nusing int64_t = long long;\ntypedef signed char int8_t;\n"
        "__global__ void k(int64_t (*__restrict__ x)[2]) {\n"
        "    x[1][1] = 7, x[1][0] = 1, atomicAdd((unsigned long long*)x, uint64_t(7));\n}",
        [7, 0, 1, 7],
    ),
    "typedef for NVRTC alone": (
        "#ifdef __CUDACC_RTC__\ntypedef unsigned long long uint64_t;\n#else\n#include <cstdint>\n#endif\n"
        "__global__ void k(long* x) { std::uint64_t y = 7; uint64_t z = y; x[0] = z; }",
        [7],
    ),
}


@pytest.mark.parametrize("host", ["", HOST], ids=["whole", "cut"])
@pytest.mark.parametrize(("source", "expected"), RUNS.values(), ids=RUNS)
def test_it_runs(source, expected, host):
    assert run(source + host)[: len(expected)] == expected


CUT_FILL = HOST.replace("k<", "fill<")


@pytest.mark.parametrize(
    ("name", "host"),
    [("fill", ""), ("fill(long*)", ""), ("::fill", ""), ("fill(long*)", CUT_FILL), ("::fill", CUT_FILL)],
)
def test_a_kernel_with_the_name_of_a_function_of_std_is_found(name, host):
    source = f"#include <algorithm>\nusing namespace std;\n__global__ void fill(long* x) {{ x[0] = 7; }}{host}"
    assert run(source, name)[0] == 7


VARIADIC = """
template <int N, class... T>
__global__ void pointers(long* x, const T*... t) { x[0] = N, ((x[0] += t[0]), ...), x[1] = sizeof...(T); }
template <class... T>
__global__ void values(double* x, T... t) { x[0] = (0. + ... + t); }
template <int... N>
__global__ void numbers(long* x, int n) { x[0] = (n + ... + N); }
"""


def test_a_pack_of_parameters_has_one_for_each_argument_of_the_template():
    source, cut = VARIADIC, VARIADIC + HOST.replace("k<", "values<")
    four, half = np.array([4], dtype=np.int32), np.array([8], dtype=np.uint8)
    assert run(source, "pointers<3, int, unsigned char>", four, half)[:2] == [15, 2]
    assert run(cut, "pointers<3>")[:2] == [3, 0]
    assert run(cut, "values<int, double>", 3, 2.5, dtype="float64")[0] == 5.5
    assert run(source, "values<>", dtype="float64")[0] == 0
    assert run(source, "numbers<1, 2, 3>", 4)[0] == 10
    kernel = CudaKernel(source, "pointers<3, int, unsigned char>")
    assert [(each.name, each.ctype) for each in kernel.parameters[1:]] == [("t0", "int"), ("t1", "unsigned char")]


TEMPLATE = "template <class T, int N>\n__global__ void k(T* x) { x[0] = N; }"
REFUSED = {
    "a kernel that is declared only": ("__global__ void k(long* x);", "k", r"k\(long\*\) is declared and has no body"),
    "a function that is declared only": (
        "namespace { __device__ int f(int); }\n__global__ void k(long* x) { x[0] = f(1); }",
        "k",
        r"\(anonymous namespace\)::f\(int\) is declared and has no body",
    ),
    "a type for a value": (TEMPLATE, "k<long, long>", "there is no kernel 'k<long, long>': its template arguments"),
    "an unknown name": (TEMPLATE, "k<long, M>", "there is no kernel 'k<long, M>': ‘M’ was not declared"),
    "an unknown name, and a missing header": (
        f"#include <lacks/this.h>\n{TEMPLATE}",
        "k<long, M>",
        "the kernel's name: error: ‘M’ was not declared in this scope: it may come from <lacks/this.h>",
    ),
    "a name that the stand-in for cub lacks": (
        "#include <cub/cub.cuh>\n__global__ void k(long* x) {\n"
        "    using Shuffle = cub::BlockShuffle<float, 32>;\n    __shared__ typename Shuffle::TempStorage storage;\n}",
        "k",
        r"k.cu:3: error: cudascope has a stand-in of its own for cub, and BlockShuffle is not in it",
    ),
    "a part of cuRAND": (
        "#include <curand_kernel.h>\n__global__ void k(long* x) {\n    curandState s;\n"
        "    x[0] = curand_poisson(&s, 3.0);\n}",
        "k",
        "k.cu:4: error: curand_poisson is not in cudascope's cuRAND, which has XORWOW",
    ),
    "a part of torch": (
        "#include <ATen/ATen.h>\n__global__ void k(long* x) { x[0] = at::native::make_offsets(3); }",
        "k",
        "k.cu:2: error: ‘make_offsets’ .* cudascope has the device side of torch's headers, and this name is not in it",
    ),
    "a part of thrust": (
        "#include <thrust/sort.h>\n__global__ void k(long* x) { thrust::sort(thrust::seq, x, x + 4); }",
        "k",
        "k.cu:2: error: .*thrust.* from <thrust/sort.h>.* cudascope has parts of thrust",
    ),
    "CUTLASS": (
        "#include <cutlass/array.h>\n__global__ void k(long* x) { x[0] = cutlass::Array<long, 2>()[0]; }",
        "k",
        "k.cu:2: error: ‘cutlass’ .* cudascope does not run CUTLASS",
    ),
    "a kernel that waits for kernels": (
        "__global__ void k(long* x) { cudaDeviceSynchronize(); }",
        "k",
        "k.cu:1: error: cudaDeviceSynchronize in a kernel runs on a GPU only",
    ),
    "an #error about a name": (
        "#ifndef TILE\n#error how large?\n#endif\n__global__ void k(long* x) { x[0] = TILE; }",
        "k",
        r'^k.cu:2: error: #error how large\?: define TILE, as in defines=\["TILE=1"\] or --define TILE=1$',
    ),
    "an #error after other choices": (
        "#ifdef A\n#endif\n#if defined(B)\n#elif C > 2 && !defined(B)\n#else\n#  error choose\n#endif\n"
        "__global__ void k(long* x) {}",
        "k",
        r"k.cu:6: error: #error choose: define B or C, as in",
    ),
    "a kernel that the preprocessor takes away": (
        "#if __CUDA_ARCH__ < 800\n__global__ void k(long* x) {}\n#endif",
        "k",
        "kernel k is not there after the preprocessor",
    ),
    "an error of the kernel itself": (
        "template <int N>\n__global__ void k(long* x) { x[0] = y; }",
        "k<3>",
        r"k.cu:2:\d+: error: ‘y’ was not declared",
    ),
    "a mistake in a call, which is not a fault of the header": (
        "#include <cub/cub.cuh>\n__global__ void k(long* x) {\n    using Reduce = cub::WarpReduce<float>;\n"
        "    __shared__ typename Reduce::TempStorage t;\n    x[0] = Reduce(t).Sum();\n}",
        "k",
        r"^g\+\+ cannot compile .*\n(.*\n)?k.cu:5:\d+: error: no matching function",
    ),
    "a mistake in a call of a function of torch": (
        "#include <THC/THCAtomics.cuh>\nstruct S {};\n__global__ void k(long* x) {\n    gpuAtomicAdd(x, S{});\n}",
        "k",
        ":4:17: error: no matching function",
    ),
    "a thread block cluster": (
        "#include <cooperative_groups.h>\n__global__ void __cluster_dims__(2) k(long* x) {\n"
        "    x[0] = cooperative_groups::this_cluster().block_rank();\n}",
        "k",
        "k.cu:3: error: a thread block cluster runs on a GPU only",
    ),
}


@pytest.mark.parametrize(("source", "name", "sentence"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_with_a_sentence_and_no_word_of_the_runners_own(source, name, sentence):
    with pytest.raises(CompileError, match=sentence) as raised:
        run(source, name)
    assert not re.search("simt|stand_ins", str(raised.value))


def test_a_header_in_a_folder_whose_name_has_a_space_is_not_missing(tmp_path):
    (tmp_path / "a $b#").mkdir()
    (tmp_path / "a $b#" / "mine.h").write_text("")
    source = f'#include "{tmp_path}/a $b#/mine.h"\n#include <lacks.h>\n__global__ void k(long* x) {{ x[0] = M(1); }}'
    with pytest.raises(CompileError, match=r"‘M’ was not declared in this scope: it may come from <lacks.h>, which is"):
        run(source)


def test_a_header_that_the_compiler_refuses_is_named_with_the_line_that_includes_it(tmp_path):
    (tmp_path / "library.h").write_text("__device__ int f() { return nothing; }\n")
    kernel = CudaKernel(
        "\n#include <library.h>\n__global__ void k(long* x) { x[0] = f(); }", "k", options=[f"-I{tmp_path}"]
    )
    with pytest.raises(CompileError, match=rf"^k.cu:2: error: this line includes {tmp_path}/library.h, which"):
        kernel.compile()


def test_an_error_in_an_included_file_is_told_from_its_guard(tmp_path):
    (tmp_path / "tile.h").write_text("#ifndef TILE_H\n#define TILE_H\n#if TILE < 2\n#error small\n#endif\n#endif\n")
    kernel = CudaKernel('#include "tile.h"\n__global__ void k(long* x) {}', "k", options=[f"-I{tmp_path}"])
    with pytest.raises(CompileError, match=rf"^{tmp_path}/tile.h:4: error: #error small: define TILE, as in"):
        kernel.compile()


CAST = """
template <class T> struct Cast { template <int N> __device__ static T times(T x) { return N * x; } };
template <class T> __device__ T three_times(T x) { return Cast<T>::times<3>(x); }
__global__ void k(long* x) { x[0] = three_times(7l); }
"""


@pytest.mark.parametrize("host", ["", HOST], ids=["whole", "cut"])
def test_the_word_template_may_be_missing_as_nvcc_allows(host):
    assert run(CAST + host)[0] == 21


@pytest.mark.parametrize(("include", "host"), [("assert.h", ""), ("cassert", "int main() { round_it<<<1, 1>>>(0); }")])
def test_ndebug_switches_assertions_off(include, host):
    kernel = f"#include <{include}>\n__global__ void round_it(int* x) {{ assert(x[0] == 5); x[0] = 7; }}\n{host}"
    x = np.zeros(1, np.int32)
    CudaKernel("#define NDEBUG\n" + kernel, "round_it")[1, 1](x)
    assert x[0] == 7
    with pytest.raises(Finding, match=r"assertion failed: x\[0\] == 5"):
        CudaKernel(kernel, "round_it")[1, 1](x)
