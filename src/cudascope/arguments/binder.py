"""Python values for a CUDA kernel's parameters: checked against the declaration, then converted to exactly that type.

| declared | takes |
|---|---|
| an integer, of any width; an enum | int, refused if it does not fit |
| float, double, __half, __nv_bfloat16 | int or float, refused if it becomes infinite |
| bool | bool |
| float4, uint2, dim3, … | a tuple of as many numbers |
| a struct, a class | a ctypes.Structure or bytes of exactly its size |
| torch's PackedTensorAccessor and TensorInfo | also an array of T's dtype |
| T* | an array of T's dtype, aligned as T is, or None for a null pointer |
| float4*, __half2*, … | an array of the element's dtype, aligned as the vector is |
| a pointer to structs | an array of any dtype that holds a whole number of them, aligned as they are |
| T** | an array of int64: the addresses of other arrays |
| void* | any array |

An array is a torch tensor, a numpy array, an object with DLPack, or one with `data_ptr()` and `dtype`. A kernel gets
the address of its first element: shape and strides are arguments of their own, and the array need not be contiguous.
A kernel may touch all the memory that a view belongs to (arrays.py).
Trailing arguments that have a default in C++ may be left out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cudascope.arguments.arrays import Array
from cudascope.arguments.values import Accessor, is_struct, rule_for, size_of
from cudascope.cpp.constants import Value, converted
from cudascope.cpp.signature import Parameter, spelled
from cudascope.cpp.types import C_TYPES


class Bound(NamedTuple):
    """Checked arguments, as both launchers take them. No array at all: no device."""

    values: list[Any]  # an address as int, a value as a ctypes object of exactly the declared type
    arrays: dict[str, Array]
    device: str | None  # "cpu" or "cuda:0"


class Binder:
    """Checks what is passed to kernel `function` against its `parameters`; made once, used at each launch."""

    def __init__(self, function: str, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self._function = function
        self._rules = [rule_for(function, parameter) for parameter in self.parameters]
        self.has_structs = any(is_struct(parameter) for parameter in self.parameters)
        self.sizes = [8 if p.pointer else size_of(p) for p in self.parameters]

    def bind(self, args: Sequence[object]) -> Bound:
        """`args` as the kernel takes them.

        Raises:
            TypeError: too few or too many, or one of the wrong kind or dtype.
            ValueError: a number that does not fit, a tensor that is misaligned or on another device.
        """
        if len(args) != len(self.parameters):
            args = (*args, *self._defaults(len(args)))
        values, arrays, device, first = [], {}, None, ""
        for parameter, rule, arg in zip(self.parameters, self._rules, args, strict=True):
            value = rule(arg)
            array = value.array if isinstance(value, Accessor) else value
            if isinstance(array, Array):
                arrays[parameter.name] = array
                if device is None:
                    device, first = array.device, parameter.name
                    if not device.startswith(("cpu", "cuda")):
                        raise ValueError(f"kernel {self._function}: {first} must be on the CPU or a GPU, got {device}")
                elif array.device != device:
                    where = f"on {device} as {first} is, got {array.device}"
                    raise ValueError(f"kernel {self._function}: {parameter.name} must be {where}")
                value = value.content if isinstance(value, Accessor) else array.address
            values.append(0 if value is None else value)
        return Bound(values, arrays, device)

    def _defaults(self, given: int) -> list[object]:
        """The values of the parameters that `given` arguments leave out."""
        left_out = self.parameters[given:]
        if not left_out or not all(parameter.default for parameter in left_out):
            defaults = [f" = {p.default.text}" if p.default else "" for p in self.parameters]
            takes = ", ".join(f"{spelled(p)} {p.name}{end}" for p, end in zip(self.parameters, defaults, strict=True))
            raise TypeError(f"kernel {self._function} takes {len(self.parameters)} arguments ({takes}), got {given}")
        return [_value(self._function, parameter) for parameter in left_out]


def _value(function: str, parameter: Parameter) -> object:
    """The value that C++ passes for a parameter that is left out."""
    text, (type, number) = parameter.default
    what = f"kernel {function}: the default of {parameter.name}, {text},"
    if parameter.pointer and (text in ("nullptr", "NULL") or number == 0):
        return None
    if number is None or parameter.pointer or parameter.ctype not in C_TYPES:
        raise TypeError(f"{what} cannot be told from the source: pass it")
    wanted = {"__half": "double", "__nv_bfloat16": "double"}.get(parameter.ctype, parameter.ctype)
    try:
        number = converted(Value(type, number), wanted).number
    except ArithmeticError as error:
        raise ValueError(f"{what} {error}: pass it") from None
    return bool(number) if parameter.ctype == "bool" else number
