"""The least time of an observed launch on a GPU, by the units of the GPU: `report.limits("H100")`.

    time of a unit = its work / (its work per clock cycle · the highest clock)

work.py counts the work, and gpus.py has the rates of the units. The largest of the times is a lower bound of the
launch's time. At best all units work at the same time and none of them ever waits, so a real launch takes longer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cudascope.gpus import LOADS_PER_CLOCK, SPECIAL_PER_CLOCK, Gpu, thread_blocks_per_sm
from cudascope.toolchain.ptxas import PtxText, registers_of
from cudascope.watch.work import SECTOR_BYTES, Work

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

    Raises:
        ValueError: the tensor cores of this GPU do not have a type that the work uses.
    """
    sms = min(gpu.num_sms, work.thread_blocks) * gpu.clock  # SM-cycles per second; a thread block stays on one SM
    seconds, words, without = {}, {}, {}
    if work.tensor_flops is None:
        without = dict.fromkeys(("tensor cores", "FP32 lanes", "special functions"), _CPP)
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
