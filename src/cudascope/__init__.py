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

    kernel, arguments, arrays, values, types, limits    launches: kernels, arguments and limits
    tokens, conditions, outline, file           a source read once: its tokens, live branches, declarations, kernels
    reading, signature, parameters, variables   the parameters of a kernel and the variables of its file
    device_code, statements                     the part of a source that a kernel needs
    build, nvrtc, gpu                           compiled for a GPU and launched there
    gpus, least_time, ptxas                     the figures of GPUs, and the least time of an observed launch
    ptx_kernel, ptx_module, ptx_places          an entry of a PTX file, executed on the CPU
    through_ptx                                 NVRTC's PTX of a CUDA kernel, executed on the CPU
    simt                                        the same source on the CPU
    command_line, given, outputs                the command `cudascope`
    pytest                                      the plugin for tests
    reach                                       memory besides the arguments
    triton_launches, triton_compiler, triton_source, triton_worker, triton_arguments
                                                Triton kernels compiled for a GPU, executed on the CPU

The package imports nothing of the course. A GPU run needs torch; a run on the CPU needs numpy alone.
"""

from cudascope.build import CompileError
from cudascope.kernel import CudaKernel
from cudascope.ptx_kernel import PtxKernel
from cudascope.reach import reachable
from cudascope.simt.contexts import check, observe, schedule, time_limit
from cudascope.simt.errors import Finding
from cudascope.simt.report import Report


def __getattr__(name: str) -> object:
    if name == "triton_compiled":  # imported when it is needed: few launches of Triton kernels need it
        from cudascope.triton_launches import triton_compiled

        return triton_compiled
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """Give the notebook `%%cuda`. `%load_ext cudascope` calls this function."""
    from cudascope.magic import load_ipython_extension

    load_ipython_extension(shell)
