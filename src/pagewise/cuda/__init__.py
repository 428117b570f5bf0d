"""CUDA C++ from Python: one source, two machines. `CudaKernel` runs it on the device of its tensors.

    kernel, arguments, values, types, limits    what is launched, with what, and what a launch may ask for
    reading, signature, parameters, names       what a kernel takes, by its source's text or by whoever else can tell
    tokens, declarations, variables             what the text is made of
    outline, device_code, statements            what of a source a kernel needs
    build, nvrtc, device_text, gpu              compiled for a GPU and launched there
    simt                                        the same source on the CPU: run, observed, checked

A wing of its own: it imports nothing of pagewise outside itself.
"""

from pagewise.cuda.build import CompileError
from pagewise.cuda.kernel import CudaKernel
