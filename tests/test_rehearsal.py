"""A part of `make rehearse` that covers each kernel and each way to launch: the GPU paths without a GPU."""

import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT, all_kernels

pytestmark = pytest.mark.slow

CUDA_TESTS = "same_object or without_tensors or torchs_current_stream or 48_kb or compiler_saw"
PART = ["tests/rehearsal/checks.py", "tests/cudascope/test_kernel.py", "-k", f"checks or {CUDA_TESTS}"]


def test_the_gpu_paths_are_rehearsed():
    """Run the part on a machine whose GPU is a stand-in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTEST"))}
    environment |= {"PYTEST_PLUGINS": "rehearsal.plugin", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    environment |= {"STUB_CC": "9.0"}
    # these plugins have nothing to do here, and it takes seconds to import them
    without = ("cacheprovider", "nbval", "hypothesispytest", "anyio")
    options = ["-q", "--tb=short", *(f"-pno:{name}" for name in without)]
    command = [sys.executable, "-m", "pytest", *options, *PART]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    launches = re.search(
        r"for sm_90: (\d+) CUDA and (\d+) Triton launches .*, (\d+) of them executed as PTX", done.stdout
    )
    assert all(int(count) >= least for count, least in zip(launches.groups(), (5, 10, 3), strict=True))
    ran = re.search(r"kernels executed \(compiled\): (.*)", done.stdout)[1]
    assert [name for name in all_kernels() if name not in ran] == []
