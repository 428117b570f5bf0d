"""CUDA kernels on the CPU: run them, observe them, check them.

launch                     what a launch does; observe, check and schedule
build, compiler, library   a .cu file becomes a shared library
translation, preprocess, missing   what of the file is compiled: all of it, or what one kernel needs
abi, memory                what Python and the C++ runtime (runtime/) tell each other
report, errors, sarif      what was seen, and what was wrong, in words
"""
