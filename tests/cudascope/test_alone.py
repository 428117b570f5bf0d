"""cudascope without torch and without the course: the package and its command line need numpy alone."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from covering import in_turns

from cudascope import CompileError, CudaKernel, Finding, check, observe
from cudascope.toolchain.headers import nvidia_folders, nvidia_headers

FOLDER = Path(__file__).parent
BLOCKED = "import sys; sys.modules.update(torch=None, pagewise=None, triton=None); "
SCALE = "__global__ void scale(const float* x, float* out, float a) { out[threadIdx.x] = a * x[threadIdx.x]; }"


def alone(code, **environment):
    """Run code in a process that can import neither torch nor the course. Return what it prints."""
    command = [sys.executable, "-c", BLOCKED + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_import_brings_in_none_of_the_large_packages_and_sets_nothing():
    large = {"torch", "pagewise", "triton", "cuda", "IPython"}
    code = (
        "import os, sys; before = dict(os.environ); import cudascope, cudascope.pytest; "
        f"print(dict(os.environ) == before, {large} & sys.modules.keys()); import cudascope.command.magic"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "True set()\n"


@pytest.mark.slow
def test_the_command_line_needs_no_torch():
    file = str(FOLDER / "vector_add.cu")
    launch = [file, "vector_add", "--block", "64", "--scalar", "n=64"]
    launch += [word for each in ("a", "b", "out") for word in ("--tensor", f"{each}=float32[64]")]
    commands = [["list", file], ["observe", *launch], ["check", *launch]]
    told = alone(f"from cudascope.command.line import main; print([main(words) for words in {commands}])")
    assert all(shown in told for shown in ("vector_add4", "read global", "no findings in 1 schedule", "[0, 0, 0]"))


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_an_installed_toolkit_has_the_headers_where_no_wheel_of_nvidia_is(variable, tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").touch()
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": tmp_path / "empty"})
    monkeypatch.setattr(sys, "path", [])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if not Path("/usr/local/cuda/include/cuda_fp16.h").exists():
        with pytest.raises(CompileError, match=r"pip install nvidia-cuda-runtime, or 'cudascope\[cuda\]'"):
            nvidia_folders.__wrapped__()
    monkeypatch.setenv(variable, str(tmp_path))
    assert nvidia_folders.__wrapped__()[0] == tmp_path / "include"


APART = {  # what a source includes of a wheel of its own
    "cccl": "#include <cuda_fp16.h>\n__global__ void k(float* x) { *x = std::max(*x, __half2float(__half(1))); }",
    "crt": "#include <mma.h>\n__global__ void k(int* x) { *x = int(sizeof(nvcuda::wmma::layout_t)); }",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [*in_turns(APART, ["toolkit/include", "user/nvidia/cu13/include"]), *((name, None) for name in APART)],
)
def test_headers_may_be_in_another_folder_than_those_of_the_runtime(name, place, tmp_path):
    runtime = tmp_path / "site" / "nvidia" / "cu13" / "include"
    there = tmp_path / (place or "nowhere")
    for folder in (runtime, there):
        folder.mkdir(parents=True)
    for path in nvidia_headers().iterdir():
        ((there if path.name == name else runtime) / path.name).symlink_to(path)
    code = f"""
import sys, sysconfig
from cuda import pathfinder
pathfinder.find_nvidia_header_directory = lambda name: {str(runtime)!r}
sysconfig.get_paths = lambda: {{"purelib": {str(tmp_path / "site")!r}}}
from cudascope.toolchain import headers, nvrtc
from cudascope.cpp.source import CompileError, Source
sys.path = [{str(tmp_path / "user")!r}, *(path for path in sys.path if "site-packages" not in path)]
every = headers._folders_of_nvidia
headers._folders_of_nvidia = lambda: (folder for folder in every() if "/usr/local/" not in str(folder))
try:
    nvrtc.compile_cubin(Source({APART[name]!r}, "k.cu", headers.Path({str(tmp_path)!r}), (), ()), "k", "sm_90")
    print("compiled")
except CompileError as error:
    print(error)
"""
    told = alone(code, CUDA_HOME=str(tmp_path / "toolkit"), CUDASCOPE_CACHE=str(tmp_path / "cache"))
    assert ("compiled" if place else f"that are not there: pip install nvidia-cuda-{name}") in told


@pytest.mark.slow
def test_sources_are_utf_8_in_every_locale(tmp_path):
    (tmp_path / "scale.cu").write_text(f"// α·x\n{SCALE}", encoding="utf-8")
    words = ["check", str(tmp_path / "scale.cu"), "scale", "--block", "64", "--scalar", "a=2"]
    words += [word for each in ("x", "out") for word in ("--tensor", f"{each}=float32[64]")]
    code = f"from cudascope.command.line import main; main({words})"
    assert "no findings in 1 schedule" in alone(code, LC_ALL="C", PYTHONUTF8="0")


@pytest.mark.slow
def test_a_kernel_takes_numpy_arrays_without_torch():
    code = f"""
import numpy as np
from cudascope import CudaKernel, check
x, out = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
scale = CudaKernel({SCALE!r}, "scale")
with check(outputs=[out]) as report:
    scale[1, 8](x, out, 2)
print(out.tolist() == (2 * x).tolist(), len(report.unwritten(out)))
weights = "__constant__ float w[4]; __global__ void k(float* out) {{ out[threadIdx.x] = w[threadIdx.x]; }}"
kernel = CudaKernel(weights, "k")
w = kernel.variable("w")
w[:] = [1, 2, 3, 4]
kernel[1, 4](out)
print(type(w).__name__, out[:4].tolist())
"""
    assert alone(code) == "True 0\nndarray [1.0, 2.0, 3.0, 4.0]\n"


@pytest.mark.slow
def test_strided_numpy_arrays_and_dlpack_objects_are_used_in_place():
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    x, out = np.arange(16, dtype=np.float32), np.zeros((4, 8), np.float32)
    CudaKernel(SCALE, "scale")[1, 4](Foreign(x), out[2:, 4:], 3)
    assert out[2, 4:].tolist() == [0, 3, 6, 9]
    assert out.sum() == 18


@pytest.mark.slow
def test_a_finding_names_the_element_of_a_numpy_array():
    x, out = np.ones(4, np.float32), np.ones((2, 3), np.float32)
    with pytest.raises(Finding, match=r"reads x\[4\], past its end \(4 elements\)"), check():
        CudaKernel(SCALE, "scale")[1, 6](x, out, 1)


@pytest.mark.slow
def test_read_only_memory_is_taken_where_the_kernel_only_reads():
    x, out = np.ones(4, np.float32), np.ones(4, np.float32)
    x.flags.writeable = False
    with observe() as report:
        CudaKernel(SCALE, "scale")[1, 4](x, out, 1)
    assert report.count("write", "global").lanes == 4
