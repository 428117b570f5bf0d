"""CUDA kernels on the CPU: run them, observe them, check them.

with simt.observe() as report:          # counts and a trace, without a change to the kernel
    kernel[grid, block](x, out)
print(report)

with simt.check(outputs=[out]):         # raises SimtError that names line, thread, tensor and element
    kernel[grid, block](x, out)

launch                     what a launch does; observe, check and schedule
build, compiler, library   a .cu file becomes a shared library
translation, preprocess, missing   what of the file is compiled: all of it, or what one kernel needs
abi, memory                what Python and the C++ runtime (runtime/) tell each other
report, errors             what was seen, and what was wrong, in words
"""

from pagewise.cuda.simt.errors import SimtError
from pagewise.cuda.simt.launch import check, observe, schedule, time_limit
from pagewise.cuda.simt.report import Report
