"""Counts what a piece of torch code does: arithmetic, bytes to and from main memory, memory held.

Every torch operation is taken for one kernel, as it runs without fusion: it reads its operands from main memory once
and writes its results there once; a view is free. Counts are exact, and unlike times the same on every machine of a
kind: of a few operations, dropout among them, torch has one fused kernel on a GPU and several on a CPU.

Two ways to say that something is not so: of a kernel of our own, `counts_as` says what it does; and a loop in torch
that stands for one kernel runs `on_chip`, where nothing moves but what it says:

    with on_chip():
        x_tile = load(x[rows])                   # from main memory
        store(out[rows], f(x_tile))              # to main memory; the operations of f count, their operands stay here
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_ALLOCATES = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default}
_OVERWRITES = {"copy_", "fill_", "zero_", "index_put_"}
_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # read nothing of their model
_PICKS = {"index", "index_select", "gather", "embedding"}
_MOVES = (
    _OVERWRITES
    | _PICKS
    | _LIKE
    | {
        "cat",
        "stack",
        "clone",
        "_to_copy",
        "copy",
        "arange",
        "full",
        "zeros",
        "ones",
        "repeat",
        "flip",
        "roll",
        "lift_fresh",
        "constant_pad_nd",
    }
)


Result = TypeVar("Result")

_OWN: dict[str, Callable[..., tuple[int, int, int, int]]] = {}


def counts_as(op: str) -> Callable[[Callable], Callable]:
    """Decorator: the function takes what custom op `op` takes, and returns what one call of it does.

    That is (operations of matrix products, other operations, bytes read, bytes written).
    """

    def register(function: Callable) -> Callable:
        _OWN[op] = function
        return function

    return register


@dataclass(frozen=True)
class Work:
    """What was done: `matmul_flops` and `other_flops` operations, bytes moved, and the peak of bytes allocated."""

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
    """Run `run()` once and count.

    A matrix product of [M, K] and [K, N] is 2·M·N·K operations. Any other arithmetic operation counts one per element
    of its largest operand or result, exp and tanh included; moving data counts none. `peak_bytes` is the most that
    tensors made by `run` (its results included) held at any one time.
    """
    counter = _Counter()
    with counter, torch.no_grad():
        result = run()
    del result
    return Work(*counter.flops, counter.read, counter.written, counter.peak)


@contextmanager
def on_chip() -> Iterator[None]:
    """Inside, operations work on chip: they count as arithmetic, move no bytes, and what they make is not held.

    Says so to `count_work`, and does nothing else.
    """
    counters = _counters()
    for counter in counters:
        counter.chips += 1
    try:
        yield
    finally:
        for counter in counters:
            counter.chips -= 1


def load(x: Tensor) -> Tensor:
    """x itself, read from main memory."""
    for counter in _counters():
        counter.move("read", x)
    return x


def store(destination: Tensor, x: Tensor) -> None:
    """x written to main memory: destination[...] = x."""
    with on_chip():
        destination.copy_(x)
    for counter in _counters():
        counter.move("write", destination)


def trace_moves(run: Callable[[], Result]) -> tuple[Result, list[tuple[str, Tensor]]]:
    """What `run()` returns, and each `load` and `store` of it in order: ("read" or "write", the part that moves)."""
    tracer = _Tracer()
    with tracer, torch.no_grad():
        return run(), tracer.moves


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = [0, 0]
        self.read = self.written = self.held = self.peak = 0
        self.chips = 0  # how many `on_chip` we are in
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::matmul":  # inside a custom op it comes whole: count what it is made of
            with self:
                return func.decompose(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        before = {t.untyped_storage()._cdata for t in inputs}
        out = func(*args, **(kwargs or {}))
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in [] if self.chips else results:
            self._hold(tensor, before)
        if not (func.is_view or func in _ALLOCATES or self._is_alias(func, results, before)):
            self._count(func, args, inputs, results, out)
        return out

    @staticmethod
    def _is_alias(func, results: list[Tensor], before: set[int]) -> bool:
        """Operations like reshape and to() that may return their input, or a view of it, without doing anything."""
        return not func._schema.is_mutable and all(t.untyped_storage()._cdata in before for t in results)

    def move(self, access: str, x: Tensor) -> None:
        """What `load` and `store` say."""
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
        if name in _PICKS:  # reads what it picks, and where
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
    """Those that count what runs now; none inside of an operation, which is counted as a whole."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Counter)]


def _picked(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """tensor[indices], as aten's operations take them: None stands for a whole dimension."""
    return tensor[tuple(slice(None) if index is None else index for index in indices)]


def _bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension is read once."""
    stored = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(stored) * tensor.element_size() if tensor.numel() else 0
