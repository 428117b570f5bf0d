"""The reports of observed and checked launches (kernels/on_cpu.py makes them).

A *request* is one memory instruction of one warp. Global memory moves in sectors of 32 bytes: a request of 32 lanes
× 4 bytes needs 4 sectors when the lanes read neighbours and 32 when they are far apart. Shared memory has 32 banks of 4
bytes. Lanes that read different words of one bank wait for each other, and each extra turn is one bank conflict.
Requests of 8 bytes per lane are served half a warp at a time, and those of 16 bytes a quarter of a warp at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cudascope.arguments.arrays import Array, as_array
from cudascope.cpu.rules import NEVER_WRITTEN
from cudascope.gpus import gpu_named
from cudascope.toolchain.ptxas import PtxText
from cudascope.toolchain.sass import SassLoop, loops_of_ptx
from cudascope.watch.causes import by_cause
from cudascope.watch.findings import Finding
from cudascope.watch.instructions import Instructions
from cudascope.watch.least_time import Limits, Work, limits

# `tensor` counts through Launch.tensors (space global) or Launch.shared; an `element` of shared memory is 4 bytes;
# `execution` is how many times this thread had executed this instruction before: with the line it tells one request.
_FIELDS = (
    "thread_block u4, warp u2, lane u1, thread u2, line i4, space U6, access U6, tensor i2, element i8, bytes u1, "
    "order u8, execution u4"
)
TRACE = np.dtype([tuple(field.split()) for field in _FIELDS.split(", ")])


class LineCount(NamedTuple):
    """The requests of one source line with one kind of access. `access` is read, write, atomic, barrier or shuffle."""

    line: int
    access: str
    space: str  # global, shared; other is __constant__ memory; empty for barriers and shuffles
    requests: int  # by warps; of a barrier, by thread blocks (of __syncwarp, by warps)
    lanes: int
    bytes: int  # requested
    sectors: int  # of 32 bytes, moved
    bank_conflicts: int

    def __add__(self, other: "LineCount") -> "LineCount":
        return LineCount(*self[:3], *(a + b for a, b in zip(self[3:], other[3:], strict=True)))


@dataclass(eq=False, repr=False)
class Launch:
    """One observed launch: `lines` counts by source line; `trace` holds every access in the order they happened."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    lines: Sequence[LineCount]
    trace: np.ndarray
    tensors: Sequence[str]  # what `tensor` in the trace counts through, and `shared`
    shared: Sequence[str]
    _source: Sequence[str]
    work: Work  # by the units of a GPU, at least
    shared_bytes: int  # of a thread block
    _ptx: PtxText | None
    _instructions: Instructions | None

    def __post_init__(self) -> None:
        merged: dict[tuple[int, str, str], LineCount] = {}
        for line in self.lines:
            merged[line[:3]] = merged[line[:3]] + line if line[:3] in merged else line
        self.lines = [merged[key] for key in sorted(merged)]

    def count(self, access: str | None = None, space: str | None = None, line: int | None = None) -> LineCount:
        """The sum over all lines, or over those of one access, space or line."""
        total = LineCount(line or 0, access or "", space or "", 0, 0, 0, 0, 0)
        for each in self.lines:
            if access in (None, each.access) and space in (None, each.space) and line in (None, each.line):
                total = total + each
        return total

    def limits(self, gpu: str = "H100", *, registers: int | None = None) -> Limits:
        """Return the least time that this launch can take on `gpu`, by the units of the GPU; see `Limits`.

        Args:
            gpu: a name of `cudascope.gpus.GPUS`, such as "H100" or "RTX 4090".
            registers: registers per thread. Without it ptxas is asked, if PTX was executed and Triton is installed.

        Raises:
            ValueError: `gpu` is unknown, or the launch uses a type of number that its tensor cores do not have.
        """
        return limits(self, gpu_named(gpu), self._ptx, registers)

    def loops(self, arch: str | None = None) -> tuple[SassLoop, ...]:
        """The loops of the kernel's machine code for `arch` ("sm_90"), in the order of their addresses.

        Without `arch`, the code is for the GPU that the PTX names. Raises what `sass.loops_of_ptx` raises, and a
        ValueError if the kernel was executed as C++.
        """
        if self._ptx is None:
            raise ValueError(f"kernel {self.kernel} was executed as C++: ask the CudaKernel itself for its loops(arch)")
        return loops_of_ptx(self._ptx, arch)

    @property
    def instructions(self) -> Instructions:
        """Executed PTX instructions by name, as issued by a warp; see `Instructions`.

        Raises:
            ValueError: the kernel was executed as C++, which has no instructions of a GPU, or one of its loops has
                a million turns without a barrier.
        """
        if self._instructions is None and self._ptx is not None:
            raise ValueError(
                f"kernel {self.kernel}: one lane of a warp made a million turns of its loops before the next lane "
                "ran, too many to compare the two: count the instructions of a smaller launch"
            )
        if self._instructions is None:
            raise ValueError(
                f"kernel {self.kernel} was executed as C++, which has no PTX instructions to count: make it with "
                'CudaKernel(..., through="ptx")'
            )
        return self._instructions

    @property
    def barriers(self) -> int:
        return self.count("barrier").requests

    @property
    def shuffles(self) -> int:
        return self.count("shuffle").requests

    @property
    def atomics(self) -> int:
        return self.count("atomic").lanes

    @property
    def bank_conflicts(self) -> int:
        return self.count(space="shared").bank_conflicts

    def accesses(self, tensor: str) -> np.ndarray:
        """The part of the trace that touches this tensor, or this shared array."""
        for space, names in (("global", self.tensors), ("shared", self.shared)):
            if tensor in names:
                return self.trace[(self.trace["space"] == space) & (self.trace["tensor"] == names.index(tensor))]
        raise ValueError(f"the launch of {self.kernel} has no {tensor!r}: it has {[*self.tensors, *self.shared]}")

    def __str__(self) -> str:
        rows = [f"{self.kernel}, {_dims(self.grid)} thread blocks of {_dims(self.block)} threads"]
        rows.append(f"{'line':>5} {'access':<14} {'requests':>9} {'bytes':>9} {'sectors':>8} {'conflicts':>9}  source")
        for c in self.lines:
            text = self._source[c.line - 1].strip()[:60] if 0 < c.line <= len(self._source) else ""
            conflicts = c.bank_conflicts if c.space == "shared" else ""
            memory = f"{c.bytes:9,} {c.sectors or '':>8} {conflicts:>9}" if c.lanes else " " * 28
            rows.append(f"{c.line:5} {c.access + ' ' + c.space:<14} {c.requests:9,} {memory}  {text}")
        return "\n".join(rows)


class Report:
    """The result of `cudascope.observe()`, its `launches` in order, or of `cudascope.check()`, its `findings`."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.findings: list[Finding] = []
        self.num_checked = 0  # launches
        self._written: list[tuple[int, int, np.ndarray]] = []  # where a map starts, bytes of its elements, the map
        self._names: dict[int, str] = {}  # of the arrays of checked launches, by address
        self._outputs: dict[int, Array] = {}  # those that are outputs because of their name
        self._last = ("", "")  # the last checked kernel, and its file

    def count(self, access: str | None = None, space: str | None = None, line: int | None = None) -> LineCount:
        """The sum over all launches."""
        total = LineCount(line or 0, access or "", space or "", 0, 0, 0, 0, 0)
        for launch in self.launches:
            total = total + launch.count(access, space, line)
        return total

    def limits(self, gpu: str = "H100", *, registers: int | None = None) -> Limits:
        """Return the least time that the only launch of the report can take on `gpu`; see `Launch.limits`.

        Raises:
            ValueError: there is another number of launches. Times of several launches do not add up in this way,
                because a launch may find in L2 what an earlier launch has left there.
        """
        if len(self.launches) != 1:
            raise ValueError(
                f"limits() needs a report of one observed launch, got {len(self.launches)}: "
                "use report.launches[i].limits(...) for each of several launches"
            )
        return self.launches[0].limits(gpu, registers=registers)

    @property
    def instructions(self) -> Instructions:
        """Executed PTX instructions of all launches by name, as issued by a warp; see `Instructions`.

        Raises:
            ValueError: there is no launch, or one was executed as C++, which has no instructions of a GPU.
        """
        if not self.launches:
            raise ValueError("instructions need a report of observed launches, got none: launch inside of observe()")
        first, *others = (launch.instructions for launch in self.launches)
        return sum(others, first)

    @property
    def trace(self) -> np.ndarray:
        """The accesses of all launches."""
        return np.concatenate([launch.trace for launch in self.launches] or [np.empty(0, TRACE)])

    def unwritten(self, tensor: object) -> np.ndarray:
        """Indices [n, dimensions] of the elements of `tensor` that no checked launch wrote."""
        return np.argwhere(~self._is_written(tensor))

    def add_checked(self, findings: Sequence[Finding], kernel: str, file: str) -> None:
        """A launch of a kernel of a file was checked, and this was found."""
        self.findings = by_cause([*self.findings, *findings])
        self.num_checked += 1
        self._last = kernel, file

    def add_arrays(self, arrays: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """A launch is going to be checked with these arrays by their names; some are outputs because of their name."""
        self._names |= {array.address: name for name, array in arrays.items()}
        self._outputs |= {array.address: array for array in outputs.values()}

    def never_written(self, outputs: Sequence[Array], names: Collection[str]) -> Finding | None:
        """The finding about elements of outputs that no launch has written, None if all are.

        ValueError: one of `names` is the name of no parameter that got an array.
        """
        known = set(self._names.values())
        if unknown := sorted(set(names) - known):
            raise ValueError(
                f"outputs: no launch inside has given an array to a parameter {unknown[0]!r}: there are {sorted(known)}"
            )
        found = []
        for i, array in enumerate([*outputs, *self._outputs.values()]):
            if array.size and len(left := self.unwritten(array)):
                name = self._names.get(array.address, f"outputs[{i}]")
                first = ", ".join(map(str, left[0].tolist()))
                found.append(f"{len(left)} of the {array.size} elements of {name}, the first of them {name}[{first}]")
        if not found:
            return None
        (kernel, file), rule = self._last, NEVER_WRITTEN
        sentence = rule.sentence.format(elements="; ".join(found))
        return Finding(sentence, kernel=kernel, what=rule.what, rule=rule.name, file=file, line=0)

    def written_map(self, start: int, granule: int, elements: int) -> np.ndarray:
        """Return the map of written elements, one byte each, which a launch on this memory reads and extends."""
        for known_start, known_granule, known in self._written:
            if (known_start, known_granule, known.size) == (start, granule, elements):
                return known
        self._written.append((start, granule, np.zeros(elements, np.uint8)))
        return self._written[-1][2]

    def forget(self, start: int) -> None:
        """Forget what was written to the memory that begins at `start`: it was freed, or has other elements now."""
        self._written = [each for each in self._written if each[0] != start]

    def _is_written(self, tensor: object) -> np.ndarray:
        array = as_array(tensor)
        address = np.full(array.shape, array.address, np.int64)
        for dim, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            shape = [size if d == dim else 1 for d in range(len(array.shape))]
            address += (np.arange(size) * stride * array.itemsize).reshape(shape)
        written = np.zeros(array.shape, bool)
        for start, granule, known in self._written:
            index = (address - start) // granule
            inside = (address >= start) & (index < known.size)
            written |= inside & (known[index.clip(0, max(known.size - 1, 0))] > 0) if known.size else False
        return written

    def __str__(self) -> str:
        if self.findings:
            return "\n".join(f"{found.rule}, {found.count:,} ×: {found}" for found in self.findings)
        if self.num_checked:
            return f"{self.num_checked} launch{'es' * (self.num_checked > 1)} checked, nothing found"
        return "\n\n".join(map(str, self.launches)) or "no launch"


def _dims(dims: Sequence[int]) -> str:
    used = list(dims)
    while len(used) > 1 and used[-1] == 1:
        used.pop()
    return " × ".join(map(str, used))
