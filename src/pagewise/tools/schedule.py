"""A schedule counted, not measured: when each program of a grid runs, and on which SM or place of a GPU.

Assumed: an SM runs one program at a time and takes the next of the grid when it is free. A program takes as long as it
has tokens to read, however many others run.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """One program on one SM, from `start` to `stop`, in tokens that a program reads."""

    sm: int
    start: float
    stop: float
    sequence: int


def schedule(grid: Sequence[tuple[int, int]], num_sms: int) -> list[Run]:
    """Return where and when each program runs: in the order of the grid, each on the SM that is free first.

    `grid` holds (sequence, tokens to read) of each program.
    """
    free = [(0, sm) for sm in range(num_sms)]
    runs = []
    for sequence, tokens in grid:
        start, sm = heapq.heappop(free)
        runs.append(Run(sm, start, start + tokens, sequence))
        heapq.heappush(free, (start + tokens, sm))
    return runs
