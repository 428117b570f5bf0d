"""A device function in a file of its own, for the kernels of test_triton_compiled.py."""

import triton
import triton.language as tl

FACTOR = tl.constexpr(3)


@triton.jit
def scaled(x, factor: tl.constexpr = FACTOR):
    return x * factor
