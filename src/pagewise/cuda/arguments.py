"""Python values for a CUDA kernel's parameters: checked against the declaration, then converted to exactly that type.

| declared | takes |
|---|---|
| an integer, of any width | int, refused if it does not fit |
| float, double, __half, __nv_bfloat16 | int or float, refused if it becomes infinite |
| bool | bool |
| T* | a tensor of T's dtype, aligned as T is, or None for a null pointer |
| float4*, __half2*, … | a tensor of the element's dtype, aligned as the vector is |
| void* | any tensor |

A kernel gets a tensor's `data_ptr()`: shape and strides are arguments of their own; it need not be contiguous.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagewise.cuda.signature import Parameter

FLOATS = {"float": torch.float32, "double": torch.float64, "__half": torch.float16, "__nv_bfloat16": torch.bfloat16}

_INTEGERS: dict[str, tuple[int, bool]] = {  # bits, signed; `long` as on Linux
    "char": (8, True), "signed char": (8, True), "unsigned char": (8, False), "short": (16, True),
    "unsigned short": (16, False), "int": (32, True), "unsigned int": (32, False), "long": (64, True),
    "unsigned long": (64, False), "long long": (64, True), "unsigned long long": (64, False),
    "size_t": (64, False), "ptrdiff_t": (64, True), "intptr_t": (64, True), "uintptr_t": (64, False),
    **{f"{u}int{bits}_t": (bits, not u) for u in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip

_C_TYPES: dict[str, type] = {  # what carries a scalar: two-byte floats by their bit pattern
    "bool": ctypes.c_bool, "float": ctypes.c_float, "double": ctypes.c_double,
    "__half": ctypes.c_uint16, "__nv_bfloat16": ctypes.c_uint16,
    **{name: getattr(ctypes, f"c_{'' if signed else 'u'}int{bits}") for name, (bits, signed) in _INTEGERS.items()},
}  # fmt: skip

_SIGNED = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_UNSIGNED = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}


class Pointee(NamedTuple):
    """What a pointer may point to: the dtypes of the tensor (any if there is none), and the alignment in bytes."""

    dtypes: tuple[torch.dtype, ...]
    alignment: int


def _integer_dtypes(bits: int, signed: bool) -> tuple[torch.dtype, ...]:
    """Unsigned integers above 8 bits are rare in torch: there the signed tensor of the same width does too."""
    return (_SIGNED[bits],) if signed else (_UNSIGNED[bits],) if bits == 8 else (_UNSIGNED[bits], _SIGNED[bits])


def _pointees() -> dict[str, Pointee]:
    known = {"void": Pointee((), 1), "bool": Pointee((torch.bool,), 1)}
    known |= {name: Pointee((dtype,), dtype.itemsize) for name, dtype in FLOATS.items()}
    known |= {name: Pointee(_integer_dtypes(*width), width[0] // 8) for name, width in _INTEGERS.items()}
    elements = {"uchar": "unsigned char", "ushort": "unsigned short", "uint": "unsigned int", "ulong": "unsigned long",
                "longlong": "long long", "ulonglong": "unsigned long long"}  # fmt: skip
    elements |= {name: name for name in ("char", "short", "int", "long", "float", "double")}
    for name, element in elements.items():
        dtypes, size = known[element]
        for lanes in (1, 2, 3, 4):  # CUDA aligns vectors of 2 and 4 to their size, up to 16 bytes
            known[f"{name}{lanes}"] = Pointee(dtypes, size if lanes % 2 else min(16, size * lanes))
    for name, dtype in (("__half2", torch.float16), ("__nv_bfloat162", torch.bfloat16)):
        known[name] = Pointee((dtype,), 4)
    for format, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        known |= {f"__nv_fp8{x}_{format}": Pointee((dtype,), bytes) for x, bytes in (("", 1), ("x2", 2), ("x4", 4))}
    return known


POINTEES = _pointees()


class Bound(NamedTuple):
    """Checked arguments, as both launchers take them. No tensor at all: no device."""

    values: list[Any]  # an address as int, a scalar as a ctypes object of exactly the declared type
    tensors: dict[str, Tensor]
    device: torch.device | None


class Binder:
    """Checks what is passed to kernel `function` against its `parameters`; made once, used at each launch."""

    def __init__(self, function: str, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self._function = function
        self._rules = [self._pointer_rule(p) if p.pointer else self._scalar_rule(p) for p in self.parameters]
        self.sizes = [8 if p.pointer else ctypes.sizeof(_C_TYPES[p.ctype]) for p in self.parameters]

    def bind(self, args: Sequence[object]) -> Bound:
        """`args` as the kernel takes them.

        Raises:
            TypeError: too few or too many, or one of the wrong kind or dtype.
            ValueError: a number that does not fit, a tensor that is misaligned or on another device.
        """
        if len(args) != len(self.parameters):
            takes = ", ".join(f"{_declared(p)} {p.name}" for p in self.parameters)
            raise TypeError(
                f"kernel {self._function} takes {len(self.parameters)} arguments ({takes}), got {len(args)}"
            )
        values, tensors, device, first = [], {}, None, ""
        for parameter, rule, arg in zip(self.parameters, self._rules, args, strict=True):
            values.append(rule(arg))
            if parameter.pointer and arg is not None:
                tensors[parameter.name] = arg
                if device is None:
                    device, first = arg.device, parameter.name
                    if device.type not in ("cpu", "cuda"):
                        raise ValueError(f"kernel {self._function}: {first} must be on the CPU or a GPU, got {device}")
                elif arg.device != device:
                    raise ValueError(
                        f"kernel {self._function}: {parameter.name} must be on {device} as {first} is, got {arg.device}"
                    )
        return Bound(values, tensors, device)

    # -------------------------------------------------------------------------------------------- one rule each

    def _pointer_rule(self, parameter: Parameter) -> Callable[[Any], int]:
        what, declared = f"kernel {self._function}: {parameter.name}", f"declared `{_declared(parameter)}`"
        if parameter.ctype not in POINTEES:
            raise ValueError(f"{what} is {declared}, and no dtype of torch is a {parameter.ctype}")
        dtypes, alignment = POINTEES[parameter.ctype]
        wanted = " or ".join(map(str, dtypes)) or "of any dtype"

        def address(value: object) -> int:
            if value is None:
                return 0
            if not isinstance(value, Tensor):
                raise TypeError(f"{what} must be a tensor {wanted} or None ({declared}), got {type(value).__name__}")
            if dtypes and value.dtype not in dtypes:
                raise TypeError(f"{what} must be {wanted} ({declared}), got {value.dtype}: use .to({dtypes[0]})")
            try:
                pointer = value.data_ptr()
            except RuntimeError as error:
                raise ValueError(f"{what} must be a dense tensor, got {value.layout}") from error
            if pointer % alignment:
                raise ValueError(
                    f"{what} must be aligned to {alignment} bytes ({declared}), but starts {pointer % alignment} past "
                    f"a multiple of that: begin the slice elsewhere or .clone() it"
                )
            return pointer

        return address

    def _scalar_rule(self, parameter: Parameter) -> Callable[[Any], Any]:
        what, ctype = f"kernel {self._function}: {parameter.name}", parameter.ctype
        if ctype not in _C_TYPES:
            raise ValueError(
                f"{what} is declared `{ctype}` and passed by value, which is not understood: declare an integer, "
                f"float, double, __half, __nv_bfloat16 or bool, or pass a pointer"
            )
        carrier = _C_TYPES[ctype]

        def wrong_kind(wanted: str, value: object) -> TypeError:
            hint = ": pass its .item()" if isinstance(value, Tensor) else ""
            return TypeError(f"{what} must be {wanted} (declared `{ctype}`), got {type(value).__name__}{hint}")

        if ctype == "bool":

            def boolean(value: object) -> Any:
                if value is True or value is False or type(value).__name__ == "bool":  # numpy's too
                    return carrier(value)
                raise wrong_kind("True or False", value)

            return boolean

        if ctype in _INTEGERS:
            bits, signed = _INTEGERS[ctype]
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

            def integer(value: object) -> Any:
                if type(value) is not int:
                    if isinstance(value, bool) or not isinstance(value, Integral):
                        raise wrong_kind("an int", value)
                    value = int(value)
                if not low <= value <= high:
                    raise ValueError(f"{what} must fit in `{ctype}`, {low} to {high}, got {value}")
                return carrier(value)

            return integer

        dtype = FLOATS[ctype]
        largest = torch.finfo(dtype).max

        def number(value: object) -> Any:
            if type(value) is not float:
                if isinstance(value, bool) or not isinstance(value, Real):
                    raise wrong_kind("a number", value)
                try:
                    value = float(value)
                except OverflowError:
                    raise ValueError(f"{what} must fit in `{ctype}`, up to {largest:.6g}, got a larger int") from None
            if abs(value) > largest and not math.isinf(value):
                raise ValueError(f"{what} must fit in `{ctype}`, up to {largest:.6g}, got {value:g}")
            return carrier(_bits_of(value, dtype) if dtype.itemsize == 2 else value)

        return number


def _declared(parameter: Parameter) -> str:
    return f"{'const ' * (parameter.const and parameter.pointer)}{parameter.ctype}{'*' * parameter.pointer}"


def _bits_of(value: float, dtype: torch.dtype) -> int:
    """A number of two bytes as its bit pattern, rounded to nearest."""
    return torch.tensor(value, dtype=dtype, device="cpu").view(torch.uint16).item()
