"""CUDA C++ from Python: one source, two machines. `CudaKernel` runs it on the device of its tensors.

    kernel, arguments, limits   what is launched, with what, and what a launch may ask for
    declarations, signature     a kernel's parameters, read from its source, by its tokens
    build, nvrtc, gpu           compiled for a GPU and launched there
    simt                        the same source on the CPU: run, observed, checked

A wing of its own: it imports nothing of pagewise outside itself.
"""

from pagewise.cuda.build import CompileError
from pagewise.cuda.kernel import CudaKernel
