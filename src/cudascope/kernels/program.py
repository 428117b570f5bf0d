"""A program on the CPU: its main runs in a process of its own, and its launches come back to Python.

cpu/api calls `Session.launch` for each launch of the program. The launch is that of every other kernel (on_cpu.py): its
memory is what the program has allocated. What is found goes to the process that waits for the program.
"""

import ctypes
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cudascope.arguments.arrays import Array, as_array
from cudascope.arguments.launch_shape import MAX_STATIC_SHARED_BYTES, LaunchShape, Shape, read_launch
from cudascope.cpp.signature import Parameter, Signature, base_name, read_signature
from cudascope.cpp.source import CompileError, Source, read_source
from cudascope.cpp.variables import as_declared
from cudascope.cpu.abi import Mode
from cudascope.cpu.executable import Executable, may_return
from cudascope.cpu.library import Library
from cudascope.cpu.limits import blocks_at_once, check_grid, check_shared, own_shared_bytes
from cudascope.cpu.memory import Memory
from cudascope.cpu.program import Program, api
from cudascope.cpu.program_abi import AllocationRow, KernelRow, LaunchRow, VariableRow, callbacks
from cudascope.cpu.rules import RULES
from cudascope.kernels.on_cpu import CpuKernel, memory_of
from cudascope.watch.contexts import Run, current_run
from cudascope.watch.findings import Finding
from cudascope.watch.report import Report

_GAP = 1 << 20  # bytes of empty space on each side of an allocation (cpu/api/memory.h)
_ENDINGS = {rule.name for rule in RULES.values() if rule.ends}
_ERRORS = {"misaligned": 716, "assertion": 710, "deadlock": 702, "out of bounds": 700, "fault": 700}
_INVALID_VALUE, _INVALID_CONFIGURATION, _LAUNCH_FAILURE, _TOO_LARGE = 1, 9, 719, 720


class Allocation(NamedTuple):
    """Memory that the program has allocated, and how findings call it."""

    name: str
    start: int
    bytes: int
    origin: str  # as in "4,096 bytes of cudaMalloc in line 12"
    freed: str  # as in "line 30", "" while it is live


class _ProgramMemory(Memory):
    """The allocations of a program. An address in the empty space round one belongs to it."""

    def region_beside(self, address: int) -> int:
        near = [
            (max(start - address, address - end), r)
            for r, (start, end, _, names) in enumerate(self.regions)
            if self._reached.intersection(names)
        ]
        distance, region = min(near, default=(_GAP, -1))
        return region if distance < _GAP else -1


class _ProgramKernel(CpuKernel):
    """A kernel of a program. All launches of it work on the program's own memory."""

    def __init__(
        self, executable: Executable, parameters: Sequence[Parameter], call: int, sources: Sequence[Source]
    ) -> None:
        super().__init__(executable, parameters)
        self._call, self.sources, self.is_cooperative, self.allocated = call, sources, False, {}

    @functools.cached_property
    def _watched(self) -> dict[str, Array]:
        watched: dict[str, Array] = {}
        for each in self.library(True).variables:
            name, memory = each.name, memory_of(each)
            while name in watched:  # files of a program may have a variable of their own of the same name
                name += "'"
            declared = (as_array(as_declared(memory, each.name, source.read())) for source in self.sources)
            watched[name] = next((array for array in declared if array.dtype != "uint8"), as_array(memory))
        return watched

    def _entry(self, library: Library) -> int:
        return self._call

    def _memory(self, arrays: dict[str, Array], watched: dict[str, Array]) -> Memory:
        return _ProgramMemory(arrays, watched, self.allocated)

    def blocks_at_once(self, library: Library, grid: Shape, block: Shape, shared_bytes: int) -> int:
        at_once = blocks_at_once(library, block, shared_bytes)
        check_grid(self.name, library._replace(has_grid_sync=self.is_cooperative), grid, at_once)
        return at_once


_CALL = re.compile(
    r"\b(cuda(?:Malloc|HostAlloc)\w*)\s*\(\s*(?:\([^()]*\)\s*)?(?:&\s*)?([A-Za-z_][\w.]*(?:->\w+|\[\w+\])*)"
)
_UNKNOWN = re.compile(r"address (0x[0-9a-f]+), which belongs to no tensor of this launch(?: \(if [^()]*\(\)\))?")
_UNWRITTEN = "an output that nobody has written yet"
_RUN_CHECK = "run it under cudascope.check(), which names the access"


class Session:
    """One run of a program in this process. `send` takes what is found and observed, as a dictionary."""

    def __init__(
        self, program: Program, run: Run, send: Callable[[dict[str, Any]], None], progress: ctypes.Array
    ) -> None:
        self._program, self._run, self._send, self._progress = program, run, send, progress
        self._report = run.report or Report()
        self._kernels: dict[int, _ProgramKernel] = {}
        self._granules: dict[int, int] = {}  # by the number of the allocation
        self._known: dict[int, Allocation] = {}
        self._library: Library | None = None
        self._host_variables = 0, 0
        self._sources = {source.filename: source for source in program.sources}
        self._callbacks = callbacks(self._guarded_launch, self._find, self._attributes)

    def main(self, arguments: Sequence[str]) -> None:
        """Run the program's main with `arguments`, the first of which is its name. The process ends with the program.

        CompileError: the program needs a function that no file and no library has.
        """
        calls = api()
        checked = self._run.mode == Mode.CHECK
        calls.simt_program_start(ctypes.byref(self._callbacks), ctypes.c_bool(checked), self._progress)
        library = self._library = self._program.load()
        rows = [VariableRow(each.name.encode(), each.address, each.bytes) for each in library.variables]
        calls.simt_program_variables((VariableRow * len(rows))(*rows), ctypes.c_uint64(len(rows)))
        start, end = ctypes.c_uint64(), ctypes.c_uint64()
        calls.simt_program_data(library.handle.main, ctypes.byref(start), ctypes.byref(end))
        self._host_variables = start.value, end.value
        given = [os.fsencode(argument) for argument in arguments]
        argv = (ctypes.c_char_p * (len(given) + 1))(*given, None)
        environment = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ")
        main_function = ctypes.cast(library.handle.main, ctypes.c_void_p)

        def write(text: str) -> None:
            content = text.encode(errors="replace")
            calls.simt_program_print(content, ctypes.c_uint64(len(content)))

        # what kernels print goes to the program's own output, which the program flushes: so the order stays
        sys.stdout = SimpleNamespace(write=write, flush=lambda: None)
        status = calls.simt_program_main(main_function, len(given), argv, environment)
        calls.simt_program_end(status)

    def _guarded_launch(self, row: Any) -> int:
        """Launch, and let no exception of Python's get into the program."""
        try:
            return self._launch(row.contents)
        except Finding as found:
            return self._tell([found], row.contents)
        except BaseException as error:
            self._send({"error": str(error) if isinstance(error, CompileError) else f"{type(error).__name__}: {error}"})
            os._exit(2)

    def _launch(self, row: LaunchRow) -> int:
        kernel = self._kernel(row.kernel.contents)
        kernel.is_cooperative = bool(row.is_cooperative)
        try:
            shape = self._shape(kernel, row)
        except ValueError as error:
            text = str(error).removeprefix(f"kernel {kernel.name}: ")
            file, line = self._place(row)
            self._send_finding("launch failed", f"the launch fails: {text}", kernel.name, file, line)
            is_shape = text.startswith(("grid", "block"))
            return _TOO_LARGE if "grid barrier" in text else _INVALID_CONFIGURATION if is_shape else _INVALID_VALUE
        kernel.allocated, outputs = self._arrays(row)
        self._report.findings, self._report.launches = [], []
        current_run.set(self._run._replace(outputs=outputs, report=self._report))
        kernel.launch(*shape, self._arguments(row), arrays={})
        for launch in self._report.launches:
            self._send({"observed": str(launch), "launch": row.number})
        self._send({"launched": row.number})
        return self._tell(self._report.findings, row)

    def _shape(self, kernel: _ProgramKernel, row: LaunchRow) -> LaunchShape:
        """The shape of a launch. ValueError for one that CUDA refuses."""
        written = tuple(row.grid), tuple(row.block), row.shared_bytes
        shape = read_launch(kernel.name, written, self._max_threads(kernel))
        most = max(row.most_shared, MAX_STATIC_SHARED_BYTES - own_shared_bytes(kernel.name, self._library))
        if shape.shared_bytes > most:
            raise ValueError(
                f"kernel {kernel.name}: shared_bytes = {shape.shared_bytes}, and a launch has at most {most} unless "
                f"cudaFuncSetAttribute sets cudaFuncAttributeMaxDynamicSharedMemorySize"
            )
        check_shared(kernel.name, self._library, shape.shared_bytes)
        kernel.blocks_at_once(self._library, *shape)
        return shape

    def _kernel(self, row: KernelRow) -> _ProgramKernel:
        if row.function not in self._kernels:
            name = _name_of(row.name.decode())
            source = next((each for each in self._program.sources if _declares(each, name)), self._program.sources[0])
            lines, returns = source.text.split("\n"), may_return(source, name, marked=True)
            executable = Executable(name, source, "", lambda _: self._library, lines, returns)
            signature = _signature(source, name)
            names = [parameter.name for parameter in signature.parameters] if signature else []
            if len(names) != row.num_parameters:
                names = [f"#{i}" for i in range(row.num_parameters)]
            parameters = [Parameter(each, "void", pointer=False, const=False) for each in names]
            kernel = _ProgramKernel(executable, parameters, row.call, self._program.sources)
            kernel.host_variables = self._host_variables
            self._kernels[row.function] = kernel
        return self._kernels[row.function]

    def _max_threads(self, kernel: _ProgramKernel) -> int | None:
        signature = _signature(kernel.source, kernel.name)
        return signature and signature.max_threads

    def _attributes(self, row: Any, shared_bytes: Any, most_threads: Any) -> int:
        kernel = self._kernel(row.contents)
        shared_bytes[0] = own_shared_bytes(kernel.name, self._library)
        most_threads[0] = self._max_threads(kernel) or 1024
        return 0

    @staticmethod
    def _arguments(row: LaunchRow) -> list[ctypes.Array]:
        sizes = row.kernel.contents.sizes[: row.kernel.contents.num_parameters]
        return [
            (ctypes.c_ubyte * size).from_buffer_copy(ctypes.string_at(row.arguments[i], size))
            for i, size in enumerate(sizes)
        ]

    def _arrays(self, row: LaunchRow) -> tuple[dict[str, Array], tuple[Array, ...]]:
        """The live allocations by their names, and those that nobody has written all of."""
        allocations = _list(row.allocations, row.num_allocations)
        live = [each for each in allocations if not each.freed]
        self._library.lines([site for each in allocations for site in (each.site, each.freed)])  # all at once
        for each in allocations:
            if each.freed and each.number in self._granules:
                del self._granules[each.number]
                self._report.forget(each.start)
        arrays: dict[str, Array] = {}
        by_start: list[tuple[Any, Array]] = []
        for each in live:
            granule = self._granule(each, row)
            name = self._allocation(each).name
            while name in arrays:
                name += "'"
            arrays[name] = Array(each.start, (each.bytes // granule,), (1,), "uint8", granule)
            by_start.append((each, arrays[name]))
        if self._run.mode != Mode.CHECK:
            return arrays, ()
        for mark in _list(row.marks, row.num_marks):
            for each, array in by_start:
                if each.start <= mark.start < each.start + each.bytes:
                    first, last = mark.start - each.start, mark.start + mark.bytes - each.start
                    self._written(array)[first // array.itemsize : -(-last // array.itemsize)] = 1
        return arrays, tuple(array for _, array in by_start if not self._written(array).all())

    def _written(self, array: Array) -> np.ndarray:
        return self._report.written_map(array.address, array.itemsize, array.size)

    def _granule(self, allocation: AllocationRow, row: LaunchRow) -> int:
        """The bytes of the elements in which an allocation is checked: of the smallest that a pointer has led to."""
        kernel = row.kernel.contents
        sizes = [allocation.granule] if allocation.granule else []
        for i in range(kernel.num_parameters):
            if granule := kernel.granules[i]:
                address = ctypes.c_uint64.from_address(row.arguments[i]).value
                if allocation.start <= address < allocation.start + allocation.bytes:
                    sizes.append(granule)
        before = self._granules.get(allocation.number)
        granule = math.gcd(min([*sizes, *([before] if before else [])], default=4), allocation.bytes)
        if before and granule < before:
            old = self._report.written_map(allocation.start, before, allocation.bytes // before)
            self._report.forget(allocation.start)
            new = self._report.written_map(allocation.start, granule, allocation.bytes // granule)
            new[:] = np.repeat(old, before // granule)
        self._granules[allocation.number] = granule
        return granule

    def _allocation(self, row: AllocationRow) -> Allocation:
        known = self._known.get(row.number)
        if known is None or (row.freed and not known.freed):
            file, line = self._line(row.site)
            calls = _CALL.findall(self._code(file, line))
            function, name = calls[0] if len(calls) == 1 else ("", "")
            function = function or ("cudaMalloc", "cudaMallocManaged", "cudaMallocHost", "cudaHostRegister")[row.kind]
            where = self._where(file, line)
            origin = f"{row.bytes:,} bytes of {function} in {where}" if line else f"{row.bytes:,} bytes of {function}"
            freed = self._where(*self._line(row.freed)) if row.freed else ""
            known = Allocation(name or f"{function}{row.number}", row.start, row.bytes, origin, freed)
            self._known[row.number] = known
        return known

    def _line(self, site: int) -> tuple[str, int]:
        return self._library.lines([site]).get(site, ("", 0)) if site and self._library else ("", 0)

    def _code(self, file: str, line: int) -> str:
        try:
            text = self._sources[file].text if file in self._sources else read_source(Path(file))
            return text.split("\n")[line - 1] if line else ""
        except (OSError, ValueError, IndexError):
            return ""

    def _where(self, file: str, line: int) -> str:
        of = "" if file == self._program.sources[0].filename else f" of {os.path.basename(file)}"
        return f"line {line}{of}"

    def _place(self, row: LaunchRow) -> tuple[str, int]:
        return (row.file.decode(), row.line) if row.file else self._line(row.site)

    def _tell(self, findings: Sequence[Finding], row: LaunchRow) -> int:
        """Send the findings of a launch. Return the error with which a GPU would end the launch; 0: none."""
        error, strays = 0, set()
        launch_file, launch_line = self._place(row)
        origin = f", in launch {row.number} of the program ({self._where(launch_file, launch_line)})"
        for found in findings:
            sentence = found.sentence.replace(_UNWRITTEN, "which neither the host nor a kernel has written")
            sentence, rule = sentence.replace(_RUN_CHECK, "cudascope check names the access"), found.rule
            if unknown := _UNKNOWN.search(sentence):
                what, is_freed = self._described(int(unknown[1], 16), row)
                sentence = sentence.replace(unknown[0], what)
                rule = "use after free" if is_freed else rule
            by_name = {each.name: each for each in self._known.values() if not each.freed}
            if found.tensor in by_name and found.tensor in sentence:
                sentence += f" ({found.tensor}: {by_name[found.tensor].origin})"
            first, *rest = sentence.split("\n")
            sentence = "\n".join([first + origin, *rest])
            place = found.file, found.line
            if rule != "fault" or place not in strays:  # the same access, which a checked launch cannot leave out
                self._send_finding(rule, sentence, found.kernel, *place, found)
            strays |= {place} if found.what == "out of bounds" else set()
            if rule in _ENDINGS or self._run.mode != Mode.CHECK:
                error = error or _ERRORS.get(found.what, _LAUNCH_FAILURE)
        return error

    def _described(self, address: int, row: LaunchRow) -> tuple[str, bool]:
        """What is at an address that no live allocation has, and whether it was freed."""
        for each in _list(row.allocations, row.num_allocations):
            if each.start - _GAP <= address < each.start + each.bytes + _GAP and each.freed:
                known = self._allocation(each)
                return f"{known.name} ({known.origin}), which {known.freed} has freed", True
        remedy = "which is memory of the host or of nobody: copy to memory of cudaMalloc first"
        return f"address {address:#x}, {remedy}" if address else "a null pointer", False

    def _find(self, rule: bytes, text: bytes, site: int, address: int) -> None:
        """Send what the API has found outside of a launch."""
        file, line = self._line(site)
        sentence = text.decode(errors="replace")
        rows = ctypes.POINTER(AllocationRow)()
        number = api().simt_program_allocations(ctypes.byref(rows))
        for each in _list(rows, number):
            if address and each.start - _GAP <= address < each.start + each.bytes + _GAP:
                known = self._allocation(each)
                freed = f", freed in {known.freed}" if known.freed else ""
                sentence = f"{known.name} ({known.origin}{freed}): {sentence}"
                break
        self._send_finding(rule.decode(), sentence, "host", file, line)

    def _send_finding(
        self, rule: str, sentence: str, kernel: str, file: str, line: int, found: Finding | None = None
    ) -> None:
        what = found.what if found else "program"
        fields = {"what": what, "rule": rule, "sentence": sentence, "kernel": kernel, "file": file, "line": line}
        if found is not None:
            names = ("other_file", "other_line", "thread_block", "thread", "tensor", "element", "count")
            values = {name: getattr(found, name) for name in names}
            fields |= {name: each.item() if isinstance(each, np.generic) else each for name, each in values.items()}
        self._send({"finding": fields})


def _list(pointer: Any, number: int) -> list[Any]:
    return pointer[:number] if number else []


def _name_of(pretty: str) -> str:
    """The name of a kernel in the name of the type that launches it."""
    found = re.search(r"kernel\)?(?:\(P ?\.\.\.\))? = (.*?)(?:; P = \{.*\}|, P = <.*>)?\]$", pretty)
    name = re.sub(r"(\{anonymous\}|<unnamed>)::", "", found[1] if found else pretty).strip("() &")
    try:
        base_name(name)
    except ValueError:  # of a lambda, for example
        return name.partition("<")[0].rpartition("::")[2]
    return name


def _declares(source: Any, name: str) -> bool:
    return any(each.function == base_name(name) and each.piece.body is not None for each in source.read().kernels)


def _signature(source: Source, name: str) -> Signature | None:
    try:
        return read_signature(source.read(), name)
    except ValueError:
        return None


def send_to(descriptor: int, message: dict[str, Any]) -> None:
    """Write a dictionary to a pipe, as one line."""
    os.write(descriptor, json.dumps(message).encode() + b"\n")
