"""The patches that spare Triton's interpreter needless work change no result."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

from pagewise.online_softmax import online_softmax
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


SCALARS = [
    getattr(tl, name) for name in ("int1", "float16", "float32", "float64", "bfloat16", "float8e5", "float8e4nv")
]
SCALARS += [getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


def test_every_type_has_the_numpy_type_that_it_had():
    spare_the_interpreter()
    remembered = interpreter._get_np_dtype
    types = [*SCALARS, *map(tl.pointer_type, SCALARS)]
    types += [tl.block_type(element, [4, 8]) for element in types]
    for dtype in types * 2:  # asked for the first time, and again
        assert remembered(dtype) == remembered.__wrapped__(dtype), dtype


faster = pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="these patches are for Triton 3.7")


@triton.jit
def twice(x):
    return core.add(x, x)


@triton.jit
def every_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    """Scalars, rows, columns and tiles, with 8-bit and other types, reduced and compared."""
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tile = x[:, None] * x[None, :] + 0.5
    row = tl.sum(tile, 0) + tl.max(tile.to(tl.float16), 1) + twice(x)
    row = tl.where(row > tl.program_id(0), row, -row) % 3
    tl.store(y_ptr + at, row, mask=at != SIZE - 1)


def test_a_kernel_writes_what_it_wrote(kernel_device):
    x = torch.arange(-3.0, 5.0, device=kernel_device) / 4
    y = torch.full((8,), -7.0, device=kernel_device)
    with triton_launch(kernel_device):
        every_kernel[(1,)](x, y, SIZE=8)
    tile = x[:, None] * x + 0.5
    row = tile.sum(0) + tile.half().max(1).values + 2 * x
    expected = torch.where(row > 0, row, -row).fmod(3)
    expected[-1] = -7.0
    torch.testing.assert_close(y, expected)


@faster
def test_every_shape_has_the_attributes_that_it_had():
    spare_the_interpreter()
    shapes = [[1], [8], [1, 8], [8, 1], [tl.constexpr(4), 2], core.tuple([2, 4]), [1, 2, 4]]
    for element, shape in list(product([tl.float16, tl.pointer_type(tl.float32)], shapes)) * 2:
        usual = core.block_type.__new__(core.block_type)
        core.block_type.__init__.__wrapped__(usual, element, shape)
        type_ = core.block_type(element, shape)
        assert type_ == usual
        assert (str(type_), type_.numel) == (str(usual), usual.numel)
        assert_same_tensor(type_, usual)
    assert_same_tensor(tl.int32, tl.int32)


def assert_same_tensor(type_, usual):
    """A tensor of `type_` has the attributes that Triton gives to a tensor of the type `usual`."""
    tensor, expected = core.tensor("handle", type_), core.tensor.__new__(core.tensor)
    core.tensor.__init__.__wrapped__(expected, "handle", usual)
    for name in ("handle", "type", "dtype", "numel"):
        assert getattr(tensor, name) == getattr(expected, name), name
    assert [*map(int, tensor.shape)] == [*map(int, expected.shape)]


@faster
@pytest.mark.parametrize("shape", [[2.0], [tl.constexpr(2.0)], [3], [], [2**21], [2**15, 2**6]])
def test_a_shape_is_refused_whatever_was_allowed_before(shape):
    spare_the_interpreter()
    core.block_type(tl.int32, [2])
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=r"Shape element 0|0d|exceeds"):
            core.block_type(tl.int32, shape)


@faster
def test_every_pair_of_types_gives_the_type_that_it_gave():
    spare_the_interpreter()
    promote, builder = semantic.TritonSemantic.computation_type_impl, interpreter.interpreter_semantic

    def outcome(function, *args):
        try:
            return function(builder, *args)
        except TypeError as error:
            return str(error)

    for a, b in product(SCALARS, repeat=2):
        for flags in product([False, True], repeat=3):
            pair = (a, flags[0], b, flags[1], flags[2])
            assert outcome(promote, *pair) == outcome(promote.__wrapped__, *pair), pair


@faster
def test_tensors_are_broadcast_as_they_were():
    spare_the_interpreter()
    semantics = interpreter.interpreter_semantic
    shapes = [[], [1], [4], [1, 1], [2, 1], [1, 4], [2, 4]]
    tensors = [semantics.full(shape, 3, tl.int32) if shape else semantics.to_tensor(3) for shape in shapes]
    for pair in product(tensors, repeat=2):
        results = []
        for broadcast in (semantics.broadcast_impl_value, semantic.TritonSemantic.broadcast_impl_value.__wrapped__):
            arguments = pair if hasattr(broadcast, "__self__") else (semantics, *pair)
            try:
                results.append([(str(x.type), x.handle.data.shape) for x in broadcast(*arguments)])
            except (ValueError, AttributeError) as error:
                results.append(str(error))
        assert results[0] == results[1], pair


def test_a_launch_leaves_the_language_as_it_was(kernel_device):
    places = (tl, core, core.tensor, tl.math, core.tensor_descriptor_base, core.dtype)
    spare_the_interpreter()
    before = [dict(vars(place)) for place in places]
    with triton_launch(kernel_device):
        every_kernel[(1,)](*torch.zeros(2, 8, device=kernel_device), SIZE=8)
    assert [dict(vars(place)) for place in places] == before
    online_softmax(torch.zeros(1, 8, device=kernel_device), 8, backend="triton")  # calls functions that see tl.core
    assert [dict(vars(place)) for place in places] == before
