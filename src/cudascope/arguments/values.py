"""The values that a launch may pass for a parameter: for each type, a function that checks and converts a value."""

import ctypes
import math
import re
import struct
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from cudascope.arguments.arrays import LARGEST, Array, array_of, as_array, bits_of
from cudascope.cpp.signature import Parameter, spelled, type_of
from cudascope.cpp.tokens import tokens_of
from cudascope.cpp.types import ADDRESSES, C_TYPES, FLOATS, INTEGERS, POINTEES, VECTORS, Pointee

_BYTES = bytes | bytearray | ctypes.Structure | ctypes.Array


def is_understood(parameter: Parameter) -> bool:
    """Whether it is known what may be passed; if not, the compiler knows more of its type."""
    if parameter.bytes:
        return True
    known = POINTEES if parameter.pointer else C_TYPES | VECTORS
    return parameter.ctype in known or (parameter.pointer and parameter.ctype.endswith("*"))


def rule_for(function: str, parameter: Parameter) -> Callable[[Any], Any]:
    """Return the function that checks and converts a value for `parameter`. Raise ValueError if no value fits."""
    if parameter.pointer:
        return _pointer_rule(function, parameter)
    if parameter.ctype in ADDRESSES and not parameter.bytes:  # PTX does not tell an address from a number
        number, memory = _scalar_rule(function, parameter), _pointer_rule(function, parameter)
        return lambda value: number(value) if isinstance(value, Integral) else memory(value)
    if parameter.ctype in C_TYPES:
        return _scalar_rule(function, parameter)
    if is_struct(parameter):
        rule = _struct_rule(function, parameter)
        return _accessor_rule(function, parameter, rule) if _accessor(parameter) else rule
    what = f"kernel {function}: {parameter.name} is declared `{parameter.ctype}`"
    raise ValueError(f"{what} and passed by value, which is not understood")


def is_struct(parameter: Parameter) -> bool:
    """Whether it is a struct or a vector, passed by value."""
    is_sized = parameter.bytes or parameter.ctype in VECTORS
    return bool(is_sized and not parameter.pointer and parameter.ctype not in C_TYPES)


def size_of(parameter: Parameter) -> int:
    """The bytes of a value."""
    if parameter.ctype in VECTORS:
        element, lanes = VECTORS[parameter.ctype]
        return lanes * ctypes.sizeof(C_TYPES[element])
    return parameter.bytes or ctypes.sizeof(C_TYPES[parameter.ctype])


def _struct_rule(function: str, parameter: Parameter) -> Callable[[Any], Any]:
    what, size = f"kernel {function}: {parameter.name}", size_of(parameter)
    element, lanes = VECTORS.get(parameter.ctype, ("", 0))
    alignment = POINTEES[parameter.ctype].alignment if parameter.ctype in POINTEES else parameter.alignment
    number = _scalar_rule(function, parameter._replace(ctype=element)) if element else None
    wanted = f"a tuple of {lanes} numbers, a ctypes.Structure" if element else "a ctypes.Structure"

    def whole(value: object) -> Any:
        if number and isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            if len(value) != lanes:
                raise ValueError(f"{what} must be {lanes} numbers (declared `{parameter.ctype}`), got {len(value)}")
            content = b"".join(bytes(number(each)) for each in value)
        elif isinstance(value, _BYTES):
            content = bytes(value)
        else:
            got = type(value).__name__
            raise TypeError(f"{what} must be {wanted} or bytes (declared `{parameter.ctype}`), got {got}")
        if len(content) != size:
            raise ValueError(f"{what} must be {size} bytes (declared `{parameter.ctype}`), got {len(content)}")
        memory = ctypes.create_string_buffer(size + alignment)
        aligned = (ctypes.c_ubyte * size).from_buffer(memory, -ctypes.addressof(memory) % alignment)
        aligned[:] = content
        return aligned

    return whole


class Accessor(NamedTuple):
    """An array as one of torch's structs for it: address, sizes and strides."""

    content: Any
    array: Array


# torch's structs in the compiler's spelling: element, number of sizes, index
_PACKED = re.compile(r"at::GenericPackedTensorAccessor<(.*), ?(\d+), ?at::\w+, ?([\w ]+)>")
_INFO = re.compile(r"at::cuda::detail::TensorInfo<(.*), ?([\w ]+)>")
_INFO_SIZES = 25


def _accessor(parameter: Parameter) -> tuple[str, int, str] | None:
    """Return element, number of sizes and index of a struct of torch's; None for another type."""
    if packed := _PACKED.fullmatch(parameter.ctype):
        return packed[1], int(packed[2]), packed[3]
    info = _INFO.fullmatch(parameter.ctype)
    return info and (info[1], _INFO_SIZES, info[2])


def _accessor_rule(function: str, parameter: Parameter, whole: Callable[[Any], Any]) -> Callable[[Any], Any]:
    element, dims, index = _accessor(parameter)
    ctype, _, const = type_of(tokens_of(element))
    is_info = "TensorInfo" in parameter.ctype
    pointed = parameter._replace(ctype=ctype, pointer=True, const=const, bytes=0)
    pointer = _pointer_rule(function, pointed) if is_understood(pointed) else as_array
    form = "q" if "long" in index else "i"

    def accessor(value: object) -> Any:
        array = None if isinstance(value, _BYTES) else pointer(value)
        if array is None:
            return whole(value)
        given = len(array.shape)
        if given > dims or (given < dims and not is_info):
            raise ValueError(
                f"kernel {function}: {parameter.name} must have {dims} dimensions (declared `{parameter.ctype}`), "
                f"got {given}"
            )
        rest = (0,) * (dims - given)
        content = struct.pack(f"P{2 * dims}{form}", array.address, *array.shape, *rest, *array.strides, *rest)
        if is_info:
            content += struct.pack("i", given)
        return Accessor(whole(content.ljust(parameter.bytes, b"\0")), array)

    return accessor


def _pointer_rule(function: str, parameter: Parameter) -> Callable[[Any], Array | None]:
    what, declared = f"kernel {function}: {parameter.name}", f"declared `{spelled(parameter)}`"
    if not is_understood(parameter):
        raise ValueError(f"{what} is {declared}, and no array has elements of {parameter.ctype}")
    pointers = POINTEES["unsigned long long"]
    dtypes, alignment = POINTEES.get(parameter.ctype, Pointee((), parameter.alignment) if parameter.bytes else pointers)
    size = parameter.bytes or 1
    wanted = f"a tensor {' or '.join(dtypes) or 'of any dtype'}"
    wanted += ", None or an int" if parameter.ctype in ADDRESSES else " or None"

    def memory(value: object) -> Array | None:
        if value is None:
            return None
        array = array_of(value, what, must=f"{what} must be {wanted} ({declared})")
        if dtypes and array.dtype not in dtypes:
            wrong = f"got {array.dtype}: convert it to {dtypes[0]}"
            raise TypeError(f"{what} must be {' or '.join(dtypes)} ({declared}), {wrong}")
        if not (array.writable or parameter.const):
            raise ValueError(f"{what} is read-only memory, and the kernel may write there ({declared}): pass a copy")
        if size > 1 and (nbytes := array.size * array.itemsize) % size:
            raise ValueError(f"{what} must hold whole structs of {size} bytes ({declared}), got {nbytes} bytes")
        if past := array.address % alignment:
            raise ValueError(
                f"{what} must be aligned to {alignment} bytes ({declared}), but starts {past} past a multiple of that: "
                f"begin the slice elsewhere or pass a copy"
            )
        return array

    return memory


def _scalar_rule(function: str, parameter: Parameter) -> Callable[[Any], Any]:
    what, ctype = f"kernel {function}: {parameter.name}", parameter.ctype

    def boolean(value: object) -> Any:
        if type(value).__name__ != "bool":  # numpy's has the same name
            raise _wrong_kind(what, "bool", "True or False", value)
        return C_TYPES["bool"](value)

    if ctype == "bool":
        return boolean
    return _integer_rule(what, ctype) if ctype in INTEGERS else _float_rule(what, ctype)


def _wrong_kind(what: str, ctype: str, wanted: str, value: object) -> TypeError:
    hint = ": pass its .item()" if hasattr(value, "item") else ""
    return TypeError(f"{what} must be {wanted} (declared `{ctype}`), got {type(value).__name__}{hint}")


def _integer_rule(what: str, ctype: str) -> Callable[[Any], Any]:
    carrier, (bits, signed) = C_TYPES[ctype], INTEGERS[ctype]
    low = 0 if signed is False else -(1 << bits - 1)
    high = (1 << bits - 1) - 1 if signed else (1 << bits) - 1

    def integer(value: object) -> Any:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _wrong_kind(what, ctype, "an int", value)
        if not low <= (value := int(value)) <= high:
            raise ValueError(f"{what} must fit in `{ctype}`, {low} to {high}, got {value}")
        return carrier(value)

    return integer


def _float_rule(what: str, ctype: str) -> Callable[[Any], Any]:
    carrier, dtype = C_TYPES[ctype], FLOATS[ctype]
    largest = LARGEST[dtype]
    limit = f"{what} must fit in `{ctype}`, up to {largest:.6g}"

    def number(value: object) -> Any:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _wrong_kind(what, ctype, "a number", value)
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{limit}, got a larger int") from None
        if abs(value) > largest and not math.isinf(value):
            raise ValueError(f"{limit}, got {value:g}")
        return carrier(int(bits_of(np.array([value]), dtype)[0]) if carrier is ctypes.c_uint16 else value)

    return number
