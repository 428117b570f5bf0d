"""Device code: Triton kernels (`*.py`) and CUDA C++ (`*.cu`, `*.h`).

Imported as `pagewise.kernels`; imports nothing of pagewise.
"""
