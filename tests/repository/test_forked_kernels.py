"""The kernels in which `make test` runs the lessons begin as any kernel does, but for the modules that they share."""

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("jupyter_client", reason="the lessons are run with the extra `test`")

import forked_kernels
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import local_provisioner

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kernels are forked")

CELL = """
import os, sys
print(sorted({"torch", "matplotlib", "pagewise", "cudascope", "triton"} & {*sys.modules}))
print(os.getcwd(), os.environ["GIVEN"], os.environ["MPLBACKEND"], os.getpgid(0) == os.getpid())
print([folder for folder in sys.path if folder.endswith(("tests", "repository"))], "mine" in dir())
mine = 1
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """A function that starts a kernel, and returns it and a function that runs a cell and returns what that prints."""
    monkeypatch.setattr(local_provisioner, "launch_kernel", None)
    monkeypatch.setattr(forked_kernels, "IMPORTED", ("ipykernel.kernelapp",))  # torch takes seconds
    monkeypatch.setenv("GIVEN", "of the test")
    ends, kernels = [], []
    forked_kernels.pytest_configure(SimpleNamespace(add_cleanup=ends.append))

    def start():
        kernel = KernelManager(kernel_name="python3")
        kernel.start_kernel(cwd=tmp_path)
        kernels.append(kernel)
        client = kernel.client()
        client.start_channels()
        ends.append(client.stop_channels)

        def run(cell):
            printed = []
            hook = lambda message: printed.append(message["content"].get("text", ""))  # noqa: E731
            client.execute_interactive(cell, timeout=60, output_hook=hook)
            return "".join(printed)

        client.wait_for_ready(timeout=60)
        return kernel, run

    yield start
    for kernel in kernels:
        kernel.shutdown_kernel(now=True)
    for end in reversed(ends):
        end()


@pytest.mark.slow
def test_each_kernel_begins_with_nothing_of_this_repository_and_of_the_kernel_before(started, tmp_path):
    backend = "module://matplotlib_inline.backend_inline"
    for _ in range(2):
        kernel, run = started()
        assert run(CELL) == f"[]\n{tmp_path} of the test {backend} True\n[] False\n"
        process = kernel.provisioner.process
        assert process.poll() is None
        kernel.shutdown_kernel(now=True)
        assert process.poll() == 0
