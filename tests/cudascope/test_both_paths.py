"""What the CPU's path (g++) and the GPU's path (NVRTC) take and refuse: the same sources, as nvcc does.

The sources are in both_paths.cu. `python tests/cudascope/test_both_paths.py NVCC` asks nvcc itself about each of them,
with `--expt-relaxed-constexpr`, which lets device code call constexpr functions, as torch's extensions do. nvcc 13.0.88
agrees with the table. Of cuBLAS it needs the headers.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from covering import is_full

from cudascope import CompileError, CudaKernel

SOURCES = Path(__file__).with_name("both_paths.cu").read_text(encoding="utf-8")
PARTS = re.findall(r"^//// ([\w ]+): (.*)\n((?:(?!////).*\n)*)", SOURCES, re.MULTILINE)
INCLUDED_NOWHERE = "no header"
CPU_ALONE = ("cpu", "also cpu")
REFUSED = ("refused", "also refused")


def sources(*kinds: str) -> dict[str, str]:
    return {about: text for kind, about, text in PARTS if kind in kinds}


def names(headers: str) -> tuple[str, list[int]]:
    """A kernel that stores the value of each expression of a section, and the values."""
    rows = [line.rsplit(" == ", 1) for line in sources("names")[headers].splitlines() if line]
    includes = "".join(f"#include <{header}>\n" for header in headers.split() if headers != INCLUDED_NOWHERE)
    stores = "".join(f"    x[{i}] = {expression};\n" for i, (expression, _) in enumerate(rows))
    return f"{includes}__global__ void k(int* x) {{\n{stores}}}\n", [int(value) for _, value in rows]


def run(source: str, through: str) -> list[int]:
    x = np.zeros(16, np.int32)
    CudaKernel(source, "k", through=through)[1, 1](x)
    return x.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("through", ["c++", "ptx"])
@pytest.mark.parametrize("headers", sources("names"))
def test_both_take_the_names_of_a_header_and_they_mean_the_same(headers, through):
    source, expected = names(headers)
    assert run(source, through)[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("through", ["c++", "ptx"])
@pytest.mark.parametrize("source", sources("taken", "lenient").values(), ids=sources("taken", "lenient"))
def test_both_take_it(source, through):
    assert run(source, through)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("about", sources(*REFUSED[: 2 if is_full() else 1]))
def test_both_refuse_it(about):
    source, message = sources(*REFUSED)[about], about.partition(" | ")[2]
    with pytest.raises(CompileError) as refused:
        CudaKernel(source, "k").compile()
    assert message in str(refused.value)
    if "#include" not in source or is_full():  # CCCL's headers take NVRTC a second
        with pytest.raises(CompileError):
            CudaKernel(source, "k", through="ptx")


@pytest.mark.slow
@pytest.mark.parametrize("about", sources(*CPU_ALONE[: 2 if is_full() else 1]))
def test_nvrtc_alone_refuses_it(about):
    source = sources(*CPU_ALONE)[about]
    assert run(source, "c++")[0] == 1
    with pytest.raises(CompileError):
        CudaKernel(source, "k", through="ptx")


def refused_by_nvcc(nvcc: str, source: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "k.cu").write_text(source, encoding="utf-8")
        flags = ("-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_80", "-c", "k.cu", "-o", "k.o")
        return bool(subprocess.run([nvcc, *flags], cwd=folder, capture_output=True, check=False).returncode)


if __name__ == "__main__":
    for kind, about, text in PARTS:
        source = names(about)[0] if kind == "names" else text
        if refused_by_nvcc(sys.argv[1], source) != (kind in (*REFUSED, "lenient")):
            print(f"nvcc disagrees: {kind}: {about}")
