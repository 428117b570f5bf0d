"""A ring of processes, step by step: who holds which keys, who computes which scores, and who waits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

from pagewise.figures.drawing import arrow, box, diagram, rectangle
from pagewise.figures.palette import BLUE, INK, ORANGE, SAND, TEAL
from pagewise.figures.steps import Embedded, stepper

PROCESSES = (SAND, TEAL, ORANGE, BLUE)  # of process 0, 1, 2, 3; a number tells them apart as well
HIDDEN = {"ec": "#8a8aa0", "hatch": "....", "lw": 0.4}  # no query of the tile sees a key of the tile
WAITING = {"ec": "#8a8aa0", "hatch": "////", "lw": 0.4}
Shares = Sequence[Sequence[int]]  # the pieces of the sequence that each process holds, 0 being the first piece


class Tile(NamedTuple):
    """The scores between the queries of one piece of the sequence and the keys of one piece."""

    row: int
    column: int
    process: int  # it computes the tile
    step: int  # of the ring
    work: float  # the share of the pairs that are visible: 0, 1, or 0.5 where the two pieces are the same


def ring_tiles(shares: Shares, *, causal: bool) -> list[Tile]:
    """Return all tiles. In step s, process r has its own queries and the keys of process r − s."""
    found = []
    for step in range(len(shares)):
        for r, rows in enumerate(shares):
            for row in rows:
                for column in shares[(r - step) % len(shares)]:
                    work = 1.0 if not causal or column < row else 0.5 if column == row else 0.0
                    found.append(Tile(row, column, r, step, work))
    return found


def step_work(tiles: Sequence[Tile], process: int, step: int) -> float:
    """Return the work of a process in a step, in tiles."""
    return sum(tile.work for tile in tiles if (tile.process, tile.step) == (process, step))


def ring_steps(shares: Shares, *, title: str, alt: str) -> Embedded:
    """Return a stepper over a ring: the keys and values that each process holds, and the scores that it computes.

    Raises:
        ValueError: there are more processes than colours.
    """
    _check(shares)
    n, tiles = len(shares), ring_tiles(shares, causal=False)
    frames = []
    for step in range(n):
        held = ", ".join(f"process {r} attends to K, V {(r - step) % n}" for r in range(n))
        then = "Each process passes its K, V on." if step < n - 1 else "Each process has seen all keys."
        frames.append((f"Step {step}: {held}. {then}", step))

    def draw(figure: Figure, step: int) -> None:
        grid = GridSpec(2, 1, figure, height_ratios=[1.0, 2.1])
        _draw_ring(figure.add_subplot(grid[0]), n, step)
        ax = figure.add_subplot(grid[1])
        _draw_scores(ax, tiles, shares, step)
        ax.set(xlabel="keys of process", ylabel="queries of process")

    return stepper(frames, draw, title=title, alt=alt, height=4.4, still=1)


def balance_steps(orders: Mapping[str, Shares], *, title: str, alt: str) -> Embedded:
    """Return a stepper over causal rings side by side: the scores of each step, and how long each process waits.

    A step ends when its slowest process has finished. Time counts in pairs, one unit being a piece against a piece.

    Args:
        orders: the name of an order of tokens → for each process, the pieces of the sequence that it holds.

    Raises:
        ValueError: there are more processes than colours.
    """
    for shares in orders.values():
        _check(shares)
    tiles = {name: ring_tiles(shares, causal=True) for name, shares in orders.items()}
    ends = {name: _ends(tiles[name], len(shares)) for name, shares in orders.items()}
    size = max(sum(map(len, shares)) for shares in orders.values())  # of the matrix, in the smallest pieces
    scale = {name: (size / sum(map(len, shares))) ** 2 for name, shares in orders.items()}
    steps = max(map(len, orders.values()))
    frames = []
    for step in range(steps):
        said = []
        for name, shares in orders.items():
            work = (scale[name] * step_work(tiles[name], r, step) for r in range(len(shares)))
            said.append(f"{name}: " + ", ".join(f"{each:g}" for each in work))
        frames.append((f"Step {step}. Work of the processes in order. {'; '.join(said)}.", step))
    last = max(scale[name] * ends[name][-1] for name in orders)

    def draw(figure: Figure, step: int) -> None:
        grid = GridSpec(2, len(orders), figure, height_ratios=[2.2, 1.2])
        for i, (name, shares) in enumerate(orders.items()):
            upper, lower = (figure.add_subplot(grid[row, i]) for row in (0, 1))
            _draw_scores(upper, tiles[name], shares, step)
            upper.set_title(name, fontsize=10)
            upper.set_xlabel("keys")
            begins = [0.0, *ends[name]]
            for r in range(len(shares)):
                for s in range(step + 1):
                    begin, end = (scale[name] * time for time in begins[s : s + 2])
                    done = scale[name] * step_work(tiles[name], r, s)
                    rectangle(lower, begin, r + 0.1, end - begin, 0.8, **WAITING)
                    box(lower, begin, r + 0.1, done, 0.8, f"{s}" if done else "", fill=PROCESSES[r])
            lower.set(xlim=(0, last * 1.02), ylim=(len(shares), 0))
            lower.set_yticks([r + 0.5 for r in range(len(shares))], range(len(shares)))
            lower.set_xlabel("time (hatched: waits)")
            if i == 0:
                upper.set_ylabel("queries")
                lower.set_ylabel("process")

    return stepper(frames, draw, title=title, alt=alt, height=3.9, still=min(1, steps - 1))  # the first wait


def _check(shares: Shares) -> None:
    if not 1 <= len(shares) <= len(PROCESSES):
        raise ValueError(f"shares must be of 1 to {len(PROCESSES)} processes, got {len(shares)}")


def _ends(tiles: Sequence[Tile], n: int) -> list[float]:
    """Return the time at which each step ends, in tiles."""
    ends, now = [], 0.0
    for step in range(n):
        now += max(step_work(tiles, r, step) for r in range(n))
        ends.append(now)
    return ends


def _draw_ring(ax: Axes, n: int, step: int) -> None:
    """Draw a box per process with its queries, and the K and V that it holds in a step. Arrows show the next move."""
    diagram(ax, (-0.1, 1.5 * n - 0.4), (-0.65, 1.75))
    for r in range(n):
        left, held = 1.5 * r, (r - step) % n
        ax.text(left + 0.5, 1.55, f"process {r}", ha="center", fontsize=9)
        box(ax, left, 0.75, 1, 0.65, f"Q {r}", fill=PROCESSES[r])
        box(ax, left, 0, 1, 0.65, f"K, V {held}", fill=PROCESSES[held])
        if step < n - 1 and r < n - 1:
            arrow(ax, (left + 1, 0.32), (left + 1.5, 0.32))
    if step < n - 1:
        right = 1.5 * n - 1
        ax.plot([right, right, 0.5, 0.5], [0, -0.45, -0.45, -0.3], color=INK, lw=1)
        arrow(ax, (0.5, -0.45), (0.5, 0))


def _draw_scores(ax: Axes, tiles: Sequence[Tile], shares: Shares, step: int) -> None:
    """Draw the scores after a step: strong colours now, pale colours before, white later, dots if nothing is seen."""
    pieces = sum(map(len, shares))
    for tile in tiles:
        fill = PROCESSES[tile.process]
        if tile.work == 0:
            rectangle(ax, tile.column, tile.row, 1, 1, **HIDDEN)
            continue
        look = "white" if tile.step > step else fill if tile.step == step else _pale(fill)
        box(ax, tile.column, tile.row, 1, 1, f"{tile.process}" if tile.step <= step else "", fill=look)
    ax.set(xlim=(0, pieces), ylim=(pieces, 0), aspect="equal")
    owner = {piece: r for r, mine in enumerate(shares) for piece in mine}
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks([piece + 0.5 for piece in range(pieces)], [owner[piece] for piece in range(pieces)], fontsize=8)
    ax.tick_params(length=0)


def _pale(fill: str) -> str:
    return to_hex([0.3 * part + 0.7 for part in to_rgb(fill)])
