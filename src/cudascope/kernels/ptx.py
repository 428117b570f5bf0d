"""`PtxKernel`: an entry of a PTX file, executed on the CPU.

    kernel = PtxKernel("softmax.ptx")
    kernel[grid, block, shared_bytes](x, out, 128)

g++ compiles each instruction as the PTX manual defines it. Launches run under `observe`, `check`, `schedule` and
`time_limit` as those of a `CudaKernel` do. Findings and counts name the line of the source if the PTX has `.loc` lines,
as Triton writes them, and the line of the PTX otherwise.

Asynchronous instructions are done as late as the waits allow: copies (cp.async, cp.async.bulk) land at the wait that
completes them, and products of matrices (wgmma) are computed there. Their targets hold NaNs until then. So a kernel
with a missing wait gives wrong results in every run.
"""

import functools
import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudascope.arguments.binder import Binder
from cudascope.arguments.launch_shape import LaunchShape, read_launch
from cudascope.arguments.values import size_of
from cudascope.cpp.signature import Parameter as Declared
from cudascope.cpp.source import CompileError, Source, read_source, source_path
from cudascope.cpp.types import C_TYPES
from cudascope.cpu.build import build_entry
from cudascope.cpu.executable import Executable, Ptx, may_return
from cudascope.cpu.library import Library
from cudascope.kernels.on_cpu import CpuKernel
from cudascope.ptx.module import Entry, Module, Parameter, PtxError, line_of, read_module
from cudascope.toolchain.compiler import run_tool
from cudascope.toolchain.nvrtc import compile_ptx
from cudascope.toolchain.ptxas import PtxText
from cudascope.toolchain.sass import SassLoop, loops_of_ptx
from cudascope.translate.ptx.counters import Counters, Part
from cudascope.translate.ptx.entry import entry_source


class PtxKernel:
    """An entry of a PTX module.

    Args:
        source: a file, or the PTX text itself.
        name: the entry. It may be left out if the module has one entry.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the text is not PTX, it lacks the entry, the entry requires a cluster of several thread blocks, or
            the CPU runner does not execute an instruction of the entry. The message names the instruction, its line,
            and the line of the source if the PTX tells it.
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
        try:
            self.executable = _executable(name, self.text, self.module, self.entry, self.filename)
        except PtxError as error:
            line, message = line_of(error)
            file, source_line = self.module.places.get(line, ("", 0))
            where = f"{file}, line {source_line} (line {line} of its PTX)" if file else f"line {line}"
            raise PtxError(f"kernel {name}, {where}: {message}") from None
        self._binder = Binder(name, [_declared(parameter) for parameter in self.entry.parameters])
        self._kernels: dict[tuple[bool, ...], CpuKernel] = {}  # by which of the parameters are arrays

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
        return functools.partial(self._launch, shape)

    def _launch(self, shape: LaunchShape, *args: object) -> None:
        bound = self._binder.bind(args)
        if bound.device not in (None, "cpu"):
            raise ValueError(
                f"kernel {self.name}: {next(iter(bound.arrays))} must be on the CPU, where PTX is executed, "
                f"got {bound.device}"
            )
        is_array = tuple(each.name in bound.arrays for each in self._binder.parameters)
        if is_array not in self._kernels:
            pairs = zip(self._binder.parameters, is_array, strict=True)
            declared = [each._replace(pointer=array) for each, array in pairs]
            self._kernels[is_array] = CpuKernel(self.executable, declared)
        self._kernels[is_array].launch(*shape, bound.values, arrays=bound.arrays)

    def compile(self) -> None:
        """Build, or find in the cache, what a launch here and now will need."""
        CpuKernel(self.executable, ()).compile()

    def loops(self, arch: str | None = None) -> tuple[SassLoop, ...]:
        """The loops of the machine code for `arch` ("sm_90"), in the order of their addresses.

        Without `arch`, the code is for the GPU that the PTX names. Raises what `sass.loops_of_ptx` raises.
        """
        return loops_of_ptx(self.executable.ptx.text, arch)


def executable_through_ptx(source: Source, name: str, parameters: Sequence[Declared], arch: str) -> Executable:
    """Kernel `name` of `source` as NVRTC compiles it for `arch`. Names and lines are those of the source.

    CompileError: NVRTC refuses the source, or the kernel needs what the CPU runner does not execute. RuntimeError:
    cuda-bindings or NVRTC is not installed.
    """
    ptx = compile_ptx(source, name, arch)
    module = read_module(ptx.text)
    entry = module.entries[ptx.symbol]
    names = {symbol: variable for variable, symbol in ptx.variables.items()}
    try:
        executable = _executable(name, ptx.text, module, entry, f"{Path(source.filename).stem}.ptx", source, names)
    except PtxError as error:
        number, message = line_of(error)
        file, line = module.places.get(number, ("its PTX", number))
        raise CompileError(f"kernel {name}: {file}, line {line}: {message}") from None
    sizes = [8 if each.pointer else size_of(each) for each in parameters]
    if sizes != (compiled := [each.bytes for each in entry.parameters]):
        raise CompileError(f"kernel {name}: parameters were read as {sizes} bytes, but compiled to {compiled}")
    return executable


def _executable(
    name: str,
    text: str,
    module: Module,
    entry: Entry,
    filename: str,
    source: Source | None = None,
    names: Mapping[str, str] | None = None,
) -> Executable:
    """An entry of a PTX text. PtxError if it has an instruction that the CPU runner does not execute.

    Args:
        source: the CUDA C++ that it was compiled from. None: messages quote the PTX.
        names: the variables' names in the source.
    """
    mangled = [each.name for each in module.variables if each.name.startswith("_Z")]
    names = dict(zip(mangled, _last_names(mangled), strict=True)) | dict(names or {})
    cpp, lines = entry_source(module, entry, filename, names), text.split("\n")
    named = _with_names_of_source if source else lambda library: library

    @functools.cache
    def library(instrumented: bool) -> Library:
        return named(build_entry(cpp, filename, instrumented=instrumented))

    @functools.cache
    def counted() -> tuple[Library, list[Part]]:
        counters = Counters()
        counting = entry_source(module, entry, filename, names, counters)
        return named(build_entry(counting, filename, instrumented=True)), counters.parts

    target = module.target.split(",")[0].strip()  # sm_90a
    ptx = Ptx(PtxText(text, entry.name, target), lines, module.places, counted, is_quoted=source is None)
    if source:
        shown, returns = source.text.split("\n"), may_return(source, name, marked=False)
    else:
        shown, returns = _lines_of(module, entry) or lines, lambda: False
    return Executable(name, source or Source(cpp, filename, Path(), (), ()), "simt_entry", library, shown, returns, ptx)


def _last_names(mangled: Sequence[str]) -> list[str]:
    """The last part of each name in the source: `table` for _ZZ1kPfE5table."""
    lines = run_tool("c++filt", lines=mangled).splitlines() if mangled else []
    return [line.rpartition("::")[2] for line in lines]


def _with_names_of_source(library: Library) -> Library:
    """Return the library with the source's names for its arrays: `tile` for ptx__ZZ1kPfE4tile."""
    arrays = [*library.shared, *library.objects]
    names = [each.name.removeprefix("ptx_") for each in arrays]
    names += [library.dynamic_name.removeprefix("ptx_")] * (library.dynamic_offset is not None)
    plain = _last_names(names)
    named = [each._replace(name=name) for each, name in zip(arrays, plain, strict=False)]
    shared, objects = tuple(named[: len(library.shared)]), tuple(named[len(library.shared) :])
    return library._replace(shared=shared, objects=objects, dynamic_name="".join(plain[len(arrays) :]))


def _lines_of(module: Module, entry: Entry) -> list[str]:
    """The file that most of the kernel's instructions come from, if it is there."""
    places = module.places
    files = [places[each.line].file for each in entry.body if each.line in places]
    file = max(set(files), key=files.count) if files else ""
    return linecache.getlines(file)  # a cell of a notebook has lines there, too


def _declared(parameter: Parameter) -> Declared:
    """A parameter of PTX for the binder. PTX says neither what is an address nor what is only read."""
    if parameter.count:
        ctype = f".{parameter.type}[{parameter.count}]"
        return Declared(parameter.name, ctype, False, False, bytes=parameter.bytes, alignment=parameter.alignment)
    ctype = f".{parameter.type}"
    return Declared(parameter.name, ctype if ctype in C_TYPES else f".b{8 * parameter.bytes}", False, False)
