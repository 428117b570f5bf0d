"""cudascope: CUDA C++ kernels on a CPU. Run them, observe them, check them; or run the same file on a GPU.

    from cudascope import CudaKernel, check, observe

    kernel = CudaKernel("scale.cu", "scale<float, 128>")
    kernel[grid, block](x, out, n)              # torch tensors, numpy arrays, or anything with DLPack
    with observe() as report:                   # counts and a trace, without a change to the kernel
        kernel[grid, block](x, out, n)
    with check(outputs=[out]):                  # raises a Finding that names line, thread, tensor and element
        kernel[grid, block](x, out, n)
    with reachable(table=t), check():           # pointers in a struct or in a table lead to t
        kernel[grid, block](pointers, n)

Each folder imports only what is below it in the table of README.md. Public are the names that this module exports,
gpus.py, and what the docstring of a folder names. Everything else may change. The package imports nothing of the
course. A GPU run needs torch; a run on the CPU needs numpy alone.
"""

from cudascope.arguments.reach import reachable
from cudascope.cpp.source import CompileError
from cudascope.kernels.cuda import CudaKernel
from cudascope.kernels.ptx import PtxKernel
from cudascope.watch.contexts import check, observe, schedule, time_limit
from cudascope.watch.findings import Finding
from cudascope.watch.report import Report

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    if name == "triton_compiled":  # imported when it is needed: few launches of Triton kernels need it
        from cudascope.triton.launches import triton_compiled

        return triton_compiled
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """Give the notebook `%%cuda`. `%load_ext cudascope` calls this function."""
    from cudascope.command.magic import load_ipython_extension

    load_ipython_extension(shell)
