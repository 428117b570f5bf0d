"""simt.h is read once for all kernels. A kernel that needs little of the standard library reads less of it."""

import numpy as np
import pytest

from cudascope import CudaKernel
from cudascope.toolchain.precompiled import without_std

KERNEL = "__global__ void twice(float* x) { x[threadIdx.x] = 2 * NUMBER; }"


@pytest.mark.parametrize(
    "include", ["", "#include <cuda_fp16.h>\n#include <mma.h>\n", '#include "cooperative_groups.h"\n']
)
def test_a_kernel_without_the_standard_library_reads_less(include):
    assert without_std(CudaKernel(include + KERNEL, "twice").source)


@pytest.mark.parametrize(
    ("before", "number"),
    [
        ("#include <string>\n", "1"),
        ("#include <sstream>\n#include <vector>\n#include <map>\n", "1"),
        ("#  include\\\n <iostream>\n", "1"),
        ("#define TEXT <chrono>\n#include TEXT\n", "1"),
        ('#include "mine.cuh"\n', "1"),
        ("inline int length(const std::string& text) { return text.size(); }\n", "1"),
        ("using namespace std;\ninline string text(chrono::seconds);\n", "1"),
        ("", "(std::string::npos > 1)"),
    ],
)
def test_a_kernel_that_may_use_the_standard_library_finds_all_of_it(before, number, tmp_path):
    (tmp_path / "mine.cuh").write_text("#include <iostream>\ninline void show() { std::cout << 1; }\n")
    (tmp_path / "twice.cu").write_text(before + KERNEL)
    kernel = CudaKernel(tmp_path / "twice.cu", "twice", defines=[f"NUMBER={number}"])
    assert not without_std(kernel.source)
    x = np.zeros(1, np.float32)
    kernel[1, 1](x)
    assert x[0] == 2
