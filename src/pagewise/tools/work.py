"""Count the work of torch code: arithmetic, bytes to and from main memory, memory held.

Every torch operation counts as one kernel, as it runs without fusion. It reads its operands from main memory once and
writes its results there once. A view is free. Counts are exact, and unlike times they are the same on every machine of
a kind. For a few operations, such as dropout, torch has one fused kernel on a GPU and several kernels on a CPU.

There are two exceptions. For some kernels of our own, `counts_as` gives the counts, and the others are refused:
cudascope counts what these do. A loop in torch that stands for one kernel runs `on_chip`, where only `load` and `store`
move data:

    with on_chip():
        x_tile = load(x[rows])                   # from main memory
        store(out[rows], f(x_tile))              # to main memory; the operations of f count, but not their operands
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_aten = torch.ops.aten
_ALLOCATES = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default}
_OVERWRITES = {"copy_", "fill_", "zero_", "index_put_"}
_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # read no element of their model
_PICKS = {"index", "index_select", "gather", "embedding"}
_MOVES = _OVERWRITES | _PICKS | _LIKE
_MOVES |= {"cat", "stack", "clone", "copy", "_to_copy", "lift_fresh", "repeat", "flip", "roll", "constant_pad_nd"}
_MOVES |= {"arange", "full", "zeros", "ones"}

Result = TypeVar("Result")

_OWN: dict[str, Callable[..., tuple[int, int, int, int]]] = {}


def counts_as(op: str) -> Callable[[Callable], Callable]:
    """Decorate a function that takes the arguments of custom op `op` and returns the work of one call.

    The work is (operations of matrix products, other operations, bytes read, bytes written).
    """

    def register(function: Callable) -> Callable:
        _OWN[op] = function
        return function

    return register


@dataclass(frozen=True)
class Work:
    """Operations of matrix products and others, bytes moved, and the peak of bytes allocated."""

    matmul_flops: int = 0
    other_flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    peak_bytes: int = 0

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.other_flops

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


def count_work(run: Callable[[], object]) -> Work:
    """Run `run()` once and return its work.

    A matrix product of [M, K] and [K, N] is 2·M·N·K operations. Any other arithmetic operation, such as exp, counts one
    per element of its largest operand or result. Moving data counts none. `peak_bytes` is the largest number of bytes
    that tensors made by `run`, its results included, held at any one time.

    Raises ValueError before a kernel of pagewise runs that has no counts.
    """
    counter = _Counter()
    with counter, torch.no_grad():
        result = run()
    del result
    return Work(*counter.flops, counter.read, counter.written, counter.peak)


@contextmanager
def on_chip() -> Iterator[None]:
    """Tell `count_work` that the operations inside work on chip. They move no bytes and hold no memory."""
    counters = _counters()
    for counter in counters:
        counter.chips += 1
    try:
        yield
    finally:
        for counter in counters:
            counter.chips -= 1


def load(x: Tensor) -> Tensor:
    """Return x itself, and count it as read from main memory."""
    for counter in _counters():
        counter.move("read", x)
    return x


def store(destination: Tensor, x: Tensor) -> None:
    """Write x to main memory: destination[...] = x."""
    with on_chip():
        destination.copy_(x)
    for counter in _counters():
        counter.move("write", destination)


def trace_moves(run: Callable[[], Result]) -> tuple[Result, list[tuple[str, Tensor]]]:
    """Return the result of `run()` and its loads and stores in order: ("read" or "write", the part that moves).

    Raises ValueError as `count_work`: the moves of a kernel would be missing.
    """
    tracer = _Tracer()
    with tracer, torch.no_grad():
        return run(), tracer.moves


class _Counter(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch hides other modes from its compiler, for which it imports the compiler, in seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.flops = [0, 0]
        self.read = self.written = self.held = self.peak = 0
        self.chips = 0  # depth of nested `on_chip`
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "torch._dynamo" not in sys.modules:
            return self._dispatch(func, types, args, kwargs)
        _Counter.__torch_dispatch__ = torch.compiler.disable(_Counter._dispatch)
        return _Counter.__torch_dispatch__(self, func, types, args, kwargs)

    def _dispatch(self, func, types, args=(), kwargs=None):
        op, kwargs = func._schema.name, kwargs or {}
        if op in ("aten::matmul", "aten::to"):  # inside a custom op they come whole: count their parts
            with self:
                return func.decompose(*args, **kwargs)
        if op.startswith("pagewise::") and op not in _OWN:  # how much of its operands a kernel reads is not known
            raise ValueError(
                f'the work of the kernels of {op} is not known: cudascope counts it, and backend="torch", where a '
                f"function has it, is counted"
            )
        inputs = _tensors((args, kwargs))
        before = {t.untyped_storage()._cdata for t in inputs}
        if kwargs and func._schema.returns:  # what is only written, as out=, is no input
            written = {each.name for each in func._schema.arguments if each.is_out}
            inputs = _tensors((args, {name: x for name, x in kwargs.items() if name not in written}))
        out = func(*args, **kwargs)
        results = _tensors(out)
        for tensor in [] if self.chips else results:
            self._hold(tensor, before)
        if not (func.is_view or func in _ALLOCATES or self._is_alias(func, results, before)):
            self._count(func, args, inputs, results, out)
        return out

    @staticmethod
    def _is_alias(func, results: list[Tensor], before: set[int]) -> bool:
        """Return whether an operation such as reshape only returned its input or a view of it."""
        return not func._schema.is_mutable and all(t.untyped_storage()._cdata in before for t in results)

    def move(self, access: str, x: Tensor) -> None:
        """Count a `load` or a `store`."""
        if access == "read":
            self.read += _bytes(x)
        else:
            self.written += _bytes(x)

    def _count(self, func, args, inputs: list[Tensor], results: list[Tensor], out: object) -> None:
        from torch.utils.flop_counter import flop_registry

        name = func._schema.name.removeprefix("aten::")
        if name in _OWN:
            matmul, other, read, written = _OWN[name](*args)
            self.flops = [self.flops[0] + matmul, self.flops[1] + other]
            self.read, self.written = self.read + read, self.written + written
            return
        if not self.chips:
            self._count_bytes(name, args, inputs, results)
        if func._overloadpacket in flop_registry:
            self.flops[0] += flop_registry[func._overloadpacket](*args, out_val=out)
        elif name not in _MOVES:
            self.flops[1] += max((t.numel() for t in (*inputs, *results)), default=0)

    def _count_bytes(self, name: str, args, inputs: list[Tensor], results: list[Tensor]) -> None:
        if name in _PICKS:  # reads the elements that it picks, and the indices
            self.read += sum(map(_bytes, results)) + sum(map(_bytes, inputs[1:]))
        elif name not in _LIKE:
            self.read += sum(map(_bytes, inputs[1:] if name in _OVERWRITES else inputs))
        self.written += sum(map(_bytes, [_picked(*args[:2])] if name == "index_put_" else results))

    def _hold(self, tensor: Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in before or key in self._known:
            return
        self._known.add(key)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held -= nbytes


class _Tracer(_Counter):
    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[str, Tensor]] = []

    def move(self, access: str, x: Tensor) -> None:
        super().move(access, x)
        self.moves.append((access, x))


def _counters() -> list[_Counter]:
    """Return the active counters. Inside an operation there are none, because it is counted as a whole."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Counter)]


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors among the arguments or the results of an operation, those in lists included."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for each in values for tensor in _tensors(each)]


def _picked(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Return tensor[indices] for the indices of an aten operation, where None stands for a whole dimension."""
    return tensor[tuple(slice(None) if index is None else index for index in indices)]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct elements. An expanded dimension is read once."""
    stored = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(stored) * tensor.element_size() if tensor.numel() else 0
