"""What Triton's interpreter is spared changes no result."""

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from pagewise.tools.device import triton_launch
from pagewise.tools.triton_interpreter import spare_the_interpreter


@triton.jit
def wrap_kernel(x_ptr, y_ptr):
    at = tl.arange(0, 4)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x + 1)
    tl.store(y_ptr + 4 + at, x * 3)
    tl.store(y_ptr + 8 + at, -x - 2)


def test_integers_wrap_as_on_a_gpu(kernel_device):
    x = torch.tensor([2**31 - 1, -(2**31), 2**30, 5], dtype=torch.int32, device=kernel_device)
    y = torch.empty(12, dtype=torch.int32, device=kernel_device)
    with triton_launch(kernel_device):
        wrap_kernel[(1,)](x, y)
    expected = torch.cat([x.long() + 1, x.long() * 3, -x.long() - 2])
    assert y.tolist() == ((expected + 2**31) % 2**32 - 2**31).tolist()


def test_every_type_has_the_numpy_type_that_it_had():
    spare_the_interpreter()
    remembered = interpreter._get_np_dtype
    scalars = [getattr(tl, name) for name in ("int1", "float16", "float32", "float64", "bfloat16", "float8e5")]
    scalars += [getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
    types = [*scalars, *map(tl.pointer_type, scalars)]
    types += [tl.block_type(element, [4, 8]) for element in types]
    for dtype in types * 2:  # asked for the first time, and again
        assert remembered(dtype) == remembered.__wrapped__(dtype), dtype
