"""A .cu file compiled for the CPU: its entry points, its shared arrays, and the source line of each instruction."""

import ctypes
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pagewise.kernels
from pagewise.tools.cuda_build import CompileError, nvidia_headers, publish
from pagewise.tools.cuda_limits import MAX_SHARED_BYTES

KERNELS = Path(pagewise.kernels.__path__[0])


class SharedArray(NamedTuple):
    """A `__shared__` array of a file: where it lies among the thread block's shared memory, in bytes."""

    name: str
    offset: int
    bytes: int
    symbol: str = ""


class Library(NamedTuple):
    """A compiled file, loaded."""

    path: Path
    handle: ctypes.CDLL
    base: int  # where it lies in memory
    shared: tuple[SharedArray, ...]  # offsets count from the anchor
    dynamic_offset: int | None  # of `extern __shared__`, if the file has any
    dynamic_name: str
    source_name: str
    has_atomics: bool

    def lines(self, addresses: Iterable[int]) -> dict[int, tuple[str, int]]:
        """File and line of each return address, in the innermost function that is not of our or NVIDIA's headers."""
        return {address: _locate(self.path, address - self.base - 1) for address in _looked_up(self, addresses)}


@functools.cache
def load(path: Path, source_name: str) -> Library:
    """Load the library that `simt_build` compiled from `source_name`; its runtime must be loaded already."""
    try:
        handle = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CompileError(f"the kernel uses what the CPU runner does not have: {error}") from error
    function, arrays, has_atomics = _symbols(path)
    (anchor,) = (at for name, at, _ in arrays if name == "simt_anchor")
    dynamic = next((at for name, at, _ in arrays if name == "simt_dynamic"), None)
    names = [
        _variable_name(name)
        for name, at, size in arrays
        if at == dynamic and size == MAX_SHARED_BYTES and name != "simt_dynamic"
    ]
    shared = (
        SharedArray(_variable_name(name), at - anchor, size, name)
        for name, at, size in arrays
        if at not in (anchor, dynamic)
    )
    handle.simt_anchor_address.restype = ctypes.c_void_p
    address = ctypes.cast(handle.simt_anchor_address, ctypes.c_void_p).value or 0
    return Library(
        path, handle, address - function, tuple(shared), None if dynamic is None else dynamic - anchor,
        " or ".join(names), source_name, has_atomics,
    )  # fmt: skip


def _symbols(path: Path) -> tuple[int, list[tuple[str, int, int]], bool]:
    """A library's anchor function (its offset), thread-local variables (name, offset, bytes), and if it has atomics.

    Read from the ELF symbol table, once: the result is kept beside the library.
    """
    kept = path.with_suffix(".json")
    if not kept.exists():
        image = path.read_bytes()
        symbols = sorted(set(_elf_symbols(image)))
        function = next(value for name, _, value, _ in symbols if name == "simt_anchor_address")
        local = [(name, at, size) for name, kind, at, size in symbols if kind == 6 and not name.startswith("_ZGV")]
        publish(kept, json.dumps([function, local, b"simt_exchange_if" in image]).encode())
    function, local, has_atomics = json.loads(kept.read_text())
    return function, [tuple(each) for each in local], has_atomics


def _elf_symbols(image: bytes) -> Iterable[tuple[str, int, int, int]]:
    """(name, type, value, size) of every defined symbol of a 64-bit ELF file."""
    number = lambda at, size: int.from_bytes(image[at : at + size], "little")  # noqa: E731
    sections, entry, count = number(40, 8), number(58, 2), number(60, 2)
    headers = [sections + i * entry for i in range(count)]
    for header in headers:
        if number(header + 4, 4) != 2:  # a symbol table
            continue
        start, size = number(header + 24, 8), number(header + 32, 8)
        names = number(headers[number(header + 40, 4)] + 24, 8)
        for at in range(start, start + size, 24):
            if number(at + 6, 2):
                name = names + number(at, 4)
                yield (
                    image[name : image.index(b"\0", name)].decode(),
                    image[at + 4] & 15,
                    number(at + 8, 8),
                    number(at + 16, 8),
                )


def _variable_name(symbol: str) -> str:
    """`tile` of _ZZ9transposePfPKfE4tile: the last name of a mangled one."""
    if not symbol.startswith("_Z"):
        return symbol
    ends = [m.end() for m in re.finditer(r"\d+", symbol)]
    for end in reversed(ends):
        digits = re.search(r"\d+$", symbol[:end])
        for start in range(digits.start(), end) if digits else ():
            length = int(symbol[start:end])
            name = symbol[end : end + length]
            if (
                length
                and len(name) == length
                and re.fullmatch(r"[A-Za-z_]\w*", name)
                and re.fullmatch(r"(_\d+|E?_?)*", symbol[end + length :])
            ):
                return name
    return symbol


_lines: dict[tuple[Path, int], tuple[str, int]] = {}


def _looked_up(library: Library, addresses: Iterable[int]) -> list[int]:
    """Ask addr2line (binutils, which g++ needs) or llvm-symbolizer for the lines not yet known."""
    addresses = [address for address in addresses if address]
    offsets = sorted({address - library.base - 1 for address in addresses})
    new = [offset for offset in offsets if (library.path, offset) not in _lines]
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if new and tool:
        done = subprocess.run(
            [tool, "-a", "-i", "-e", str(library.path)], input="\n".join(map(hex, new)), capture_output=True, text=True
        )
        for block in re.split(r"^0x", done.stdout, flags=re.M)[1:]:
            at, *frames = block.splitlines()
            _lines[library.path, int(at, 16)] = _innermost(frames, library.source_name)
    return addresses


def _innermost(frames: Sequence[str], source_name: str) -> tuple[str, int]:
    for frame in frames:
        file, _, line = frame.partition(" (")[0].rpartition(":")
        ours = file in (str(KERNELS / "simt.h"), "pagewise") or "/headers-" in file
        if os.path.basename(file) in (os.path.basename(source_name), "<stdin>"):
            file = source_name
        if file == source_name or not (ours or file.startswith((str(nvidia_headers()), "/usr/", "??"))):
            return file, int(line) if line.isdigit() else 0
    return source_name, 0


def _locate(path: Path, offset: int) -> tuple[str, int]:
    return _lines.get((path, offset), ("", 0))
