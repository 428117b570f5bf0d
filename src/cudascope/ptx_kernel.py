"""`PtxKernel`: an entry of a PTX file, executed on a CPU.

    kernel = PtxKernel("softmax.ptx")
    kernel[grid, block, shared_bytes](x, out, 128)

The PTX may be NVRTC's or Triton's. Launches run under `observe`, `check`, `schedule` and `time_limit` as those of a
CudaKernel do. Findings and counts name the source line that the PTX was compiled from, if the PTX has `.loc` lines.
"""

import ctypes
import functools
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudascope.arrays import Array, as_array
from cudascope.build import Source
from cudascope.limits import read_launch
from cudascope.parameters import Parameter as Declared
from cudascope.ptx_module import Parameter, read_module
from cudascope.simt.launch import CpuKernel
from cudascope.simt.ptx.build import build_entry
from cudascope.simt.ptx.entry import entry_source


class PtxKernel:
    """An entry of a PTX module.

    Args:
        source: a file, or the PTX text itself.
        name: the entry; it may be left out if the module has one entry.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the module has no such entry, or the entry has an instruction that the CPU runner does not execute.
            The message names the instruction and its line.
    """

    def __init__(self, source: str | Path, name: str | None = None) -> None:
        is_text = isinstance(source, str) and "\n" in source
        text = source if is_text else Path(source).read_text()
        self.module = read_module(text)
        names = list(self.module.entries)
        if name is None and len(names) == 1:
            name = names[0]
        if name not in self.module.entries:
            raise ValueError(f"name must be an entry of the module, one of {', '.join(names) or 'none'}; got {name!r}")
        self.name, self.entry = name, self.module.entries[name]
        self.filename = f"{name}.ptx" if is_text else str(source)
        cpp = entry_source(self.module, self.entry, self.filename)
        self._source = Source(cpp, self.filename, None, (), ())
        self._text = text.split("\n")
        self._kernels: dict[tuple[bool, ...], CpuKernel] = {}

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        shape = read_launch(self.name, launch, self.entry.max_threads)

        def run(*args: object) -> None:
            self._launch(shape, args)

        return run

    def _launch(self, shape, args) -> None:
        if len(args) != len(self.entry.parameters):
            raise TypeError(f"kernel {self.name} takes {len(self.entry.parameters)} arguments, got {len(args)}")
        values, arrays, declared = [], {}, []
        for parameter, arg in zip(self.entry.parameters, args, strict=True):
            array = as_array(arg) if parameter.bytes == 8 and not isinstance(arg, (int, float, bytes, type(None))) else None
            if array is not None:
                arrays[parameter.name] = array
                values.append(array.address)
            else:
                values.append(_value(self.name, parameter, arg))
            declared.append(Declared(parameter.name, parameter.type, array is not None, False))
        pattern = tuple(each.pointer for each in declared)
        if pattern not in self._kernels:
            self._kernels[pattern] = _OnCpu(self, declared)
        self._kernels[pattern].launch(*shape, values, arrays=arrays)


class _OnCpu(CpuKernel):
    """An entry with arrays for some of its parameters. Its places are those of the source of the PTX."""

    def __init__(self, kernel: PtxKernel, parameters: list[Declared]) -> None:
        super().__init__(kernel._source, kernel.name, parameters)
        self._kernel, self._symbol, self._may_return = kernel, "simt_entry", False
        self.library = functools.cache(
            lambda instrumented: build_entry(kernel._source.text, kernel.filename, instrumented=instrumented)
        )
        first = kernel.module.places.get(kernel.entry.line + 1)
        self._lines = kernel._text

    def _located(self, library, sites):
        places = self._kernel.module.places
        return {
            site: tuple(places.get(line, (file, line))) if file == library.source_name else (file, line)
            for site, (file, line) in library.lines(sites).items()
        }

    def _code(self, library, site, file, line):
        (at,) = library.lines([site]).values()
        return self._lines[at[1] - 1].strip() if at[1] else ""

    def _observed(self, request, library, *rest):
        """The report shows the lines of the source that the PTX was compiled from."""
        launch = super()._observed(request, library, *rest)
        places = self._located(library, [count.site for count in request.counts[: request.num_counts]]).values()
        texts = {line: self._text_at(library, file, line) for file, line in places}
        launch.source = [texts.get(line, "") for line in range(1, max(texts, default=0) + 1)]
        return launch

    def _text_at(self, library, file: str, line: int) -> str:
        return self._lines[line - 1] if file == library.source_name else linecache.getline(file, line)


_C = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


def _value(kernel: str, parameter: Parameter, arg: object) -> object:
    if parameter.type == "f32":
        return ctypes.c_float(arg)
    if parameter.type == "f64":
        return ctypes.c_double(arg)
    if parameter.count:
        data = bytes(arg)
        return (ctypes.c_char * parameter.bytes).from_buffer_copy(data)
    return _C[parameter.bytes](0 if arg is None else int(arg))
