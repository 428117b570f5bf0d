"""`PtxKernel`: an entry of a PTX file, executed on the CPU.

    kernel = PtxKernel("softmax.ptx")
    kernel[grid, block, shared_bytes](x, out, 128)

PTX is the text that NVRTC and Triton compile kernels to. The CPU executes this text instruction by instruction: g++
compiles each instruction as the PTX manual defines it, and threads run as fibers. Launches run under `observe`,
`check`, `schedule` and `time_limit` as those of a `CudaKernel` do. Findings and counts name the line of the source if
the PTX has `.loc` lines, as Triton writes them, and the line of the PTX otherwise.

Asynchronous instructions are done as late as the waits allow: copies (cp.async, cp.async.bulk) land at the wait that
completes them, and products of matrices (wgmma) are computed there. Their targets hold NaNs until then. So a kernel
with a missing wait gives wrong results in every run.
"""

import functools
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudascope.arguments.binder import Binder
from cudascope.arguments.launch_shape import LaunchShape, read_launch
from cudascope.cpp.parameters import Parameter as Declared
from cudascope.cpp.source import Source, read_source, source_path
from cudascope.cpp.types import C_TYPES
from cudascope.cpu.abi import Mode
from cudascope.cpu.library import Library
from cudascope.cpu.ptx_build import build_entry
from cudascope.kernels.on_cpu import CpuKernel
from cudascope.ptx.module import Entry, Module, Parameter, read_module
from cudascope.toolchain.ptxas import PtxText
from cudascope.translate.ptx.costs import Counters
from cudascope.translate.ptx.entry import entry_source


class PtxKernel:
    """An entry of a PTX module.

    Args:
        source: a file, or the PTX text itself.
        name: the entry. It may be left out if the module has one entry.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the text is no PTX, it has no such entry, or the entry has an instruction that the CPU runner does
            not execute. The message names the instruction and its line.
    """

    def __init__(self, source: str | Path, name: str | None = None) -> None:
        path = source_path(source, "PTX")
        self.text = read_source(path) if path else source
        self.module = read_module(self.text)
        names = list(self.module.entries)
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            raise ValueError(f"name must be an entry of the module ({', '.join(names) or 'it has none'}), got {name!r}")
        self.name, self.entry = name, self.module.entries[name]
        self.filename = str(source) if path else f"{name}.ptx"
        self._code = Code(self.text, self.module, self.entry, self.filename)
        self._source = Source(self._code.cpp, self.filename, Path(), (), ())
        self._binder = Binder(name, [_declared(parameter) for parameter in self.entry.parameters])
        self._kernels: dict[tuple[bool, ...], EntryOnCpu] = {}  # by which of the parameters are arrays

    def __repr__(self) -> str:
        return f"PtxKernel({self.filename!r}, {self.name!r})"

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        """`kernel[grid, block]` or `kernel[grid, block, shared_bytes]`: a function of the kernel's arguments.

        A parameter of 64 bits takes an array or None, a null pointer; the array must be writable, for PTX does not
        tell what is only read. An integer parameter takes an int, signed or not. `.b8 name[n]` takes bytes or a
        ctypes.Structure of n bytes. Arguments are checked as those of a CudaKernel are.
        """
        shape = read_launch(self.name, launch, self.entry.max_threads)
        if self.entry.threads and shape.block != self.entry.threads:
            raise ValueError(
                f"kernel {self.name}: block must be {self.entry.threads}, for which the PTX was compiled (.reqntid), "
                f"got {shape.block}"
            )

        def run(*args: object) -> None:
            self._launch(shape, args)

        return run

    def _launch(self, shape: LaunchShape, args: Sequence[object]) -> None:
        bound = self._binder.bind(args)
        if bound.device not in (None, "cpu"):
            raise ValueError(
                f"kernel {self.name}: {next(iter(bound.arrays))} must be on the CPU, where PTX is executed, "
                f"got {bound.device}"
            )
        is_array = tuple(each.name in bound.arrays for each in self._binder.parameters)
        if is_array not in self._kernels:
            pairs = zip(self._binder.parameters, is_array, strict=True)
            self._kernels[is_array] = self._on_cpu([each._replace(pointer=array) for each, array in pairs])
        self._kernels[is_array].launch(*shape, bound.values, arrays=bound.arrays)

    def compile(self) -> None:
        """Build, or find in the cache, what a launch here and now will need."""
        self._on_cpu(()).compile()

    def _on_cpu(self, parameters: Sequence[Declared]) -> "EntryOnCpu":
        return EntryOnCpu(self._source, self.name, parameters, self._code)


class Code:
    """An entry of a PTX text as C++, and its builds. `names` are the variables' names in the source.

    Raises:
        PtxError: the entry has an instruction that the CPU runner does not execute.
    """

    def __init__(
        self, text: str, module: Module, entry: Entry, filename: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.text, self.module, self.entry, self.filename = text, module, entry, filename
        self.names = names or {}
        self.cpp = entry_source(module, entry, filename, self.names)
        self.target = module.target.split(",")[0].strip()  # sm_90a
        self.build = functools.cache(lambda instrumented: build_entry(self.cpp, filename, instrumented=instrumented))

    @functools.cached_property
    def counted(self) -> tuple[Library, list[dict]]:
        """The build for `observe`, which counts the instructions that are executed, and the costs of what it counts."""
        counters = Counters()
        cpp = entry_source(self.module, self.entry, self.filename, self.names, counters)
        return build_entry(cpp, self.filename, instrumented=True), counters.costs


class EntryOnCpu(CpuKernel):
    """An entry with arrays for some of its parameters. Its places are those of the source that the PTX came from."""

    def __init__(self, source: Source, name: str, parameters: Sequence[Declared], code: Code) -> None:
        super().__init__(source, name, parameters)
        self.library = functools.cache(lambda instrumented: self._named(code.build(instrumented)))
        self._symbol, self._may_return = "simt_entry", False
        self._places, self._text = code.module.places, code.text.split("\n")
        self._lines = _lines_of(code) or self._text
        self._compiled, self.ptx = code, PtxText(code.text, code.entry.name, code.target)

    def _named(self, library: Library) -> Library:
        return library

    @functools.cached_property
    def _counted(self) -> tuple[Library, list[dict]]:
        library, costs = self._compiled.counted
        return self._named(library), costs

    def _built_for(self, mode: Mode) -> Library:
        if mode != Mode.OBSERVE:
            return super()._built_for(mode)
        library, self.costs = self._counted
        return library

    def _instructions(self, library: Library, sites: Iterable[int]) -> dict[int, str]:
        return {site: self._text[line - 1].strip() if line else "" for site, (_, line) in library.lines(sites).items()}

    def _located(self, library: Library, sites: Iterable[int]) -> dict[int, tuple[str, int]]:
        found = library.lines(sites)
        return {
            site: tuple(self._places.get(line, (file, line))) if file == library.source_name else (file, line)
            for site, (file, line) in found.items()
        }

    def _code(self, library: Library, site: int, file: str, line: int) -> str:
        """The instruction, which the line of the source does not tell."""
        ((_, at),) = library.lines([site]).values() if site else [("", 0)]
        code = self._text[at - 1].strip().rstrip(";") if at else ""
        return code if len(code) <= _LONGEST else f"{code[:_LONGEST]}…"


_LONGEST = 100  # characters of an instruction in a message


def _lines_of(code: Code) -> list[str]:
    """The file that most of the kernel's instructions come from, if it is there."""
    places = code.module.places
    files = [places[each.line].file for each in code.entry.body if each.line in places]
    file = max(set(files), key=files.count) if files else ""
    return linecache.getlines(file)  # a cell of a notebook has lines there, too


def _declared(parameter: Parameter) -> Declared:
    """A parameter of PTX for the binder. PTX says neither what is an address nor what is only read."""
    if parameter.count:
        ctype = f".{parameter.type}[{parameter.count}]"
        return Declared(parameter.name, ctype, False, False, bytes=parameter.bytes, alignment=parameter.alignment)
    ctype = f".{parameter.type}"
    return Declared(parameter.name, ctype if ctype in C_TYPES else f".b{8 * parameter.bytes}", False, False)
