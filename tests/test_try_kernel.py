"""`make try`: it knows every kernel, and it tells a right kernel from a wrong one.

PAGEWISE_FULL=1 takes each barrier and each wait out of the CUDA kernels, one at a time.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import try_kernel
from covering import is_full
from try_kernel import IN_CUDA, IN_TRITON, fault, kernels_of_files, main, try_in_cuda

from conftest import ROOT, cuda_kernels, needs_interpreter, triton_kernels
from pagewise.experiments.kernel_cases import Case
from pagewise.flash_attention import in_cuda as flash_cuda
from pagewise.paged_attention import in_cuda as paged_cuda

flat_gemm = importlib.import_module("pagewise.flash_decoding_plus_plus.flat_gemm")


def test_every_kernel_has_a_name_and_a_case():
    listed = kernels_of_files()
    of = {ending: {k for file, ks in listed.items() if file.endswith(ending) for k in ks} for ending in (".cu", ".py")}
    assert of[".cu"] == set(IN_CUDA) == {name.removesuffix("_kernel (CUDA)") for name in cuda_kernels()}
    assert of[".py"] == set(IN_TRITON) == {name.removesuffix("_kernel") for name in triton_kernels()}


def test_without_a_name_the_kernels_are_listed_by_file(capsys):
    assert main([]) == 0
    assert "flat_gemm.cu                   gemv flat_gemm\n" in capsys.readouterr().out


@pytest.mark.slow
def test_scripts_find_the_packages_of_this_checkout(tmp_path):
    """`tests/cudascope`, beside the scripts, has the name of a package. Two children share some imports."""
    code = """
import os, runpy, sys, jaxtyping, torch, triton
sys.path[0] = sys.argv[1]
for script in (["try_kernel.py"], ["repeat_launches.py", "--help"]):
    if os.fork() == 0:
        sys.argv = script
        runpy.run_path(f"{sys.path[0]}/{script[0]}", run_name="__main__")
        sys.exit()
    assert os.wait()[1] == 0, script
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code, str(ROOT / "tests")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "flat_gemm.cu" in done.stdout
    assert "--tokens" in done.stdout


def test_an_unknown_name_is_a_sentence(capsys):
    assert main(["flat_gem"]) == 2
    assert capsys.readouterr().err == "no kernel is called 'flat_gem': `make try` lists the names\n"


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("name", ["gemv", "online_softmax"])
def test_a_right_kernel_passes_and_shows_its_resources(name, capsys):
    assert main([name]) == 0
    *results, resources = capsys.readouterr().out.splitlines()[1:]
    assert [line.partition(": ")[2] for line in results][-1] == "right, no findings"
    assert resources.startswith("  sm_80: ")
    assert "0 bytes spilled" in resources


def test_a_wrong_result_is_named():
    x = torch.randn(2, 8)
    case = Case(lambda: (x + 1,), lambda dtype: (x.to(dtype),))
    assert fault(case.run(), case).startswith("result 0 is wrong: largest error")


def test_a_case_that_does_not_launch_its_kernel_fails(monkeypatch, capsys):
    case = Case(lambda: (torch.ones(1, 4),), lambda dtype: (torch.ones(1, 4, dtype=dtype),))
    monkeypatch.setitem(try_kernel.cuda_cases.CALLS, "gemv", lambda dtype: case)
    assert main(["gemv"]) == 1
    assert "right, no findings\n  the kernel was never launched" in capsys.readouterr().out


@pytest.mark.slow
def test_a_finding_fails(monkeypatch, capsys):
    """The kernel reads x after its end."""

    def case(dtype):
        x, w, out = torch.ones(1, 8), torch.ones(4, 8), torch.empty(1, 4)

        def run():
            kernel = flat_gemm.cuda_kernel(flat_gemm.SOURCE, "gemv_kernel", torch.float32, 1, 1)
            kernel[1, 128](out, x[:, :4].clone(), w, 1, 4, 8, 8, 8)
            return (out,)

        return Case(run, lambda dtype: (torch.full((1, 4), 8.0, dtype=dtype),))

    monkeypatch.setitem(try_kernel.cuda_cases.CALLS, "gemv", case)
    assert main(["gemv"]) == 1
    assert "past its end (4 elements)" in capsys.readouterr().out


# A barrier below an `if` is not among them: it only brings the lanes of a warp back together.
BARRIER = re.compile(r"^ *(?:__sync(?:threads|warp)\(\)|wait_for_copies<[^>]*>\(\));", re.MULTILINE)
BARRIERS = [
    (path.name, path.read_text().count("\n", 0, found.start()) + 1)
    for path in sorted((ROOT / "kernels").glob("*.cu"))
    for found in BARRIER.finditer(path.read_text())
]
HIDDEN_IN_ONE_TURN = ("flat_gemm.cu", 93)  # only a second turn of the loop overwrites what the threads read


@pytest.mark.slow
@pytest.mark.parametrize(("file", "line"), BARRIERS if is_full() else [HIDDEN_IN_ONE_TURN])
def test_a_kernel_without_one_of_its_barriers_is_found(file, line, tmp_path, monkeypatch):
    assert len(BARRIERS) > 12
    assert HIDDEN_IN_ONE_TURN in BARRIERS
    shutil.copytree(ROOT / "kernels", tmp_path, dirs_exist_ok=True)
    lines = (tmp_path / file).read_text().splitlines()
    lines[line - 1] = BARRIER.sub(";", lines[line - 1])
    (tmp_path / file).write_text("\n".join(lines))
    for module in (flat_gemm, flash_cuda, paged_cuda):
        for name in {"SOURCE", "GROUPED_SOURCE"} & set(dir(module)):
            monkeypatch.setattr(module, name, tmp_path / getattr(module, name).name)
    assert not all(map(try_in_cuda, kernels_of_files()[file]))
