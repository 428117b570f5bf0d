"""The data that Python and the runtime exchange, read from runtime/kinds.h (enums) and launch.h (structures)."""

import ctypes
import functools
import re
from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from cudascope.cpu import build
from cudascope.toolchain.headers import RUNTIME


def _declarations(header: str, word: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the body of each `enum` or `struct` of a header."""
    text = re.sub(r"//.*", "", (RUNTIME / header).read_text(encoding="utf-8"))
    yield from re.findall(rf"^{word} (\w+)[^{{;]*\{{(.*?)\}};", text, re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------------------------ kinds

_KINDS = {name: IntEnum(name, re.findall(r"\w+", body), start=0) for name, body in _declarations("kinds.h", "enum")}
Mode, Space, Access, Collective = (_KINDS[name] for name in ("Mode", "Space", "Access", "Collective"))
SPACES, ACCESSES = ([kind.name.lower() for kind in kinds] for kinds in (Space, Access))

# ------------------------------------------------------------------------------------------------ structures

_TYPES: dict[str, type] = {f"u{bits}": getattr(ctypes, f"c_uint{bits}") for bits in (8, 16, 32, 64)}
_TYPES |= {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "char": ctypes.c_char}


def _fields(body: str) -> Iterator[tuple[str, type]]:
    for declaration in filter(None, map(str.strip, body.split(";"))):
        if function := re.fullmatch(r"void \(\*(\w+)\)\(.*\)", declaration):
            yield function[1], ctypes.c_void_p
            continue
        base, declarators = re.fullmatch(r"(\w+)(\W.*)", declaration, re.DOTALL).groups()
        for stars, name, length in re.findall(r"(\**)\s*(\w+)(?:\[(\d+)\])?", declarators):
            plain = ctypes.c_void_p if base in ("void", "char", "u8", "Event") else ctypes.POINTER(_TYPES[base])
            kind = {"": _TYPES.get(base), "*": plain, "**": ctypes.POINTER(ctypes.c_void_p)}[stars]
            yield name, kind * int(length) if length else kind


for _name, _body in _declarations("launch.h", "struct"):
    _TYPES[_name] = type(_name, (ctypes.Structure,), {"_fields_": [*_fields(_body)]})

REGION, SHARED_ARRAY, WAITER, ERROR = (_TYPES[name] for name in ("Region", "SharedArray", "Waiter", "Error"))
LAUNCH, EVENT = _TYPES["Launch"], np.dtype(_TYPES["Event"])


@functools.cache
def runtime() -> ctypes.PyDLL:
    """The compiled runtime, once it is known to lay out its structures as this file does."""
    library = build.runtime()
    library.simt_sizeof_launch.restype = ctypes.c_uint64
    assert library.simt_sizeof_launch() == ctypes.sizeof(LAUNCH)
    return library
