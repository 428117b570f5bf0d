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

import ctypes
import functools
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudascope.arguments.arrays import Array, as_array
from cudascope.arguments.launch_shape import LaunchShape, read_launch
from cudascope.cpp.parameters import Parameter as Declared
from cudascope.cpp.source import Source
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
        is_text = isinstance(source, str) and "\n" in source
        self.text = source if is_text else Path(source).read_text(encoding="utf-8")
        self.module = read_module(self.text)
        names = list(self.module.entries)
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            raise ValueError(f"name must be an entry of the module ({', '.join(names) or 'it has none'}), got {name!r}")
        self.name, self.entry = name, self.module.entries[name]
        self.filename = f"{name}.ptx" if is_text else str(source)
        self._code = Code(self.text, self.module, self.entry, self.filename)
        self._source = Source(self._code.cpp, self.filename, Path(), (), ())
        self._kernels: dict[tuple[bool, ...], EntryOnCpu] = {}  # by which of the parameters are arrays

    def __repr__(self) -> str:
        return f"PtxKernel({self.filename!r}, {self.name!r})"

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        """`kernel[grid, block]` or `kernel[grid, block, shared_bytes]`: a function of the kernel's arguments.

        An array is passed for a parameter of 64 bits, and None for a null pointer. An integer parameter takes an int,
        signed or not. `.b8 name[n]` takes bytes or a ctypes.Structure of n bytes.
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
        parameters = self.entry.parameters
        if len(args) != len(parameters):
            takes = ", ".join(f".{each.type} {each.name}" for each in parameters)
            raise TypeError(f"kernel {self.name} takes {len(parameters)} arguments ({takes}), got {len(args)}")
        given = [_given(self.name, parameter, arg) for parameter, arg in zip(parameters, args, strict=True)]
        is_array = tuple(isinstance(each, Array) for each in given)
        if is_array not in self._kernels:
            declared = [
                Declared(parameter.name, parameter.type, pointer, const=False)
                for parameter, pointer in zip(parameters, is_array, strict=True)
            ]
            self._kernels[is_array] = self._on_cpu(declared)
        arrays = {each.name: array for each, array in zip(parameters, given, strict=True) if isinstance(array, Array)}
        values = [each.address if isinstance(each, Array) else each for each in given]
        self._kernels[is_array].launch(*shape, values, arrays=arrays)

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


_INTEGERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


def _given(kernel: str, parameter: Parameter, arg: object) -> object:
    """An argument as the launch takes it: an array, or a ctypes value of the parameter's size."""

    def refuse(wanted: str) -> TypeError:
        return TypeError(f"kernel {kernel}: {parameter.name} must be {wanted}, got {type(arg).__name__}")

    if parameter.count:
        if not isinstance(arg, (bytes, ctypes.Structure)) or len(bytes(arg)) != parameter.bytes:
            raise refuse(f"{parameter.bytes} bytes, or a ctypes.Structure of as many")
        return (ctypes.c_char * parameter.bytes).from_buffer_copy(bytes(arg))
    if parameter.type in ("f32", "f64"):
        if not isinstance(arg, (int, float)) or isinstance(arg, bool):
            raise refuse("a float")
        return (ctypes.c_float if parameter.type == "f32" else ctypes.c_double)(arg)
    if isinstance(arg, int):
        bits = 8 * parameter.bytes
        if not -(1 << bits - 1) <= arg < 1 << bits:
            raise ValueError(f"kernel {kernel}: {parameter.name} must fit into {bits} bits, got {arg}")
        return _INTEGERS[parameter.bytes](arg)
    if parameter.bytes < 8:
        raise refuse(f"an int of {8 * parameter.bytes} bits")
    array = None if arg is None else as_array(arg)
    if arg is not None and array is None:
        raise refuse("an array, None or an int")
    if array is not None and array.device != "cpu":
        raise ValueError(
            f"kernel {kernel}: {parameter.name} must be on the CPU, where PTX is executed, got {array.device}"
        )
    return ctypes.c_uint64(0) if array is None else array
