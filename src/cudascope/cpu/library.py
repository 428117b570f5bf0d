"""A .cu file compiled for the CPU: its entry points, its shared arrays, and the source line of each instruction."""

import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cudascope.cpp.source import CompileError
from cudascope.toolchain.cache import publish
from cudascope.toolchain.compiler import HERE, run_tool


class SharedArray(NamedTuple):
    """A `__shared__` array of a file, and its offset in the thread block's shared memory, in bytes."""

    name: str
    offset: int
    bytes: int
    symbol: str = ""


class Variable(NamedTuple):
    """A `__constant__`, `__device__` or `__managed__` variable of a file, and its address."""

    name: str  # with its namespace
    address: int
    bytes: int


class Warned(NamedTuple):
    """What the compiler has warned of: the line of the source, and a sentence. `is_maybe`: on one of several ways."""

    line: int
    text: str
    is_maybe: bool


class ParameterType(NamedTuple):
    """A parameter's type in full, and its size and alignment. A pointer has the size and alignment of its pointee."""

    spelled: str
    bytes: int  # 0: it is declared and not defined
    alignment: int


_TYPE = re.compile(r"T = (.*?)(?:\]|; |$)")  # of __PRETTY_FUNCTION__


class _ParameterRow(ctypes.Structure):
    _fields_ = (("type", ctypes.c_char_p), ("bytes", ctypes.c_uint64), ("alignment", ctypes.c_uint64))


class Library(NamedTuple):
    """A compiled file, loaded."""

    path: Path
    handle: ctypes.CDLL
    base: int  # where it lies in memory
    shared: tuple[SharedArray, ...]
    guards: tuple[SharedArray, ...]  # what the compiler keeps beside those of a class: constructed yet?
    dynamic_offset: int | None  # of `extern __shared__`, if the file has any
    dynamic_name: str
    shared_segment: int  # bytes of a thread block's shared memory, the largest dynamic part and all gaps with it
    source_name: str
    folder: Path  # of the source
    files: tuple[str, ...]  # of the user, besides the source
    has_atomics: bool
    has_grid_sync: bool
    has_scopes: bool  # atomics or fences of block scope
    variables: tuple[Variable, ...]
    objects: tuple[SharedArray, ...]  # all constants and variables, by address: their offset is the address
    warnings: tuple[Warned, ...]

    def parameters(self, entry: str) -> list[ParameterType]:
        """Return the types that the compiler gives the parameters of the kernel with symbol `entry`."""
        function = getattr(self.handle, f"{entry}_parameters")
        function.restype = ctypes.POINTER(_ParameterRow)
        rows = itertools.takewhile(lambda row: row.type, function())
        return [ParameterType(_TYPE.search(row.type.decode())[1], row.bytes, row.alignment) for row in rows]

    def lines(self, addresses: Iterable[int]) -> dict[int, tuple[str, int]]:
        """File and line of each return address, in the innermost function that is in a file of the user's."""
        offsets = {address: address - self.base - 1 for address in addresses if address}
        found = _located(self, sorted(set(offsets.values())))
        return {address: found[offset] for address, offset in offsets.items()}


@functools.cache
def load(
    path: Path, source_name: str, folder: Path, files: tuple[str, ...] = (), tables: Sequence[str] = ("simt_variables",)
) -> Library:
    """Load the library that `build` compiled from `source_name`, which includes `files` of the user's, from `folder`.

    Each file of a program has one of the `tables` of variables. The runtime must be loaded already.
    """
    try:
        handle = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        path.unlink(missing_ok=True)
        if lacks := re.search(r"undefined symbol: (\S+)", str(error)):
            name = run_tool("c++filt", lacks[1]).strip()
            raise CompileError(
                f"{source_name}: {name} is declared and has no body, neither in this file nor in a header that it "
                f"includes: include the file that defines it"
            ) from None
        raise CompileError(f"the kernel uses what the CPU runner does not have: {error}") from error
    symbols = _symbols(path)
    at = {each.symbol: each.offset for each in symbols}
    dynamic = at.get("simt_dynamic")
    shared, guards, dynamic_names = [], [], []
    address = ctypes.cast(handle.simt_base, ctypes.c_void_p).value or 0
    base = address - at["simt_base"]
    objects = [each for each in symbols if each.kind == "OBJECT" and not each.symbol.startswith(_NOT_OURS)]
    for each in symbols:
        if each.symbol in ("simt_dynamic", "_TLS_MODULE_BASE_") or not each.is_local:  # the linker's, on aarch64
            continue
        if each.offset == dynamic:
            dynamic_names.append(each.name)
        elif each.symbol.startswith("_ZGV") or each.symbol == "__tls_guard":
            guards.append(SharedArray(each.name, each.offset, each.bytes))
        else:
            shared.append(SharedArray(each.name, each.offset, each.bytes, each.symbol))
    segment = max((each.offset + each.bytes for each in symbols if each.is_local), default=0)
    in_blocks = tuple(shared), tuple(guards), dynamic, " or ".join(dynamic_names), segment
    calls = [name in at for name in ("simt_exchange_if", "simt_grid_sync", "simt_block_scope")]
    objects = [SharedArray(each.name, base + each.offset, each.bytes, each.symbol) for each in objects]
    objects.sort(key=lambda each: each.offset)
    found = tuple(_variables(handle, tables)), tuple(objects), tuple(_warnings(path))
    return Library(path, handle, base, *in_blocks, source_name, folder, files, *calls, *found)


class _Row(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("address", ctypes.c_void_p), ("bytes", ctypes.c_ulong))


def _variables(handle: ctypes.CDLL, tables: Sequence[str]) -> Iterator[Variable]:
    for table in tables:
        rows = ctypes.cast(getattr(handle, table), ctypes.POINTER(_Row))
        for row in itertools.takewhile(lambda row: row.name is not None, rows):
            yield Variable(row.name.decode(), row.address, row.bytes)


_OF_THE_RUNTIME = ("simt_base", "simt_exchange_if", "simt_grid_sync", "simt_block_scope")
_NOT_OURS = ("simt_", "_Z12simt_", "__", "completed.", "_ZGV")  # the runtime's and the linker's


class _Symbol(NamedTuple):
    symbol: str
    name: str  # in the source: `tile` of _ZZ9transposePfPKfE4tile
    offset: int
    bytes: int
    kind: str  # "TLS", local to a thread; "OBJECT", a constant or a variable; "FUNC" or ""

    @property
    def is_local(self) -> bool:
        return self.kind == "TLS"


def _symbols(path: Path) -> list[_Symbol]:
    """The variables of a library, sorted by name, and what else it has to do with the runtime.

    nm and c++filt (binutils, which g++ needs) read them once: the result is kept beside the library.
    """
    kept = path.with_suffix(".json")
    with contextlib.suppress(FileNotFoundError, ValueError):  # not read yet, or not whole
        return [_Symbol(*each) for each in json.loads(kept.read_text(encoding="utf-8"))]
    table = run_tool("nm", "--format=sysv", str(path))
    rows = [[part.strip() for part in line.split("|")] for line in table.splitlines() if "|" in line]
    # threadIdx and its like are thread-local, too. They are the runtime's, and have no value here
    rows = sorted(row for row in rows if (row[3] in ("TLS", "OBJECT") and row[1]) or row[0] in _OF_THE_RUNTIME)
    names = [name.rpartition("::")[2] for name in run_tool("c++filt", lines=[row[0] for row in rows]).splitlines()]
    found = [
        _Symbol(symbol, name, int(value or "0", 16), int(size or "0", 16), kind)
        for (symbol, value, _, kind, size, *_), name in zip(rows, names, strict=True)
    ]
    publish(kept, json.dumps(found).encode())
    return found


def warnings_of(path: Path) -> Path:
    """The file beside a library that keeps what the compiler has warned of."""
    return path.with_suffix(".warnings")


def _warnings(path: Path) -> Iterator[Warned]:
    with contextlib.suppress(FileNotFoundError):
        for line in warnings_of(path).read_text(encoding="utf-8").splitlines():
            yield Warned(*json.loads(line))


_lines: dict[tuple[Path, Path, int], tuple[str, int]] = {}
_FRAME = re.compile(r"(.*):(\d+|\?)(?: \(discriminator \d+\))?")


def _located(library: Library, offsets: Sequence[int]) -> dict[int, tuple[str, int]]:
    """File and line of each instruction; addr2line is asked for those not yet known."""
    keys = {offset: (library.path, library.folder, offset) for offset in offsets}
    new = [hex(offset) for offset, key in keys.items() if key not in _lines]
    if new:
        found = run_tool("addr2line", "-a", "-i", "-e", str(library.path), lines=new)
        for block in re.split(r"^0x", found, flags=re.M)[1:]:
            at, *frames = block.splitlines()
            _lines[library.path, library.folder, int(at, 16)] = _innermost(frames, library)
    return {offset: _lines.get(key, ("", 0)) for offset, key in keys.items()}


def _innermost(frames: Sequence[str], library: Library) -> tuple[str, int]:
    for frame in frames:
        file, line = _FRAME.fullmatch(frame).groups()
        if file.startswith(f"{HERE}/"):  # the source's folder, or a name that is no path
            file = re.sub(r"^(\./)+", "", file.removeprefix(f"{HERE}/"))
            file = library.source_name if file in (library.source_name, "<stdin>") else str(library.folder / file)
        if file == library.source_name or file in library.files:
            return file, int(line) if line.isdigit() else 0
    return library.source_name, 0
