"""The least time of an observed launch on a GPU, by the units of the GPU: `report.limits("H100")`.

    time of a unit = its work / (its work per clock cycle · the highest clock)

gpus.py has the rates of the units. The largest of the times is a lower bound of the
launch's time. At best all units work at the same time and none of them ever waits, so a real launch takes longer.

`Launch.work` has the work. Each number is the least that the executed instructions can need on any GPU:

- **Instructions** are those of the PTX (translate/ptx/costs.py), by warps. A warp executes an instruction at least as
  often as the lane that executes it most. One case is not covered: ptxas may remove instructions whose results are
  never used, for example because a mask is false for a whole tile.
- **Issue slots**: an SM begins four instructions of a warp in a clock cycle. Only the PTX instructions count here that
  are instructions of the machine code for certain: sums and products of FP32 (a sum and a product may be one), special
  functions, what moves data, products of matrices, shuffles and barriers. Half of the other floating-point instructions
  count, for ptxas may make one of two (a comparison and a selection are a maximum). Integers, moves and branches count
  nothing: ptxas joins, hoists and unrolls them. So this number underestimates the machine code, where a 64-bit sum or a
  scaled exponential also needs several instructions. `loops` shows the machine code itself.
- **Shared memory** serves one word of each bank in a clock cycle. Asynchronous units (wgmma, bulk copies) move at most
  128 bytes in a clock cycle, so their bytes count, not their conflicts.
- **L2** gets each store and each atomic operation, and each load that goes past L1 (cp.async.cg, cp.async.bulk, ld.cg).
  L1 may answer the other loads, so each sector of a tensor that they read counts once.
- **DRAM** is read once for each sector that the launch reads before it writes the sector. L2 is empty at the start of
  the launch. L2 may keep the sectors that the launch writes, so only what exceeds the size of L2 counts.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cudascope.cpu.abi import ACCESSES, SPACES
from cudascope.gpus import ISSUES_PER_CLOCK, LOADS_PER_CLOCK, SPECIAL_PER_CLOCK, Gpu, thread_blocks_per_sm
from cudascope.toolchain.ptxas import PtxText, registers_of
from cudascope.translate.ptx.costs import cost
from cudascope.translate.ptx.counters import Part
from cudascope.watch.instructions import class_of, instructions_of

SECTOR_BYTES, WAVEFRONT_BYTES = 32, 128

_ASYNCHRONOUS = re.compile(r"\b(wgmma\.|cp\.async\.bulk|mbarrier\.)")
_PAST_L1 = re.compile(r"\b(cp\.async\.cg|ld[\w.:]*\.(cg|cv)\b)")
_FLOATING = ("fp32", "fp16", "fp64", "convert")  # classes of instructions
_BY_ELEMENT = re.compile(r"\b(atom|red|ld|st)[\w.:]*\.v[248]\b")  # if it is atomic, each element is one request here


class Work(NamedTuple):
    """The least work of a launch for each unit. None: not counted, for the kernel was not executed as PTX."""

    thread_blocks: int
    tensor_flops: Mapping[tuple[str, str], int] | None  # by the types of A and D
    fp32: int | None  # additions, products, or fused multiply-adds, 32 for each instruction of a warp
    special: int | None  # results of exponentials, reciprocals and their relatives, 32 for each instruction
    issues: int | None  # instructions of a warp that need an issue slot for certain
    moves: int  # instructions of a warp that load, store or change memory
    wavefronts: int  # clock cycles of one SM's shared memory
    l2_bytes: int
    dram_read_bytes: int
    dram_written_bytes: int


def work_of(thread_blocks: int, request, code: Mapping[int, str], parts: Sequence[Part] | None) -> Work:
    """Return the work of a launch from the runtime's counts, which the structure LAUNCH `request` has.

    `code` has the PTX instruction of each site, and `parts` are the counted parts of the PTX: empty and None for C++.
    """
    counts = request.counts[: request.num_counts]
    wavefronts = l2 = past_l1 = requests = 0
    for c in counts:
        text, access, space = code.get(c.site, ""), ACCESSES[c.access], SPACES[c.space]
        if access not in ("read", "write", "atomic") or space == "other":
            continue
        asynchronous = bool(_ASYNCHRONOUS.search(text))
        in_bytes = asynchronous or (access == "atomic" and bool(_BY_ELEMENT.search(text)))
        requests += c.requests
        if space == "shared" and "mbarrier." not in text:
            wavefronts += c.bytes // WAVEFRONT_BYTES if in_bytes else c.wavefronts
        elif space == "global":
            moved = c.bytes if in_bytes else SECTOR_BYTES * c.sectors
            if access == "read":
                past_l1 += moved if asynchronous or _PAST_L1.search(text) else 0
            elif parts is not None or access == "atomic":
                l2 += moved
    if parts is None:  # the host's compiler may have divided a store
        l2 += SECTOR_BYTES * request.sectors_written
    l2 += max(past_l1, SECTOR_BYTES * request.sectors_read)
    memory = wavefronts, l2, SECTOR_BYTES * request.sectors_read_first, SECTOR_BYTES * request.sectors_written
    if parts is None:
        return Work(thread_blocks, None, None, None, None, requests, *memory)
    executed = request.executed[: request.num_executed]
    total = Counter()
    for part, times in zip(parts, executed, strict=True):
        total.update({unit: amount * times for unit, amount in part.needs.items()})
    total = +total  # without units that were not needed
    tensor = {kinds[1:]: amount for kinds, amount in total.items() if kinds[0] == "tensor"}
    special, moves = total["special"], total["moves"]
    fp32 = total["fma"] + max(total["sum"], total["product"])  # which may be one multiply-add
    issues = fp32 + special + moves + _other_issues(instructions_of(parts, executed))
    return Work(thread_blocks, tensor, 32 * fp32, 32 * special, issues, moves, *memory)


def _other_issues(instructions: Mapping[str, int]) -> int:
    """Return how many issue slots are needed for certain besides those of FP32, special functions and moves."""
    issues = pairs = 0
    for name, number in instructions.items():
        each = class_of(name)
        if each in ("product", "shuffle") or name.startswith(("bar.", "barrier.")):
            issues += number
        elif name.endswith(".f32x2"):
            issues -= number * bool(cost(name))  # the work of two instructions, but one instruction
        elif each in _FLOATING and not cost(name):
            pairs += 0 if name.startswith(("neg.", "abs.")) else number  # which are a part of another instruction
    return issues + pairs // 2


_CPP = "the kernel was executed as C++, which has no instructions of a GPU"


class Occupancy(NamedTuple):
    """How full an SM can be of one kernel. `limited_by` names the resource that allows the fewest thread blocks."""

    thread_blocks: int  # on one SM at once; 0: not even one fits
    warps: int
    max_warps: int
    registers: int  # per thread
    shared_bytes: int  # per thread block
    limited_by: str


@dataclass(frozen=True)
class Limits:
    """The least time of one launch on one GPU.

    Attributes:
        seconds: by unit. The times are lower bounds: no run on this GPU can be faster than the largest of them.
        work: what each unit has to do, in words.
        not_counted: the units without a time, and why.
        occupancy: None if the registers are unknown; pass `registers=` then.
    """

    kernel: str
    gpu: str
    seconds: Mapping[str, float]
    work: Mapping[str, str]
    not_counted: Mapping[str, str]
    occupancy: Occupancy | None

    @property
    def largest(self) -> str:
        """The unit that needs the most time."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def least(self) -> float:
        """The time of this unit, in seconds: the launch takes at least as long."""
        return self.seconds[self.largest]

    def __str__(self) -> str:
        rows = [
            f"{self.kernel} takes at least {_time(self.least)} on one {self.gpu}. This lower bound is set by: "
            f"{self.largest}.",
            f"{'unit':<17} {'work, at least':<44} {'least time':>12}",
        ]
        rows += [f"{unit:<17} {self.work[unit]:<44} {_time(time):>12}" for unit, time in self.seconds.items()]
        rows += [f"{unit:<17} not counted: {why}" for unit, why in self.not_counted.items()]
        return "\n".join([*rows, self._occupancy()])

    def _occupancy(self) -> str:
        full = self.occupancy
        if full is None:
            return "occupancy: unknown, because the registers per thread are. Pass registers=..."
        if not full.thread_blocks:
            return f"occupancy: 0, because one thread block needs more {full.limited_by} than an SM has"
        return (
            f"occupancy: {full.warps} of {full.max_warps} warps per SM, {full.thread_blocks} thread blocks with "
            f"{full.registers} registers per thread and {full.shared_bytes:,} bytes of shared memory, limited by "
            f"{full.limited_by}"
        )


def limits(launch: Any, gpu: Gpu, ptx: PtxText | None, registers: int | None) -> Limits:
    """Return the limits of a `Launch`. `registers` per thread; None: as ptxas gives them, if it is there."""
    if registers is not None and (isinstance(registers, bool) or not isinstance(registers, int) or registers < 1):
        raise ValueError(f"registers must be a positive int, got {registers!r}")
    if registers is None and ptx is not None:
        registers = registers_of(ptx, gpu.sm)
    seconds, work, not_counted = times(launch.work, gpu)
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    full = _occupancy(gpu, threads, registers, launch.shared_bytes) if registers else None
    return Limits(launch.kernel, gpu.name, seconds, work, not_counted, full)


def times(work: Work, gpu: Gpu) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """Return the least time of each unit, its work in words, and why a unit has no time.

    ValueError: the tensor cores of this GPU do not have a type that the work uses.
    """
    sms = min(gpu.num_sms, work.thread_blocks) * gpu.clock  # SM-cycles per second; a thread block stays on one SM
    seconds, words, without = {}, {}, {}
    if work.tensor_flops is None:
        without = dict.fromkeys(("tensor cores", "FP32 lanes", "special functions", "issue slots"), _CPP)
    else:
        cycles = 0.0
        for (a, result), flops in work.tensor_flops.items():
            rate = gpu.tensor_rate(a, result)
            if rate is None:
                raise ValueError(f"gpu {gpu.name} has no tensor cores for {a}, which the launch multiplies")
            cycles += flops / rate
        kinds = ", ".join(f"{a} into {result}" for a, result in work.tensor_flops) or "no product"
        seconds["tensor cores"] = cycles / sms
        words["tensor cores"] = f"{sum(work.tensor_flops.values()):,} FLOPs ({kinds})"
        seconds["FP32 lanes"] = work.fp32 / (gpu.fp32_lanes * sms)
        words["FP32 lanes"] = f"{work.fp32:,} sums, products or multiply-adds"
        seconds["special functions"] = work.special / (SPECIAL_PER_CLOCK * sms)
        words["special functions"] = f"{work.special:,} results"
        seconds["issue slots"] = work.issues / (ISSUES_PER_CLOCK * sms)
        words["issue slots"] = f"{work.issues:,} instructions of a warp"
    seconds["load/store"] = work.moves * 32 / (LOADS_PER_CLOCK * sms)
    words["load/store"] = f"{work.moves:,} instructions of a warp"
    seconds["shared memory"] = work.wavefronts / sms
    words["shared memory"] = f"{work.wavefronts:,} cycles, bank conflicts included"
    if gpu.l2_bytes_per_clock is None:
        without["L2"] = f"NVIDIA does not publish the bandwidth of the {gpu.name}'s L2"
    else:
        seconds["L2"] = work.l2_bytes / (gpu.l2_bytes_per_clock * gpu.clock)
        words["L2"] = f"{work.l2_bytes:,} bytes ({work.l2_bytes // SECTOR_BYTES:,} sectors)"
    moved = work.dram_read_bytes + max(0, work.dram_written_bytes - gpu.l2_bytes)
    seconds["DRAM"] = moved / gpu.dram_bandwidth
    words["DRAM"] = f"{moved:,} bytes, each sector read once"
    return seconds, words, without


def _occupancy(gpu: Gpu, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    fits = thread_blocks_per_sm(gpu, threads, registers, shared_bytes)
    limited_by = min(fits, key=fits.__getitem__)
    warps = fits[limited_by] * -(-threads // 32)
    return Occupancy(fits[limited_by], warps, gpu.threads_per_sm // 32, registers, shared_bytes, limited_by)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
