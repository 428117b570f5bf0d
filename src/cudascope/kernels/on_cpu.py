"""One kernel on the CPU: its builds, its variables, its launches, and the reports of watched launches.

A core runs one thread block after another. The threads of a thread block are fibers that take turns where they wait for
each other. The order is the same each time, and `schedule=seed` gives another one. cpu/runtime/runtime.cpp does the
work.
"""

import contextlib
import ctypes
import functools
import math
import os
import sys
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from cudascope.arguments.arrays import Array, as_array
from cudascope.arguments.launch_shape import Shape
from cudascope.arguments.reach import reached
from cudascope.cpp.device_code import needed_by
from cudascope.cpp.signature import Parameter
from cudascope.cpp.variables import as_declared, element_bytes, may_hold_pointers
from cudascope.cpu.abi import ACCESSES, EVENT, LAUNCH, SPACES, Access, Mode, runtime
from cudascope.cpu.executable import Executable
from cudascope.cpu.library import Library, SharedArray, Variable
from cudascope.cpu.limits import blocks_at_once, check_constants, check_grid, check_shared
from cudascope.cpu.memory import Memory
from cudascope.cpu.rules import MAYBE_UNSET_VARIABLE, UNSET_VARIABLE
from cudascope.watch.contexts import current_run
from cudascope.watch.findings import Finding, error_of
from cudascope.watch.instructions import instructions_of
from cudascope.watch.least_time import work_of
from cudascope.watch.report import TRACE, Launch, LineCount


def memory_of(variable: Variable) -> np.ndarray:
    """The bytes of a variable, in place."""
    return np.frombuffer((ctypes.c_ubyte * variable.bytes).from_address(variable.address), dtype=np.uint8)


@functools.cache
def _address(handle: ctypes.CDLL, symbol: str) -> int:
    """The address of a function. Each call of `ctypes.cast` leaves a cycle of references for the garbage collector."""
    return ctypes.cast(getattr(handle, symbol), ctypes.c_void_p).value


class CpuKernel:
    """Launches an executable for arguments of these parameters.

    Observing and checking need the instrumented build. A build is made when it is first needed (CompileError).
    """

    host_variables = 0, 0  # where a program's host code has its variables: from, to

    def __init__(self, executable: Executable, parameters: Sequence[Parameter]) -> None:
        self.executable, self.parameters = executable, tuple(parameters)
        self.name, self.source, self.library = executable.name, executable.source, executable.library
        self._constants_fit = False  # not looked at yet

    def compile(self) -> None:
        """Build, or find in the cache, what a launch here and now will need."""
        self.executable.build(current_run.get().mode)

    def variable(self, name: str) -> np.ndarray:
        """The bytes of variable `name`, in place. ValueError: the kernel's file has no such variable."""
        variables = {each.name: each for each in self.library(False).variables}
        if name not in variables:
            known = ", ".join(variables) or "none"
            raise ValueError(f"kernel {self.name}: its file has no variable {name!r} that can be set: {known}")
        return memory_of(variables[name])

    @functools.cached_property
    def _pointers(self) -> set[str]:
        """Names of the variables that may hold addresses."""
        variables, file = self.library(False).variables, self.source.read()
        return {each.name for each in variables if may_hold_pointers(each, file)}

    @contextlib.contextmanager
    def _same_variables(self, library: Library) -> Iterator[None]:
        """Plain and instrumented builds have variables of their own: the plain one's are the kernel's."""
        plain = self.library(False) if library.variables else library
        pairs = [] if plain is library else [*zip(library.variables, plain.variables, strict=True)]
        for own, kept in pairs:
            memory_of(own)[:] = memory_of(kept)
        try:
            yield
        finally:
            for own, kept in pairs:
                memory_of(kept)[:] = memory_of(own)

    @functools.cached_property
    def _watched(self) -> dict[str, Array]:
        """The variables of the instrumented build, in place, as the source declares them."""
        file = self.source.read()
        sizes = element_bytes(file)
        found = {}
        for each in self.library(True).variables:
            declared = as_declared(memory_of(each), each.name, file)
            if declared.dtype.itemsize == 1 and sizes.get(each.name) in (2, 4, 8):  # a constant, through PTX
                declared = memory_of(each).view(f"u{sizes[each.name]}")
            found[each.name] = as_array(declared)
        return found

    def _entry(self, library: Library) -> int:
        """The address of the function that a launch calls."""
        return _address(library.handle, self.executable.symbol)

    def _memory(self, arrays: dict[str, Array], watched: dict[str, Array]) -> Memory:
        """The memory that a launch may touch."""
        return Memory(arrays, watched, reached(self.name, arrays))

    def blocks_at_once(self, library: Library, grid: Shape, block: Shape, shared_bytes: int) -> int:
        """How many thread blocks of a launch a GPU holds at once. ValueError for a grid that must fit and does not."""
        at_once = blocks_at_once(library, block, shared_bytes)
        check_grid(self.name, library, grid, at_once)
        return at_once

    def launch(
        self, grid: Shape, block: Shape, shared_bytes: int, args: Sequence[object], *, arrays: dict[str, Array]
    ) -> None:
        """Run the kernel. `args` are in declared order: an address (int or None) or a ctypes value.

        `arrays` are the memory that the kernel may touch, by parameter name.
        """
        run = current_run.get().with_outputs(arrays)
        library = self.executable.build(run.mode)
        if not self._constants_fit:
            check_constants(self.name, library, self.source.read())
            self._constants_fit = True
        check_shared(self.name, library, shared_bytes)
        max_blocks = self.blocks_at_once(library, grid, block, shared_bytes)
        values = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in args]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        watched = self._watched if run.mode == Mode.CHECK else {}
        memory = self._memory(arrays, watched)

        request = LAUNCH()
        request.entry = self._entry(library)
        request.arguments = arguments
        request.grid[:], request.block[:], request.mode = grid, block, run.mode
        # atomics of several cores would meet in any order, and sums of floats would differ: then one core runs all
        alone = library.has_atomics or library.has_grid_sync or math.prod(grid) == 1
        request.workers = 1 if alone else len(os.sched_getaffinity(0))
        request.max_blocks = max_blocks
        request.time_limit, request.keep_going = math.ceil(run.time_limit * 1e9), not run.stop
        request.has_scopes = library.has_scopes
        request.ignored, request.may_return = run.ignored, run.mode == Mode.CHECK and self.executable.may_return()
        request.shuffled, request.seed = run.seed is not None, run.seed or 0
        request.max_events = run.trace_limit
        request.host_start, request.host_end = self.host_variables
        shared = [*library.shared]
        request.shared_segment, request.dynamic_offset = library.shared_segment, -1
        if library.dynamic_offset is not None:
            shared.append(SharedArray(library.dynamic_name, library.dynamic_offset, shared_bytes))
            request.dynamic_offset, request.dynamic_bytes = library.dynamic_offset, shared_bytes
        pointers = [each for each in library.variables if each.name in self._pointers]
        objects = library.objects if run.mode == Mode.CHECK else ()
        kept = memory.describe(request, self.parameters, values, run, shared, library.guards, pointers, objects)
        calls = runtime()
        try:
            with self._same_variables(library):
                try:
                    calls.simt_launch(ctypes.byref(request))
                except BaseException as error:  # from the handler of a signal
                    error.add_note(f"kernel {self.name} was interrupted: its results are not whole")
                    raise
            del kept  # the arrays live until the launch has ended
            if request.num_output:
                sys.stdout.write(ctypes.string_at(request.output, request.num_output).decode(errors="replace"))
            checked = run.mode == Mode.CHECK
            errors = request.errors[: request.num_errors]

            def found(ignored: int) -> list[Finding]:
                shown = (error for error in errors if not ignored >> error.finding & 1)
                return [error_of(self.executable, error, library, memory, shared, checked) for error in shown]

            if checked:
                memory.tell_all(run)
                for each in run.watching:
                    shown = [*found(each.ignored), *self._warned(library, each.off)]
                    each.report.add_checked(shown, self.name, self.source.filename)
            if errors and run.stop:
                raise found(0)[0]
            if checked and run.stop and (warned := self._warned(library, run.off)):
                raise warned[0]
            if run.mode == Mode.OBSERVE:
                observed = self._observed(request, library, memory, shared, grid, block)
                for each in run.watching:
                    each.report.launches.append(observed)
        finally:
            calls.simt_free(ctypes.byref(request))

    def _warned(self, library: Library, off: Collection[str]) -> list[Finding]:
        """What the compiler has warned of in the code of this kernel, by the rules that are not in `off`."""
        found = []
        for warning in library.warnings:
            rule = MAYBE_UNSET_VARIABLE if warning.is_maybe else UNSET_VARIABLE
            if rule.name not in off and any(first <= warning.line <= last for first, last in self._lines):
                sentence, code = rule.sentence.format(warning=warning.text), self.executable.lines[warning.line - 1]
                place = {"file": self.source.filename, "line": warning.line, "code": code.strip()}
                found.append(Finding(sentence, kernel=self.name, what=rule.what, rule=rule.name, **place))
        return found

    @functools.cached_property
    def _lines(self) -> list[tuple[int, int]]:
        """The first and the last line of each piece of the source that this kernel needs."""
        file = self.source.read()
        pieces = needed_by(file, self.name)
        spans = (file.span(piece.start, piece.end) for piece in pieces if file.places[piece.start] >= file.own)
        return [tuple(file.text.count("\n", file.own, place) + 1 for place in span) for span in spans]

    def _observed(self, request, library, memory, shared, grid, block) -> Launch:
        counts = request.counts[: request.num_counts]
        events = np.frombuffer(ctypes.string_at(request.events, request.num_events * EVENT.itemsize), EVENT)
        sites, site_of = np.unique(events["site"], return_inverse=True)
        lines = self.executable.located(library, [*(c.site for c in counts), *(int(site) for site in sites)])
        trace = np.empty(len(events), TRACE)
        trace["thread_block"], trace["thread"] = events["block"], events["thread"]
        trace["warp"], trace["lane"] = events["thread"] // 32, events["thread"] % 32
        trace["line"] = np.array([lines[int(site)][1] for site in sites], np.int32)[site_of] if len(sites) else 0
        trace["space"], trace["access"] = np.array(SPACES)[events["space"]], np.array(ACCESSES)[events["access"]]
        trace["tensor"], trace["element"] = memory.elements(events, shared)
        for name in ("bytes", "order", "execution"):
            trace[name] = events[name]
        line_counts = []
        for c in counts:
            space = SPACES[c.space] * (c.access < Access.BARRIER)
            numbers = (c.requests, c.lanes, c.bytes, c.sectors, c.conflicts)
            line_counts.append(LineCount(lines[c.site][1], ACCESSES[c.access], space, *numbers))
        names = tuple(memory.names), tuple(array.name for array in shared)
        code, ptx = self.executable.instructions(library, [c.site for c in counts]), self.executable.ptx
        parts = ptx.counted()[1] if ptx else None
        work = work_of(math.prod(grid), request, code, parts)
        is_counted = parts is not None and not request.too_many_issues
        executed = instructions_of(parts, request.issued[: request.num_executed]) if is_counted else None
        of_kernel = self.executable.lines, work, sum(array.bytes for array in shared), ptx and ptx.text
        return Launch(self.name, grid, block, line_counts, trace, *names, *of_kernel, executed)
