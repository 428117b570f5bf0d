"""Shifts by the width of a number or more: as PTX's shl and shr on a GPU, or an error, and never the host's number."""

import contextlib

import numpy as np
import pytest

from cudascope import CudaKernel, Finding, check, observe

SOURCE = r"""
#define LEFT(x, n) ((x) << (n))
template <class T>
__device__ T right(T x, int n) { return x >> n; }
__global__ void k(unsigned long long* out, int n, unsigned long long wide) {
    unsigned one = 1;
    int minus = -8;
    unsigned char byte = 255;
    unsigned long long three = 3;
    *out++ = 1u << n;
    *out++ = 1u << 32;
    *out++ = ~0u >> 32;
    *out++ = ~0u >> n;
    *out++ = right(minus, n), *out++ = right(three, n);
    *out++ = byte << n;
    one <<= n;
    *out++ = one;
    minus >>= n;
    *out++ = minus;
    three <<= n + 1;
    *out++ = three;
    *out++ = 1u << wide;
    *out++ = /* é */ 5u << n - 1 << 1 | 2u << n + 1;
    byte <<= n;
    *out++ = byte;
    MACRO
}
"""
IN_MACRO = SOURCE.replace("MACRO", "*out++ = LEFT(1u, n);")
CUT = SOURCE.replace("MACRO", "*out++ = 1u << n;") + "void host() { k<<<1, 1>>>(0, 0, 0); }\n"


def left(x: int, n: int, bits: int = 32) -> int:
    """PTX: shl of an amount in 32 bits."""
    return (x << n) % 2**bits if n % 2**32 < bits else 0


def right(x: int, n: int, bits: int = 32) -> int:
    """PTX: shr, of a negative number with its sign."""
    return x >> n if n % 2**32 < bits else -(x < 0)


def expected(n: int, wide: int) -> list[int]:
    byte = (left(255, n) + 2**31) % 2**32 - 2**31
    chain = left(left(5, n - 1), 1) | left(2, n + 1)
    values = [left(1, n), 0, 0, right(2**32 - 1, n), right(-8, n), right(3, n, 64), byte, left(1, n), right(-8, n)]
    values += [left(3, n + 1, 64), left(1, wide % 2**32), chain, left(255, n) % 256, left(1, n)]
    return [value % 2**64 for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("source", [IN_MACRO, CUT], ids=["macro", "cut"])
@pytest.mark.parametrize("watch", [contextlib.nullcontext, check, observe], ids=["plain", "check", "observe"])
def test_a_shift_by_too_much_gives_what_a_gpu_gives(source, watch):
    kernel = CudaKernel(source, "k")
    cases = [(0, 0), (1, 31), (5, 2**32), (31, 32), (32, 33), (33, 2**32 + 3), (63, 1), (64, 64), (-1, 2**64 - 1)]
    for n, wide in cases:
        out = np.zeros(14, dtype=np.uint64)
        with watch():
            kernel[1, 1](out, n, wide)
        assert out.tolist() == expected(n, wide), (n, wide)


def test_a_shift_that_cannot_be_made_exact_stops_the_kernel():
    bit_field = """struct B { unsigned f : 5; };
__global__ void k(int* x, int n) {
    B b{3};
    b.f <<= n;
    x[0] = b.f;
}"""
    kernel, x = CudaKernel(bit_field, "k"), np.zeros(1, dtype=np.int32)
    kernel[1, 1](x, 2)
    assert x[0] == 12
    with pytest.raises(Finding, match="shifts a number of 32 bits by as many bits or more") as raised:
        kernel[1, 1](x, 32)
    assert (raised.value.what, raised.value.line) == ("not supported", 4)
