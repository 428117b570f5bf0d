"""CUDA kernels on the CPU: run them, observe them, check them (DESIGN.md §3).

    with simt.observe() as report:          # counts and a trace, without a change to the kernel
        kernel[grid, block](x, out)
    print(report)

    with simt.check(outputs=[out]):         # raises SimtError that names line, thread, tensor and element
        kernel[grid, block](x, out)

A launch runs one thread block after another on each core, and the threads of a thread block as fibers that take turns
where they wait for each other. That is deterministic; `schedule=seed` runs them in another order, to shake out races.
kernels/simt_runtime.cpp does the work and says what "happens before" means here.
"""

import contextlib
import ctypes
import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pagewise.tools import simt_abi, simt_build, simt_library
from pagewise.tools.cuda_build import CompileError
from pagewise.tools.cuda_signature import Parameter
from pagewise.tools.simt_abi import CHECK, OBSERVE, PLAIN
from pagewise.tools.simt_limits import check_shared
from pagewise.tools.simt_memory import Memory
from pagewise.tools.simt_report import TRACE, Launch, LineCount, Report

__all__ = ["CompileError", "CpuKernel", "Report", "SimtError", "check", "compile", "observe", "schedule"]


class SimtError(RuntimeError):
    """What went wrong in a kernel, and where.

    kernel, line: where in the source            thread_block, thread: who, as (x, y, z)
    tensor, element: the tensor or shared array and the element in it, if memory is concerned
    what: "out of bounds", "misaligned", "race", "barrier", "deadlock", "lane", "uninitialised", "assertion", "fault"
    """

    def __init__(
        self, message: str, *, kernel: str, what: str, line: int, thread_block: tuple[int, int, int],
        thread: tuple[int, int, int], tensor: str | None = None, element: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.kernel, self.what, self.line = kernel, what, line
        self.thread_block, self.thread, self.tensor, self.element = thread_block, thread, tensor, element


# ------------------------------------------------------------------------------------------------ observing, checking


class _Mode(NamedTuple):
    kind: int = PLAIN
    seed: int | None = None
    report: Report | None = None
    outputs: Sequence[Tensor] = ()
    trace_limit: int = 0


_mode: ContextVar[_Mode] = ContextVar("simt_mode", default=_Mode())  # noqa: B039  a NamedTuple is immutable


@contextlib.contextmanager
def _in_mode(mode: _Mode) -> Iterator[Report | None]:
    outer = _mode.get().kind
    if PLAIN != outer != mode.kind:
        raise RuntimeError("simt.observe() and simt.check() cannot be nested: use one after the other")
    token = _mode.set(mode)
    try:
        yield mode.report
    finally:
        _mode.reset(token)


def schedule(seed: int | None) -> contextlib.AbstractContextManager[None]:
    """Run the threads and the thread blocks of launches inside in the order that `seed` gives."""
    return _in_mode(_mode.get()._replace(seed=seed))


def observe(*, schedule: int | None = None, trace_limit: int = 1_000_000) -> contextlib.AbstractContextManager[Report]:
    """Count what CPU launches inside do. Yields the Report; a launch's trace keeps its first `trace_limit` accesses."""
    return _in_mode(_Mode(OBSERVE, schedule, Report(), (), trace_limit))


def check(*, outputs: Sequence[Tensor] = (), schedule: int | None = None) -> contextlib.AbstractContextManager[Report]:
    """Hold every access of CPU launches inside against the rules; the first that breaks one raises SimtError.

    Reading an element of `outputs` before a launch inside has written it is an error too. The kernel works on copies of
    its tensors, each with empty space round it; they are copied back when the launch ends, also when it failed.
    `report.unwritten(tensor)` lists the elements that were never written.

    Limits: warps of a thread block that synchronise by flags (atomics and __threadfence_block) are reported as a race;
    an access narrower than an element of its tensor is held against the bounds only; a cast of a number that its type
    cannot hold gives what it gives on the host; up to 3 unwritten bytes of a word of shared memory count as padding.
    """
    return _in_mode(_Mode(CHECK, schedule, Report(), tuple(outputs)))


# ------------------------------------------------------------------------------------------------ compile and launch


def compile(
    source: str, filename: str, name: str, parameters: Sequence[Parameter], *, defines: Sequence[str] = (),
    options: Sequence[str] = (), include_dirs: Sequence[str] = (),
) -> "CpuKernel":  # fmt: skip
    """Compile kernel `name` of `source` for the CPU, or find it in the cache. Raises CompileError.

    `name` may be an instance of a template ("softmax<float, 128>"). `options` go to the C++ compiler; those of NVRTC
    alone, which begin with two dashes, are left out.
    """
    kernel = CpuKernel(source, filename, name, tuple(parameters), tuple(defines), tuple(options), tuple(include_dirs))
    kernel.library(_mode.get().kind != PLAIN)
    return kernel


class CpuKernel:
    """A compiled kernel. The instrumented build is made when it is first observed or checked."""

    def __init__(
        self, source: str, filename: str, name: str, parameters: tuple[Parameter, ...], defines: tuple[str, ...],
        options: tuple[str, ...], include_dirs: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.source, self.filename, self.name, self.parameters = source, filename, name, parameters
        self._options = {"defines": defines, "options": options, "include_dirs": include_dirs}
        self._lines = source.splitlines()
        self.library = functools.cache(self._build)

    def _build(self, instrumented: bool) -> simt_library.Library:
        return simt_build.build(self.source, self.filename, self.name, instrumented=instrumented, **self._options)

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, args: Sequence[object], *,
        tensors: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Run the kernel. `args` are in declared order: an address (int or None) or a ctypes value.

        `tensors` are the memory that the kernel may touch, by parameter name.
        """
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        if math.prod(grid) == 0:
            return
        mode = _mode.get()
        library = self.library(mode.kind != PLAIN)
        check_shared(self.name, library, shared_bytes)
        values = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_void_p(a) for a in args]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        memory = Memory(tensors) if mode.kind != PLAIN else None

        request = simt_abi.LAUNCH()
        request.entry = ctypes.cast(getattr(library.handle, simt_build.entry_symbol(self.name)), ctypes.c_void_p)
        request.arguments = arguments
        request.grid[:], request.block[:], request.shared_bytes = grid, block, shared_bytes
        request.mode = mode.kind
        # atomics of several cores would meet in any order, and sums of floats would differ: then one core runs all
        request.workers = 1 if library.has_atomics else len(os.sched_getaffinity(0))
        request.shuffled, request.seed = mode.seed is not None, mode.seed or 0
        request.max_events = mode.trace_limit
        shared: list[simt_library.SharedArray] = []
        if memory is not None:
            shared = [*library.shared]
            if library.dynamic_offset is not None:
                shared.append(simt_library.SharedArray(library.dynamic_name, library.dynamic_offset, shared_bytes))
                request.has_dynamic, request.dynamic_offset = 1, library.dynamic_offset
            kept = memory.describe(request, self.parameters, mode, shared)
            request.anchor = ctypes.cast(library.handle.simt_anchor_address, ctypes.c_void_p)
            assert kept is not None  # the arrays live until the launch has ended
        runtime = simt_abi.runtime()
        runtime.simt_launch(ctypes.byref(request))
        try:
            if request.num_output:
                sys.stdout.write(ctypes.string_at(request.output, request.num_output).decode(errors="replace"))
            self._raise(request, library, memory, shared)
            if mode.kind == OBSERVE:
                mode.report.launches.append(self._observed(request, library, memory, shared, grid, block))
        finally:
            runtime.simt_free(ctypes.byref(request))

    # ------------------------------------------------------------------------------------------------ reports

    def _observed(self, request, library, memory, shared, grid, block) -> Launch:
        counts = request.counts[: request.num_counts]
        events = np.frombuffer(
            ctypes.string_at(request.events, request.num_events * simt_abi.EVENT.itemsize), simt_abi.EVENT
        )
        sites, site_of = np.unique(events["site"], return_inverse=True)
        lines = library.lines([*(c.site for c in counts), *(int(site) for site in sites)])
        trace = np.empty(len(events), TRACE)
        trace["thread_block"], trace["thread"] = events["block"], events["thread"]
        trace["warp"], trace["lane"] = events["thread"] // 32, events["thread"] % 32
        trace["line"] = np.array([lines[int(site)][1] for site in sites], np.int32)[site_of] if len(sites) else 0
        trace["space"], trace["access"] = (
            np.array(simt_abi.SPACES)[events["space"]],
            np.array(simt_abi.ACCESSES)[events["access"]],
        )
        trace["tensor"], trace["element"] = memory.elements(events, shared)
        for name in ("bytes", "order", "execution"):
            trace[name] = events[name]
        line_counts = [
            LineCount(
                lines[c.site][1], simt_abi.ACCESSES[c.access],
                simt_abi.SPACES[c.space] * (c.access < simt_abi.BARRIER), c.requests, c.lanes, c.bytes, c.sectors,
                c.conflicts,
            )
            for c in counts
        ]  # fmt: skip
        return Launch(
            self.name, grid, block, line_counts, trace, memory.names, [array.name for array in shared], self._lines,
            request.all_events == request.num_events,
        )  # fmt: skip

    def _raise(self, request, library, memory, shared) -> None:
        error = request.error
        if error.what == 0:
            return
        waiters = error.waiters[: error.num_waiters] if error.what == simt_abi.DEADLOCK else []
        lines = library.lines([error.site, error.other_site, *(w.site for w in waiters)])
        place, tensor, element = "", None, None
        if error.region >= 0 and error.space == 1:
            array = shared[error.region]
            tensor, element = array.name, error.offset // error.bytes
            place = f"{tensor}[{element}] (byte {error.offset} of the {array.bytes} of this shared array)"
        elif error.region >= 0:
            tensor, element, place = memory.element_at(error.region, error.offset)
        verb = ("reads", "writes", "updates")[min(error.access, 2)]
        what, text = _ERRORS[error.what]
        text = text.format(
            verb=verb, place=place or f"address {error.address:#x}, which belongs to no tensor of this launch",
            bytes=error.bytes, lane=error.lane, other=_dim(error.other_thread), waiting=error.num_waiters,
            other_verb=("read", "written", "updated")[min(error.other_access, 2)],
            other_line=lines.get(error.other_site, ("", 0))[1],
            other_block=f" of thread block {_dim(error.other_block)}" * (_dim(error.other_block) != _dim(error.block)),
            text=error.text.decode(errors="replace"), address=error.address,
        )  # fmt: skip
        for w in waiters:
            who = f"thread {_dim(w.thread)}" + (f" and {w.count - 1} more" if w.count > 1 else "")
            function = "__syncthreads" if w.kind == 100 else f"{simt_abi.COLLECTIVES[w.kind]} with mask {w.mask:#010x}"
            text += f"\n  {who} in line {lines[w.site][1]} in {function}"
        raise self._error(what, lines.get(error.site, ("", 0)), error.block, error.thread, text, tensor, element)

    def _error(self, what, where, block, thread, text, tensor=None, element=None) -> SimtError:
        file, line = where
        code = self._lines[line - 1].strip() if file == self.filename and 0 < line <= len(self._lines) else ""
        at = f", line {line}" + (f" `{code}`" if code else f" of {os.path.basename(file)}") if line else ""
        message = f"{self.name}{at}: thread {_dim(thread)} of thread block {_dim(block)} {text}"
        return SimtError(
            message, kernel=self.name, what=what, line=line, thread_block=_dim(block), thread=_dim(thread),
            tensor=tensor, element=element,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the runtime's words

_ERRORS = {
    1: ("deadlock", "waits for threads that never come: the thread block cannot go on"),
    2: ("out of bounds", "{verb} {place}"),
    3: ("out of bounds", "{verb} {place}, outside of it"),
    4: ("misaligned", "{verb} {bytes} bytes at {place}: the address is no multiple of {bytes}"),
    5: ("race", "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line} with no "
        "barrier between"),
    6: ("barrier", "has left the kernel while {waiting} threads wait here, the first of them {other}: every thread "
        "must reach the barrier"),
    7: ("lane", "shuffles from lane {lane}, which has left the kernel or is not there: the value is undefined"),
    8: ("lane", "uses lane {lane}, which the mask does not name: the value is undefined"),
    9: ("uninitialised", "{verb} {place}, which no thread of this thread block has written"),
    10: ("uninitialised", "{verb} {place}, an output that nobody has written yet"),
    11: ("assertion", "stopped: {text}"),
    12: ("fault", "touched memory that is not there, or a vector at an address that is no multiple of its size: "
         "simt.check() says which"),
    13: ("deadlock", "repeats an atomic for ever and nobody changes the value: threads of other thread blocks may not "
         "run yet"),
    14: ("barrier", "waits at this barrier while thread {other} waits at the one in line {other_line}: all threads of "
         "a thread block must reach the same"),
    15: ("fault", "divides an integer by zero (or the least integer by -1): the result is undefined"),
    16: ("fault", "stopped: __builtin_trap() or abort()"),
}  # fmt: skip


def _dim(dim: object) -> tuple[int, int, int]:
    return dim.x, dim.y, dim.z
