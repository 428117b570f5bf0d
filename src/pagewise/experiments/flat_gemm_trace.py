"""The flat GEMM seen from the inside: its ring of buffers over time, and how busy a ring keeps a memory (lesson 8).

The events come from a launch in the CPU runner, whose threads record every access.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

import cudascope
from pagewise.experiments.decode_schedules import LATENCY
from pagewise.flash_decoding_plus_plus.flat_gemm import B_N, NUM_WARPS, TILE_K, TILE_M, on_tensor_cores, stage_bytes
from pagewise.tools.roofline import GPUS, Gpu


class Event(NamedTuple):
    """A warp starts to copy a tile into a stage of its ring, or multiplies the tile that lies there."""

    what: str  # "copy" or "multiply"
    warp: int
    turn: int  # of the warp: in its turn-th turn it multiplies this tile
    stage: int  # of its ring
    k_tile: int  # columns k_tile · TILE_K … of x and w


def ring_timeline(
    num_stages: int = 4, *, K: int = 6 * NUM_WARPS * TILE_K, M: int = TILE_M, warp: int | None = None
) -> list[Event]:
    """Return the events of the warps of one thread block, or of one `warp`, in the order of a launch on the CPU.

    Each warp's events are in its own order; that of different warps is one of many. A copy is on its way from its event
    on, at the latest until the same turn is multiplied: then it has been waited for.
    """
    x, w = torch.zeros(M, K, dtype=torch.float16), torch.zeros(B_N, K, dtype=torch.float16)
    with cudascope.observe() as report:
        on_tensor_cores(x, w, num_stages=num_stages)
    (launch,) = report.launches
    words = stage_bytes(M) // NUM_WARPS // 4  # of one stage in shared memory
    events, tiles, turns = [], {}, Counter()
    column = None  # of w, that this lane has just read to copy it
    for access in launch.trace[launch.trace["lane"] == 0]:  # the lane that copies the corner of each tile
        element = int(access["element"])
        if access["space"] == "global":
            column = element % K
            continue
        (of_warp, stage), inside = divmod(element // words, num_stages), element % words
        what = "multiply" if access["access"] == "read" else "copy"
        if inside == 0 and access["bytes"] == 16 and (what == "multiply" or column is not None):
            if what == "copy":
                tiles[of_warp, stage] = column // TILE_K
            events.append(Event(what, of_warp, turns[what, of_warp], stage, tiles[of_warp, stage]))
            turns[what, of_warp] += 1
        column = None
    return [event for event in events if warp in (None, event.warp)]


def memory_in_use(rings: Mapping[str, tuple[int, int]], gpus: Sequence[Gpu] = GPUS) -> dict[str, list[float]]:
    """Return for each GPU the per cent of its bandwidth that each ring can use, by Little's law. A model, not measured.

    Each SM runs one thread block. One buffer of its ring is multiplied, and the others are on their way.

    Args:
        rings: name → (buffers, bytes of a buffer).
    """
    needed = {gpu.name: gpu.bandwidth * LATENCY / gpu.num_sms for gpu in gpus}  # bytes on their way for each SM
    return {
        name: [100 * min(1.0, (buffers - 1) * size / of_sm) for buffers, size in rings.values()]
        for name, of_sm in needed.items()
    }
