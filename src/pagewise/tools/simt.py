"""CUDA kernels on the CPU: run them, observe them, check them (DESIGN.md §3).

    with simt.observe() as report:          # counts and a trace, without a change to the kernel
        kernel[grid, block](x, out)
    print(report)

    with simt.check(outputs=[out]):         # raises SimtError that names line, thread, tensor and element
        kernel[grid, block](x, out)

A launch runs one thread block after another on each core, and the threads of a thread block as fibers that take turns
where they wait for each other. That is deterministic; `schedule=seed` has them run in another order, to shake out races.
kernels/simt_runtime.cpp does the work and says what "happens before" means here.
"""

import contextlib
import ctypes
import functools
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewise.tools import simt_build
from pagewise.tools.simt_build import CompileError
from pagewise.tools.simt_report import TRACE, Launch, LineCount, Report

__all__ = ["CompileError", "CpuKernel", "Parameter", "Report", "SimtError", "check", "compile", "observe", "schedule"]


class Parameter(NamedTuple):
    """A parameter of a kernel as the source declares it."""

    name: str
    ctype: str  # "int", "const __half*", …
    pointer: bool
    const: bool


class SimtError(RuntimeError):
    """What went wrong in a kernel, and where.

    kernel, line: where in the source            thread_block, thread: who, as (x, y, z)
    tensor, element: the tensor or shared array and the element in it, if memory is concerned
    what: "out of bounds", "misaligned", "race", "barrier", "deadlock", "lane", "uninitialised", "assertion", "fault"
    """

    def __init__(
        self, message: str, *, kernel: str, what: str, line: int, thread_block: tuple[int, ...], thread: tuple[int, ...],
        tensor: str | None = None, element: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.kernel, self.what, self.line = kernel, what, line
        self.thread_block, self.thread, self.tensor, self.element = thread_block, thread, tensor, element


# ------------------------------------------------------------------------------------------------ observing, checking

PLAIN, OBSERVE, CHECK = range(3)


class _Mode(NamedTuple):
    kind: int = PLAIN
    seed: int | None = None
    report: Report | None = None
    outputs: Sequence[Tensor] = ()
    trace_limit: int = 0


_mode: ContextVar[_Mode] = ContextVar("simt_mode", default=_Mode())  # noqa: B039  a NamedTuple is immutable


@contextlib.contextmanager
def _in_mode(mode: _Mode) -> Iterator[Report | None]:
    token = _mode.set(mode)
    try:
        yield mode.report
    finally:
        _mode.reset(token)


def schedule(seed: int | None) -> contextlib.AbstractContextManager[None]:
    """Run the threads and the thread blocks of launches inside in the order that `seed` gives."""
    return _in_mode(_mode.get()._replace(seed=seed))


def observe(*, schedule: int | None = None, trace_limit: int = 1_000_000) -> contextlib.AbstractContextManager[Report]:
    """Count what CPU launches inside do. Yields the Report; its trace keeps the first `trace_limit` accesses a launch."""
    return _in_mode(_Mode(OBSERVE, schedule, Report(), (), trace_limit))


def check(*, outputs: Sequence[Tensor] = (), schedule: int | None = None) -> contextlib.AbstractContextManager[Report]:
    """Hold every access of CPU launches inside against the rules; the first that breaks one raises SimtError.

    Reading an element of `outputs` before a launch inside has written it is an error too. The kernel works on copies of
    its tensors, each with empty space round it; they are copied back when the launch ends, also when it failed.
    `report.unwritten(tensor)` lists the elements that were never written.
    """
    return _in_mode(_Mode(CHECK, schedule, Report(), tuple(outputs)))


# ------------------------------------------------------------------------------------------------ compile and launch

GRID_LIMITS, BLOCK_LIMITS, MAX_THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024


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
        # atomics of several cores would meet in any order, and floating-point sums differ: then one core runs all
        self._workers = 1 if re.search(r"\batomic[A-Z]", source) else len(os.sched_getaffinity(0))
        self.library = functools.cache(self._build)

    def _build(self, instrumented: bool) -> simt_build.Library:
        return simt_build.build(self.source, self.filename, self.name, instrumented=instrumented, **self._options)

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, args: Sequence[object], *,
        tensors: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Run the kernel. `args` are in declared order: an address (int or None) or a ctypes value.

        `tensors` are the memory that the kernel may touch, by parameter name.
        """
        _check_limits(self.name, grid, block, shared_bytes)
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        if math.prod(grid) == 0:
            return
        mode = _mode.get()
        library = self.library(mode.kind != PLAIN)
        values = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_void_p(a) for a in args]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        memory = _Memory(tensors) if mode.kind != PLAIN else None

        request = _Launch()
        request.entry = ctypes.cast(getattr(library.handle, simt_build.entry_symbol(self.name)), ctypes.c_void_p)
        request.arguments = arguments
        request.grid[:], request.block[:], request.shared_bytes = grid, block, shared_bytes
        request.mode, request.workers = mode.kind, self._workers
        request.shuffled, request.seed = mode.seed is not None, mode.seed or 0
        request.max_events = mode.trace_limit
        shared: list[simt_build.SharedArray] = []
        if memory is not None:
            shared = [*library.shared]
            if library.dynamic_offset is not None:
                shared.append(simt_build.SharedArray(library.dynamic_name, library.dynamic_offset, shared_bytes))
                request.has_dynamic, request.dynamic_offset = 1, library.dynamic_offset
            kept = memory.describe(request, self.parameters, values, mode, shared)
            request.anchor = ctypes.cast(library.handle.simt_anchor_address, ctypes.c_void_p)
            assert kept is not None  # the arrays live until the launch has ended
        runtime = _runtime()
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
        events = np.frombuffer(ctypes.string_at(request.events, request.num_events * EVENT.itemsize), EVENT)
        sites, site_of = np.unique(events["site"], return_inverse=True)
        lines = library.lines([*(c.site for c in counts), *(int(site) for site in sites)])
        trace = np.empty(len(events), TRACE)
        trace["thread_block"], trace["thread"] = events["block"], events["thread"]
        trace["warp"], trace["lane"] = events["thread"] // 32, events["thread"] % 32
        trace["line"] = np.array([lines[int(site)][1] for site in sites], np.int32)[site_of] if len(sites) else 0
        trace["space"], trace["access"] = np.array(_SPACES)[events["space"]], np.array(_ACCESSES)[events["access"]]
        trace["tensor"], trace["element"] = memory.elements(events, shared)
        for name in ("bytes", "order", "execution"):
            trace[name] = events[name]
        line_counts = [
            LineCount(
                lines[c.site][1], _ACCESSES[c.access], _SPACES[c.space] if c.access < _BARRIER else "", c.requests,
                c.lanes, c.bytes, c.sectors, c.conflicts,
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
        waiters = error.waiters[: error.num_waiters] if error.what == _DEADLOCK else []
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
            other_block="" if _dim(error.other_block) == _dim(error.block) else f" of thread block {_dim(error.other_block)}",
            text=error.text.decode(errors="replace"), address=error.address,
        )  # fmt: skip
        for w in waiters:
            who = f"thread {_dim(w.thread)}" + (f" and {w.count - 1} more" if w.count > 1 else "")
            function = "__syncthreads" if w.kind == 100 else f"{_COLLECTIVES[w.kind]} with mask {w.mask:#010x}"
            text += f"\n  {who} in line {lines[w.site][1]} in {function}"
        raise self._error(what, lines.get(error.site, ("", 0)), error.block, error.thread, text, tensor, element)

    def _error(self, what, where, block, thread, text, tensor=None, element=None) -> SimtError:
        file, line = where
        code = self._lines[line - 1].strip() if file == self.filename and 0 < line <= len(self._lines) else ""
        at = f", line {line}" + (f" `{code}`" if code else f" of {os.path.basename(file)}") if line else ""
        message = f"{self.name}{at}: thread {_dim(thread)} of thread block {_dim(block)} {text}"
        return SimtError(
            message, kernel=self.name, what=what, line=line, thread_block=_dim(block), thread=_dim(thread), tensor=tensor,
            element=element,
        )  # fmt: skip


def _check_limits(name: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int) -> None:
    for what, sizes, limits in (("grid", grid, GRID_LIMITS), ("block", block, BLOCK_LIMITS)):
        for axis, size, limit in zip("xyz", sizes, limits, strict=True):
            if not (what == "grid") <= size + 1 or size < (0 if what == "grid" else 1) or size > limit:
                raise ValueError(
                    f"{name}: {what}.{axis} must be between {int(what == 'block')} and {limit}, got {size}"
                )
    if math.prod(block) > MAX_THREADS:
        raise ValueError(
            f"{name}: a thread block has at most {MAX_THREADS} threads, got {_dims(block)} = {math.prod(block)}"
        )
    if not 0 <= shared_bytes <= simt_build.MAX_SHARED_BYTES:
        raise ValueError(
            f"{name}: a thread block has at most {simt_build.MAX_SHARED_BYTES} bytes of shared memory, got {shared_bytes}"
        )


class _Memory:
    """The tensors of a launch as regions: those that overlap are one."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: t for name, t in tensors.items() if t is not None and t.numel()}
        self.names = tuple(self.tensors)
        self.regions: list[list] = []  # [start, end, bytes of the smallest element, names]
        for name, t in sorted(self.tensors.items(), key=lambda item: item[1].data_ptr()):
            start, end = t.data_ptr(), t.data_ptr() + _extent(t)
            if self.regions and start < self.regions[-1][1]:
                last = self.regions[-1]
                last[1], last[2] = max(last[1], end), min(last[2], t.element_size())
                last[3].append(name)
            else:
                self.regions.append([start, end, t.element_size(), [name]])

    def describe(self, request, parameters, values, mode, shared) -> tuple:
        regions = (_Region * len(self.regions))()
        for region, (start, end, granule, names) in zip(regions, self.regions, strict=True):
            region.start, region.bytes, region.granule = start, end - start, granule
            if mode.kind == CHECK:
                written = mode.report.written_map(start, granule, (end - start) // granule)
                region.written = written.data_ptr()
                region.expect_written = any(
                    t.data_ptr() < end and start < t.data_ptr() + _extent(t) for t in mode.outputs if t.numel()
                )
        pointed = [
            (i, next(r for r, region in enumerate(self.regions) if parameter.name in region[3]))
            for i, parameter in enumerate(parameters)
            if parameter.pointer and parameter.name in self.tensors
        ]
        pointers = (ctypes.c_uint32 * len(pointed))(*(i for i, _ in pointed))
        pointer_regions = (ctypes.c_uint32 * len(pointed))(*(r for _, r in pointed))
        arrays = (_SharedArray * len(shared))(*((array.offset, array.bytes) for array in shared))
        request.regions, request.num_regions = regions, len(regions)
        request.pointers, request.pointer_regions, request.num_pointers = pointers, pointer_regions, len(pointed)
        request.shared, request.num_shared = arrays, len(shared)
        return regions, pointers, pointer_regions, arrays, values

    def element_at(self, region: int, offset: int) -> tuple[str, int, str]:
        """Name, element and description of the place `offset` bytes into a region (or beyond its ends)."""
        start, _, _, names = self.regions[region]
        address = start + offset
        name = next(
            (n for n in names if 0 <= address - self.tensors[n].data_ptr() < _extent(self.tensors[n])), names[-1]
        )
        t = self.tensors[name]
        element, size = (address - t.data_ptr()) // t.element_size(), _extent(t) // t.element_size()
        if element < 0:
            return name, element, f"{name}[{element}], before its first element"
        if element >= size:
            return name, element, f"{name}[{element}], past its end ({size} elements)"
        if t.is_contiguous() and t.dim() > 1:
            index = ", ".join(str(int(i)) for i in np.unravel_index(element, tuple(t.shape)))
            return name, element, f"{name}[{element}] = {name}[{index}]"
        return name, element, f"{name}[{element}]"

    def elements(self, events, shared) -> tuple[np.ndarray, np.ndarray]:
        """Which tensor (or shared array) and which element of it each event touched; -1: none of them.

        An element of a shared array is 4 bytes.
        """
        tensor, element = events["region"].astype(np.int16), events["offset"] // 4
        for r, (start, _, _, names) in enumerate(self.regions):
            of_region = (events["space"] == 0) & (events["region"] == r)
            for name in reversed(names):
                t = self.tensors[name]
                at = events["offset"] + start - t.data_ptr()
                inside = of_region & (at >= 0) & (at < _extent(t))
                tensor[inside], element[inside] = self.names.index(name), at[inside] // t.element_size()
        return tensor, element


def _extent(t: Tensor) -> int:
    """Bytes from the first to past the last element."""
    return (sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


# ------------------------------------------------------------------------------------------------ the runtime's words

_SPACES, _ACCESSES = ("global", "shared", "other"), ("read", "write", "atomic", "barrier", "shuffle")
_BARRIER, _DEADLOCK = 3, 1
_COLLECTIVES = ("a shuffle", "a vote", "__match", "__reduce", "__syncwarp", "__activemask")
_ERRORS = {
    1: ("deadlock", "waits for threads that never come: the thread block cannot go on"),
    2: ("out of bounds", "{verb} {place}"),
    3: ("out of bounds", "{verb} {place}, outside of it"),
    4: ("misaligned", "{verb} {bytes} bytes at {place}: the address is no multiple of {bytes}"),
    5: ("race", "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line} with no barrier between"),
    6: ("barrier", "has left the kernel while {waiting} threads wait here, the first of them {other}: every thread must reach the barrier"),
    7: ("lane", "shuffles from lane {lane}, which has left the kernel or is not there: the value is undefined"),
    8: ("lane", "uses lane {lane}, which the mask does not name: the value is undefined"),
    9: ("uninitialised", "{verb} {place}, which no thread of this thread block has written"),
    10: ("uninitialised", "{verb} {place}, an output that nobody has written yet"),
    11: ("assertion", "stopped: {text}"),
    12: ("fault", "touched memory that is not there: run it under simt.check() to see where"),
    14: ("barrier", "waits at this barrier while thread {other} waits at the one in line {other_line}: all threads of a thread block must reach the same"),
    13: ("deadlock", "repeats an atomic for ever, and nobody changes the value: threads of other thread blocks may not run yet"),
}  # fmt: skip


def _structure(name: str, *fields: tuple) -> type:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


u8, u16, u32, u64, i32, i64, pointer = (
    ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p,
)  # fmt: skip
_Dim = _structure("_Dim", ("x", u32), ("y", u32), ("z", u32))
_Region = _structure(
    "_Region", ("start", u64), ("bytes", u64), ("granule", u32), ("expect_written", u32), ("written", pointer)
)
_SharedArray = _structure("_SharedArray", ("offset", i64), ("bytes", u64))
_Waiter = _structure("_Waiter", ("site", u64), ("kind", u32), ("mask", u32), ("count", u32), ("thread", _Dim))
_Error = _structure(
    "_Error", *((name, u32) for name in ("what", "access", "space", "bytes")),
    *((name, _Dim) for name in ("block", "thread", "other_block", "other_thread")),
    ("site", u64), ("other_site", u64), ("address", u64), ("region", i32), ("other_access", u32), ("offset", i64),
    ("lane", u32), ("num_waiters", u32), ("waiters", _Waiter * 8), ("text", ctypes.c_char * 256),
)  # fmt: skip
_Count = _structure(
    "_Count", ("site", u64), ("access", u32), ("space", u32),
    *((name, u64) for name in ("requests", "lanes", "bytes", "sectors", "conflicts")),
)  # fmt: skip
EVENT = np.dtype([
    ("site", "u8"), ("order", "u8"), ("offset", "i8"), ("block", "u4"), ("execution", "u4"), ("region", "i4"),
    ("thread", "u2"), ("bytes", "u1"), ("access", "u1"), ("space", "u1"), ("pad", "u1", 7),
])  # fmt: skip
_Launch = _structure(
    "_Launch", ("entry", pointer), ("arguments", ctypes.POINTER(pointer)), ("grid", u32 * 3), ("block", u32 * 3),
    *((name, u32) for name in ("shared_bytes", "mode", "workers", "shuffled")), ("seed", u64),
    ("regions", ctypes.POINTER(_Region)), ("shared", ctypes.POINTER(_SharedArray)), ("anchor", pointer),
    ("dynamic_offset", i64), *((name, u32) for name in ("num_regions", "num_shared", "has_dynamic", "num_pointers")),
    ("pointers", ctypes.POINTER(u32)), ("pointer_regions", ctypes.POINTER(u32)), ("max_events", u64),
    ("error", _Error), ("counts", ctypes.POINTER(_Count)), ("num_counts", u64), ("events", pointer),
    ("num_events", u64), ("all_events", u64), ("output", pointer), ("num_output", u64), ("switches", u64),
)  # fmt: skip


@functools.cache
def _runtime() -> ctypes.CDLL:
    runtime = simt_build.runtime()
    runtime.simt_sizeof_launch.restype = ctypes.c_uint64
    assert runtime.simt_sizeof_launch() == ctypes.sizeof(_Launch)
    return runtime


def _dim(dim: object) -> tuple[int, int, int]:
    return dim.x, dim.y, dim.z


def _dims(dims: Sequence[int]) -> str:
    return " × ".join(map(str, dims))
