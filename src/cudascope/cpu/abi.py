"""The data that Python and C++ exchange, as the C++ declares it: runtime/kinds.h has enums, launch.h structures."""

import ctypes
import functools
import re
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import numpy as np

from cudascope.cpu import build
from cudascope.toolchain.headers import RUNTIME


def _declarations(header: Path, word: str, names: str = r"\w+") -> Iterator[tuple[str, str]]:
    """Yield the name and the body of each `enum` or `struct` of a header whose name matches."""
    text = re.sub(r"//.*|\bsimt::", "", header.read_text(encoding="utf-8"))
    yield from re.findall(rf"^{word} ({names})\b[^{{;]*\{{(.*?)\}};", text, re.MULTILINE | re.DOTALL)


_ENUMS = _declarations(RUNTIME / "kinds.h", "enum")
_KINDS = {name: IntEnum(name, re.findall(r"\w+", body), start=0) for name, body in _ENUMS}
Mode, Space, Access, Collective = (_KINDS[name] for name in ("Mode", "Space", "Access", "Collective"))
SPACES, ACCESSES = ([kind.name.lower() for kind in kinds] for kinds in (Space, Access))

_TYPES: dict[str, type] = {f"u{bits}": getattr(ctypes, f"c_uint{bits}") for bits in (8, 16, 32, 64)}
_TYPES |= {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "char": ctypes.c_char}
_TYPES |= {"unsigned": ctypes.c_uint32}


def _fields(body: str) -> Iterator[tuple[str, type]]:
    for declaration in filter(None, map(str.strip, body.split(";"))):
        if function := re.fullmatch(r"\w+ \(\*(\w+)\)\(.*\)", declaration):
            yield function[1], ctypes.c_void_p
            continue
        const, base, declarators = re.fullmatch(r"(const )?(\w+)(\W.*)", declaration, re.DOTALL).groups()
        for stars, name, length in re.findall(r"(\**)\s*(\w+)(?:\[(\d+)\])?", declarators):
            plain = ctypes.c_void_p if base in ("void", "char", "u8", "Event") else ctypes.POINTER(_TYPES[base])
            plain = ctypes.c_char_p if const and base == "char" else plain
            kind = {"": _TYPES.get(base), "*": plain, "**": ctypes.POINTER(ctypes.c_void_p)}[stars]
            yield name, kind * int(length) if length else kind


def structures(header: Path, names: str = r"\w+") -> list[type]:
    """Return the structures of a header whose name matches. Those that they point to must be known."""
    found = []
    for name, body in _declarations(header, "struct", names):
        _TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": [*_fields(body)]})
        found.append(_TYPES[name])
    return found


_, REGION, SHARED_ARRAY, WAITER, ERROR, _, _EVENT, LAUNCH = structures(RUNTIME / "launch.h")
EVENT = np.dtype(_EVENT)


@functools.cache
def runtime() -> ctypes.PyDLL:
    """The compiled runtime, once it is known to lay out its structures as this file does."""
    library = build.runtime()
    library.simt_sizeof_launch.restype = ctypes.c_uint64
    assert library.simt_sizeof_launch() == ctypes.sizeof(LAUNCH)
    return library
