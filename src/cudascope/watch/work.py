"""The work of an observed launch, by the units of a GPU that do it: `Launch.work`, of which limits are computed.

Each number is the least that the executed instructions can need on any GPU:

- **Instructions** are those of the PTX (translate/ptx/costs.py), by warps. A warp executes an instruction at least as
  often as the lane that executes it most. One case is not covered: ptxas may remove instructions whose results are
  never used, for example because a mask is false for a whole tile.
- **Shared memory** serves one word of each bank in a clock cycle. Asynchronous units (wgmma, bulk copies) move at most
  128 bytes in a clock cycle, so their bytes count, not their conflicts.
- **L2** gets each store and each atomic operation, and each load that goes past L1 (cp.async.cg, cp.async.bulk, ld.cg).
  L1 may answer the other loads, so each sector of a tensor that they read counts once.
- **DRAM** is read once for each sector that the launch reads before it writes the sector. L2 is empty at the start of
  the launch. L2 may keep the sectors that the launch writes, so only what exceeds the size of L2 counts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cudascope.cpu.abi import ACCESSES, SPACES

SECTOR_BYTES, WAVEFRONT_BYTES = 32, 128

_ASYNCHRONOUS = re.compile(r"\b(wgmma\.|cp\.async\.bulk|mbarrier\.)")
_PAST_L1 = re.compile(r"\b(cp\.async\.cg|ld[\w.:]*\.(cg|cv)\b)")
_BY_ELEMENT = re.compile(r"\b(atom|red|ld|st)[\w.:]*\.v[248]\b")  # if it is atomic, each element is one request here


class Work(NamedTuple):
    """The least work of a launch for each unit. None: not counted, for the kernel was not executed as PTX."""

    thread_blocks: int
    tensor_flops: Mapping[tuple[str, str], int] | None  # by the types of A and D
    fp32: int | None  # additions, products, or fused multiply-adds, 32 for each instruction of a warp
    special: int | None  # results of exponentials, reciprocals and their relatives, 32 for each instruction
    moves: int  # instructions of a warp that load, store or change memory
    wavefronts: int  # clock cycles of one SM's shared memory
    l2_bytes: int
    dram_read_bytes: int
    dram_written_bytes: int


def work_of(thread_blocks: int, request, code: Mapping[int, str], costs: Sequence[Mapping] | None) -> Work:
    """Return the work of a launch from the runtime's counts.

    Args:
        request: the structure LAUNCH that the runtime filled in.
        code: the PTX instruction of each site; empty for C++.
        costs: those of each counted part of the PTX; None for C++.
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
            elif costs is not None or access == "atomic":
                l2 += moved
    if costs is None:  # the host's compiler may have divided a store
        l2 += SECTOR_BYTES * request.sectors_written
    l2 += max(past_l1, SECTOR_BYTES * request.sectors_read)
    memory = wavefronts, l2, SECTOR_BYTES * request.sectors_read_first, SECTOR_BYTES * request.sectors_written
    if costs is None:
        return Work(thread_blocks, None, None, None, requests, *memory)
    total = _total(costs, request.executed[: request.num_executed])
    tensor = {kinds[1:]: amount for kinds, amount in total.items() if kinds[0] == "tensor"}
    fp32 = total.get("fma", 0) + max(total.get("sum", 0), total.get("product", 0))
    return Work(thread_blocks, tensor, 32 * fp32, 32 * total.get("special", 0), total.get("moves", 0), *memory)


def _total(costs: Iterable[Mapping], executed: Iterable[int]) -> dict:
    """Return the sum over all counted parts of a kernel."""
    total: dict = {}
    for cost, times in zip(costs, executed, strict=True):
        if not times:
            continue
        for unit, amount in cost.items():
            total[unit] = total.get(unit, 0) + amount * times
    return total
