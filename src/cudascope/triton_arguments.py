"""The arguments of a Triton kernel as its PTX takes them: the entries of tuples one by one, no constants, scratch last."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cudascope.arrays import Array, as_array, bits_of
from cudascope.ptx_module import Parameter

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class Leaf(NamedTuple):
    """One parameter of a compiled kernel, for the argument `name` or for `name[i]` of a tuple."""

    name: str
    path: tuple[int, ...]
    type: str  # "*fp16", "i32", "fp32"
    part: str = ""  # of a tensor descriptor: "base", "shape", "strides", "padding", "round_f32_to_tf32"

    def __str__(self) -> str:
        return self.name + "".join(f"[{i}]" for i in self.path)

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the argument."""
        value = arguments[self.name]
        descriptor_part = self.path
        if self.part:
            value, descriptor_part = getattr(value, self.part), self.path[-1:] * (self.part in ("shape", "strides"))
        for i in descriptor_part:
            value = value[i]
        return value == "nan" if self.part == "padding" else value


def leaves(signature: Mapping[str, Any]) -> list[Leaf]:
    """Return the parameters of a kernel of this signature, as Triton's launcher passes them."""
    return [leaf for name, kind in signature.items() for leaf in _leaves(name, (), kind)]


def _leaves(name: str, path: tuple[int, ...], kind: Any) -> Iterator[Leaf]:
    if isinstance(kind, tuple):
        for i, each in enumerate(kind):
            yield from _leaves(name, (*path, i), each)
    elif kind.startswith("tensordesc"):
        yield from _descriptor(name, kind)
    elif kind != "constexpr":
        yield Leaf(name, path, kind)


def _descriptor(name: str, kind: str) -> Iterator[Leaf]:
    """A tensor descriptor of the host, for a GPU without TMA. Triton passes its sizes twice."""
    dtype, sizes = re.match(r"tensordesc<([^\[>]*)\[([^\]]*)\]", kind).groups()
    rank = range(sizes.count(",") + 1)
    yield Leaf(name, (), f"*{dtype}", "base")
    yield from (Leaf(name, (i,), "i64", part) for part in ("shape", "strides") for i in rank)
    yield from (Leaf(name, (), "i1", part) for part in ("padding", "round_f32_to_tf32"))
    yield from (Leaf(name, (i,), kind, part) for part, kind in (("shape", "i32"), ("strides", "i64")) for i in rank)


def pointer_names(signature: Mapping[str, Any]) -> dict[int, str]:
    """Return a name for each parameter that is a pointer: that of its argument. Reports use these names."""
    found: dict[int, str] = {}
    flat = leaves(signature)
    for position, leaf in enumerate(flat):
        if leaf.type.startswith("*"):
            alone = sum(other.name == leaf.name and other.type.startswith("*") for other in flat) == 1
            name = leaf.name if alone else "_".join([leaf.name, *map(str, leaf.path)])
            while name in found.values() or (not alone and name in signature):
                name += "_"
            found[position] = name
    return found


def passed(
    kernel: str,
    signature: Mapping[str, Any],
    arguments: Mapping[str, Any],
    parameters: tuple[Parameter, ...],
    scratch: tuple[int, int],
    grid: tuple[int, int, int],
) -> list[Any]:
    """Return the arguments of the PTX.

    Args:
        scratch: bytes of scratch memory in global memory that each program gets, by kind.

    Raises:
        TypeError: the argument of a pointer has no memory.
        ValueError: a tensor is not on the CPU.
    """
    flat = leaves(signature)
    values = [
        _value(kernel, leaf, leaf.of(arguments), parameter)
        for leaf, parameter in zip(flat, parameters, strict=False)
    ]
    for size, _ in zip(scratch, parameters[len(flat) :], strict=False):
        values.append(np.zeros(size * math.prod(grid), np.uint8) if size else None)
    return values


def _value(kernel: str, leaf: Leaf, value: Any, parameter: Parameter) -> Any:
    if leaf.type.startswith("*"):
        return _memory(kernel, leaf, value)
    if leaf.type not in _DTYPES:
        return int(value)
    if parameter.type in ("f32", "f64"):
        return float(value)
    dtype = _DTYPES[leaf.type]
    with np.errstate(over="ignore"):
        bits = bits_of(np.array([value], np.float64), dtype) if leaf.type == "bf16" else np.array([value], dtype)
    return int.from_bytes(bits.tobytes(), "little")


def _memory(kernel: str, leaf: Leaf, value: Any) -> Array:
    array = as_array(getattr(value, "base", value))  # of triton.reinterpret(tensor, dtype)
    if array is None:
        raise TypeError(f"kernel {kernel}: argument {leaf} must be a tensor, got {type(value).__name__}")
    if array.device != "cpu":
        raise ValueError(
            f"kernel {kernel}: argument {leaf} is on {array.device}, but triton_compiled executes kernels on the CPU: "
            "pass a tensor of the CPU, or launch outside of triton_compiled"
        )
    return array
