"""What a launch on the CPU executes: a kernel's builds, and what reports say of the places in them."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cudascope.cpp.signature import base_name
from cudascope.cpp.source import Source
from cudascope.cpu.abi import Mode
from cudascope.cpu.build import build, entry_symbol
from cudascope.cpu.library import Library
from cudascope.toolchain.ptxas import PtxText
from cudascope.translate.ptx.counters import Part
from cudascope.translate.returns import early_returns, has_unmarked_return, kernel_bodies

_LONGEST = 100  # characters of an instruction in a message


class Ptx(NamedTuple):
    """The PTX that is executed."""

    text: PtxText
    lines: Sequence[str]
    places: Mapping[int, tuple[str, int]]  # the file and the line of the source, by the line of the PTX
    counted: Callable[[], tuple[Library, list[Part]]]  # the build that counts instructions, and its counted parts
    is_quoted: bool  # in messages, in the place of the source


class Executable(NamedTuple):
    """Kernel `name`, as a launch executes it."""

    name: str
    source: Source  # it declares the kernel's variables
    symbol: str  # of the function that a launch calls
    library: Callable[[bool], Library]  # the plain build, and the instrumented one (True). CompileError
    lines: Sequence[str]  # of the file that reports show
    may_return: Callable[[], bool]  # by a `return` that does not tell: a barrier may wait for a thread that has left
    ptx: Ptx | None = None

    def build(self, mode: Mode) -> Library:
        """The build that a launch in this mode executes, from the cache or from the compiler."""
        if self.ptx and mode == Mode.OBSERVE:
            return self.ptx.counted()[0]
        return self.library(mode != Mode.PLAIN)

    def located(self, library: Library, sites: Iterable[int]) -> dict[int, tuple[str, int]]:
        """File and line of each return address, in the source that PTX came from if the PTX tells it."""
        found = library.lines(sites)
        if self.ptx:
            own = {site: line for site, (file, line) in found.items() if file == library.source_name}
            found |= {site: self.ptx.places[line] for site, line in own.items() if line in self.ptx.places}
        return found

    def instructions(self, library: Library, sites: Iterable[int]) -> dict[int, str]:
        """The PTX instruction of each return address, if PTX is executed."""
        if not self.ptx:
            return {}
        return {
            site: self.ptx.lines[line - 1].strip() if file == library.source_name and line else ""
            for site, (file, line) in library.lines(sites).items()
        }

    def quoted(self, library: Library, site: int, file: str, line: int) -> str:
        """The instruction, or the line if the line is in the kernel's own file, and "" otherwise."""
        if self.ptx and self.ptx.is_quoted:  # a line of the source does not tell the instruction
            code = self.instructions(library, [site]).get(site, "").rstrip(";")
            return code if len(code) <= _LONGEST else f"{code[:_LONGEST]}…"
        return self.lines[line - 1].strip() if file == self.source.filename and 0 < line <= len(self.lines) else ""


def executable_of(source: Source, name: str) -> Executable:
    """Kernel `name` of `source` ("softmax<float, 128>"), compiled by the host's compiler when it is first needed."""
    library = functools.cache(lambda instrumented: build(source, name, instrumented=instrumented))
    lines, returns = source.text.split("\n"), may_return(source, name, marked=True)
    return Executable(name, source, entry_symbol(name), library, lines, returns)


def may_return(source: Source, name: str, *, marked: bool) -> Callable[[], bool]:
    """A function that reads once whether kernel `name` of `source` may have a `return` that tells the runtime nothing.

    In a build whose returns are `marked` these are the returns of macros and of headers.
    """

    def reads() -> bool:
        file, function = source.read(), base_name(name)
        kernels = kernel_bodies(file, (piece for piece in file.pieces if function in piece.names))
        is_early = not marked and any(early_returns(file, each) for each in kernels)
        return is_early or has_unmarked_return(file, function)

    return functools.cache(reads)
