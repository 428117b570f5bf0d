"""The arguments of a Triton kernel as its PTX takes them: tuples entry by entry, no constants, scratch memory last."""

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudascope.arguments.arrays import as_array, bits_of
from cudascope.ptx.module import Parameter

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class Leaf(NamedTuple):
    """One parameter of a compiled kernel, for the argument `name` or for `name[i]` of a tuple."""

    name: str
    path: tuple[int, ...]
    type: str  # "*fp16", "i32", "fp32"
    part: str = ""  # of a tensor descriptor: "base", "shape", "strides", "padding", "round_f32_to_tf32"
    map: Mapping[str, Any] | None = None  # how a tensor descriptor becomes a tensor map

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


def leaves(signature: Mapping[str, Any], maps: Sequence[Mapping[str, Any]]) -> list[Leaf]:
    """Return the parameters of a kernel of this signature, as Triton's launcher passes them.

    Args:
        maps: how each tensor descriptor of the host becomes a tensor map; empty for a GPU without TMA.
    """
    left = iter(maps)
    return [leaf for name, kind in signature.items() for leaf in _leaves(name, (), kind, left)]


def _leaves(name: str, path: tuple[int, ...], kind: Any, maps: Iterator[Mapping[str, Any]]) -> Iterator[Leaf]:
    if isinstance(kind, tuple):
        for i, each in enumerate(kind):
            yield from _leaves(name, (*path, i), each, maps)
    elif kind.startswith("tensordesc"):
        yield from _descriptor(name, kind, next(maps, None))
    elif kind != "constexpr":
        yield Leaf(name, path, kind)


def _descriptor(name: str, kind: str, tensor_map: Mapping[str, Any] | None) -> Iterator[Leaf]:
    """A tensor descriptor of the host. A GPU without TMA gets its base and its sizes in the place of a tensor map."""
    dtype, sizes = re.match(r"tensordesc<([^\[>]*)\[([^\]]*)\]", kind).groups()
    rank = range(sizes.count(",") + 1)
    if tensor_map:
        yield Leaf(name, (), "tensor map", map=tensor_map)
    else:
        yield Leaf(name, (), f"*{dtype}", "base")
        yield from (Leaf(name, (i,), "i64", part) for part in ("shape", "strides") for i in rank)
        yield from (Leaf(name, (), "i1", part) for part in ("padding", "round_f32_to_tf32"))
    yield from (Leaf(name, (i,), kind, part) for part, kind in (("shape", "i32"), ("strides", "i64")) for i in rank)


def pointer_names(flat: Sequence[Leaf]) -> dict[int, str]:
    """Return a name for each parameter that is a pointer: that of its argument. Reports use these names."""
    found: dict[int, str] = {}
    arguments = {leaf.name for leaf in flat}
    for position, leaf in enumerate(flat):
        if leaf.type.startswith("*"):
            alone = sum(other.name == leaf.name and other.type.startswith("*") for other in flat) == 1
            name = leaf.name if alone else "_".join([leaf.name, *map(str, leaf.path)])
            while name in found.values() or (not alone and name in arguments):
                name += "_"
            found[position] = name
    return found


def passed(
    kernel: str,
    flat: Sequence[Leaf],
    arguments: Mapping[str, Any],
    parameters: tuple[Parameter, ...],
    scratch: tuple[int, int],
    grid: tuple[int, int, int],
) -> list[Any]:
    """Return the arguments of the PTX, which a `PtxKernel` checks.

    Args:
        scratch: bytes of scratch memory in global memory that each program gets, by kind.

    Raises:
        TypeError: the base of a tensor descriptor has no memory.
        ValueError: the base is not on the CPU.
    """
    given = zip(flat, parameters, strict=False)
    values = [_value(kernel, leaf, leaf.of(arguments), parameter) for leaf, parameter in given]
    for size, _ in zip(scratch, parameters[len(flat) :], strict=False):
        values.append(np.zeros(size * math.prod(grid), np.uint8) if size else None)
    return values


def behind_maps(flat: Sequence[Leaf], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors that only a tensor map leads to, by the name of the argument."""
    return {leaf.name: leaf.of(arguments).base for leaf in flat if leaf.map}


def _value(kernel: str, leaf: Leaf, value: Any, parameter: Parameter) -> Any:
    if leaf.map:
        array = as_array(value.base)
        if array is None or array.device != "cpu":
            raise ValueError(
                f"kernel {kernel}: {leaf} must describe a tensor on the CPU, where PTX is executed, "
                f"got {array.device if array else type(value.base).__name__}"
            )
        return _tensor_map(value, leaf.map)
    if leaf.type.startswith("*"):
        return getattr(value, "base", value)  # of triton.reinterpret(tensor, dtype)
    if leaf.type not in _DTYPES:
        return int(value)
    if parameter.type in ("f32", "f64"):
        return float(value)
    dtype = _DTYPES[leaf.type]
    with np.errstate(over="ignore"):
        bits = bits_of(np.array([value], np.float64), dtype) if leaf.type == "bf16" else np.array([value], dtype)
    return bits.tobytes() if parameter.count else int.from_bytes(bits.tobytes(), "little")


def _tensor_map(descriptor: Any, how: Mapping[str, Any]) -> bytes:
    """A tensor map as the CPU runner has it (cpu/runtime/kinds.h), of 128 bytes as a GPU's."""

    def reversed_to_5(sizes: Iterable[int]) -> list[int]:
        return ([*sizes][::-1] + [1] * 5)[:5]

    strides = [stride * how["elem_size"] for stride in reversed_to_5(descriptor.strides)[1:]]
    head = struct.pack("<5Q2I", descriptor.base.data_ptr(), *strides, len(descriptor.shape) - 1, how["elem_type"])
    sizes = [*reversed_to_5(descriptor.shape), *reversed_to_5(how["block_size"]), *[1] * 5]
    tail = struct.pack("<15I4B", *sizes, how["swizzle"], 0, descriptor.padding == "nan", 0)
    return (head + tail).ljust(128, b"\0")
