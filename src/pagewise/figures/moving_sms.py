"""Thread blocks on the SMs of a GPU over time: a schedule counted, not measured.

Assumed: an SM runs one thread block at a time and takes the next of the grid when it is free; a thread block takes as
long as it has tokens to read, however many others run. The memory's limit and v2's second kernel are left out.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pagewise.figures.blocks import OWNERS
from pagewise.figures.drawing import diagram
from pagewise.figures.embed import Embedded
from pagewise.figures.palette import DASHES, INK, PALETTE
from pagewise.figures.steps import stepper
from pagewise.tools.sizes import cdiv

COLUMNS = 22
STEPS = 12  # at most


class Run(NamedTuple):
    """One thread block on one SM, from `start` to `stop` (in tokens that a thread block reads)."""

    sm: int
    start: int
    stop: int
    sequence: int


def schedule(grid: Sequence[tuple[int, int]], num_sms: int) -> list[Run]:
    """Where and when each thread block runs: in the order of the grid, each on the SM that is free first.

    `grid` holds (sequence, tokens to read) of each thread block.
    """
    free = [(0, sm) for sm in range(num_sms)]
    runs = []
    for sequence, tokens in grid:
        start, sm = heapq.heappop(free)
        runs.append(Run(sm, start, start + tokens, sequence))
        heapq.heappush(free, (start + tokens, sm))
    return runs


def sm_steps(
    grids: Mapping[str, Sequence[tuple[int, int]]], num_sms: int, *, title: str, alt: str, owner: str = "sequence"
) -> Embedded:
    """Which SMs work while each grid runs from its start: squares for SMs, curves for how many are busy.

    Args:
        grids: what is compared → (sequence, tokens to read) of each thread block, in the order of the grid.
        owner: whose colour a thread block has, if not its sequence's: what the first number of a pair counts.
    """
    runs = {name: schedule(grid, num_sms) for name, grid in grids.items()}
    moments = sorted({time for of_grid in runs.values() for run in of_grid for time in (run.start, run.stop)})
    steps = min(STEPS, len(moments))
    times = [moments[i * (len(moments) - 1) // max(steps - 1, 1)] for i in range(steps)]
    frames = []
    for time in times:
        said = ", ".join(f"{name}: {_busy(of_grid, time)} of {num_sms} SMs busy" for name, of_grid in runs.items())
        done = [name for name, of_grid in runs.items() if all(run.stop <= time for run in of_grid)]
        said += f"; {' and '.join(done)} done" if done else ""
        frames.append((f"At time {time:,}. {said}.", (runs, num_sms, time, moments[-1], owner)))
    return stepper(frames, _draw, title=title, alt=alt, height=4.6, still=len(times) // 2)


def _busy(runs: Sequence[Run], time: int) -> int:
    return sum(run.start <= time < run.stop for run in runs)


def _draw(figure: Figure, frame: tuple[Mapping[str, Sequence[Run]], int, int, int, str]) -> None:
    runs, num_sms, time, end, owner = frame
    *panels, curve = figure.subplots(len(runs) + 1, 1, height_ratios=[1.0] * len(runs) + [1.2])
    for i, (ax, (name, of_grid)) in enumerate(zip(panels, runs.items(), strict=True)):
        _draw_sms(ax, of_grid, num_sms, time)
        ax.set_title(f"{name}: {len(of_grid)} thread blocks (a colour per {owner})", fontsize=10)
        edges = sorted({0, end} | {t for run in of_grid for t in (run.start, run.stop)})
        busy = [_busy(of_grid, t) for t in edges]
        curve.step(edges, busy, where="post", color=PALETTE[i], ls=DASHES[i], label=name)
    curve.axvline(time, color=INK, lw=1)
    curve.set(xlim=(0, end), ylim=(0, num_sms * 1.08), xlabel="time (tokens read by a thread block)", ylabel="SMs busy")
    curve.xaxis.set_major_locator(MaxNLocator(5))
    curve.legend(loc="upper right")


def _draw_sms(ax: Axes, runs: Sequence[Run], num_sms: int, time: int) -> None:
    rows = cdiv(num_sms, COLUMNS)
    owners = np.full(rows * COLUMNS, -1)
    owners[num_sms:] = -2  # no SM
    for run in runs:
        if run.start <= time < run.stop:
            owners[run.sm] = run.sequence % len(OWNERS)
    cells = np.ma.masked_equal(owners.reshape(rows, COLUMNS), -2)
    colours = ListedColormap(["#ffffff", *OWNERS])
    ax.pcolormesh(cells, cmap=colours, vmin=-1.5, vmax=len(OWNERS) - 0.5, edgecolors="#8a8aa0", lw=0.3)
    ax.set_aspect("equal")
    diagram(ax, (0, COLUMNS), (rows + 0.1, -0.1))
