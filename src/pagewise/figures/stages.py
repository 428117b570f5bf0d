"""The levels of a CUDA kernel, the bytes that its stages move between memories, and the numbers kept between reads."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from pagewise.figures.drawing import arrow, box, chart, diagram, subplots
from pagewise.figures.palette import BLUE, INK, ORANGE, PALETTE, TEAL

MEMORIES = ("global memory", "registers", "shared memory")
GLOBAL, REGISTERS, SHARED = range(3)
_MOVES = {
    ("read", "global"): (GLOBAL, REGISTERS),
    ("write", "global"): (REGISTERS, GLOBAL),
    ("write", "shared"): (REGISTERS, SHARED),
    ("read", "shared"): (SHARED, REGISTERS),
}


def nested_levels(levels: Sequence[tuple[str, int, int]], *, title: str, alt: str = "") -> None:
    """Draw levels that contain each other. Every strip is the enlarged marked cell of the strip above.

    `levels` are (name of the cells, their number, the marked cell), from the outermost to the innermost.
    """
    with chart(6.4, 0.8 * len(levels) + 0.5, title, alt) as ax:
        draw_strips(ax, [(cells, marked) for _, cells, marked in levels], 1.6)
        for depth, (name, _, _) in enumerate(levels):
            ax.text(0, 0.78 - 1.6 * depth, name, va="bottom", fontsize=9.5)
        diagram(ax, (-0.05, 10.05), (-1.6 * len(levels) + 1.5, 1.4))


def draw_strips(ax: Axes, levels: Sequence[tuple[int, int]], step: float) -> None:
    """Draw strips of (cells, marked cell), `step` below each other. Each enlarges the marked cell above."""
    for depth, (cells, marked) in enumerate(levels):
        y = -step * depth
        for cell in range(cells):
            label = str(cell) if cells <= 16 or cell == marked else ""
            box(ax, 10 * cell / cells, y, 10 / cells, 0.7, label, fill=ORANGE if cell == marked else "white")
        if depth + 1 < len(levels):
            for corner, end in ((marked, 0.0), (marked + 1, 10.0)):
                ax.plot([10 * corner / cells, end], [y, y + 0.7 - step], color=INK, lw=0.7, ls=":")


def memory_flow(stages: Mapping[str, Mapping[tuple[str, str], int]], *, title: str, alt: str = "") -> None:
    """Draw a row per stage: the bytes that it moves from one memory to another.

    `stages`: name → {(access, space): bytes}, as a launch counts them.
    """
    with chart(6.4, 0.62 * len(stages) + 1.0, title, alt) as ax:
        for i, (name, moved) in enumerate(stages.items()):
            ax.axhline(-i - 0.5, color="#d9d9e3", lw=0.8)
            ax.text(-1.15, -i, name, va="center", fontsize=9.5)
            for move, num_bytes in moved.items():
                start, stop = _MOVES[move]
                way = np.sign(stop - start)
                both_ways = (stop, start) in [_MOVES[other] for other in moved]
                y = -i + 0.22 * way if both_ways else -i
                colour = BLUE if GLOBAL in (start, stop) else TEAL
                arrow(ax, (start + 0.06 * way, y - 0.1), (stop - 0.06 * way, y - 0.1), lw=1.8, color=colour, gap=2)
                ax.text((start + stop) / 2, y - 0.06, f"{num_bytes:,} B", ha="center", va="bottom", fontsize=8.5)
        for place, memory in enumerate(MEMORIES):
            ax.text(place, 0.75, memory, ha="center", fontsize=9.5, fontweight="bold")
            ax.plot([place, place], [0.6, 0.5 - len(stages)], color=INK, lw=1.2)
        diagram(ax, (-1.2, 2.3), (0.4 - len(stages), 1.0))


def kept_between_reads(
    orders: Mapping[str, Sequence[tuple[str, int]]], *, title: str, ylabel: str, alt: str = ""
) -> None:
    """Draw several orders of reading the same tensors, and how many numbers are kept after each read.

    `orders`: name → (tensor, numbers kept after this read). Reads of one tensor share its first letter and a colour.
    """
    letters = sorted({read[0] for reads in orders.values() for read, _ in reads})
    with subplots(len(orders), size=(6.4, 1.7 * len(orders) + 0.5), title=title, alt=alt, sharey=True) as (_, axes):
        for ax, (name, reads) in zip(axes, orders.items(), strict=True):
            for i, (read, kept) in enumerate(reads):
                of = letters.index(read[0])
                ax.bar(i, kept, 0.86, color=PALETTE[of], hatch="//" * of, ec="white")
                ax.text(i, kept, str(kept), ha="center", va="bottom", fontsize=8)
            ax.set_xticks(range(len(reads)), [read for read, _ in reads])
            ax.set_title(name, fontsize=10)
            ax.set_ylabel(ylabel, fontsize=9)
            ax.grid(axis="y")
            ax.margins(y=0.2)
        axes[-1].set_xlabel("what is read, in the order of time")
