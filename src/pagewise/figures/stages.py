"""What a CUDA kernel is made of and what its stages move: levels in levels, memory to memory, pass after pass."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

from pagewise.figures.charts import BLUE, INK, ORANGE, PALETTE, TEAL, box, show

MEMORIES = ("global memory", "registers", "shared memory")
GLOBAL, REGISTERS, SHARED = range(3)
_MOVES = {
    ("read", "global"): (GLOBAL, REGISTERS),
    ("write", "global"): (REGISTERS, GLOBAL),
    ("write", "shared"): (REGISTERS, SHARED),
    ("read", "shared"): (SHARED, REGISTERS),
}


def nested_levels(levels: Sequence[tuple[str, int, int]], *, title: str, alt: str | None = None) -> None:
    """Levels of which each is made of the next: every strip is the marked cell of the one above, enlarged.

    `levels` are (what its cells are, how many, the marked one), from the outermost in.
    """
    _, ax = plt.subplots(figsize=(6.4, 0.8 * len(levels) + 0.5))
    for depth, (name, cells, marked) in enumerate(levels):
        y = -1.6 * depth
        for cell in range(cells):
            label = str(cell) if cells <= 16 or cell == marked else ""
            box(ax, 10 * cell / cells, y, 10 / cells, 0.7, label, fill=ORANGE if cell == marked else "#ffffff")
        ax.text(0, y + 0.78, name, va="bottom", fontsize=9.5)
        if depth + 1 < len(levels):
            for corner, end in ((marked, 0.0), (marked + 1, 10.0)):
                ax.plot([10 * corner / cells, end], [y, y - 0.9], color=INK, lw=0.7, ls=":")
    ax.set(title=title, xlim=(-0.05, 10.05), ylim=(-1.6 * len(levels) + 1.5, 1.4))
    ax.axis("off")
    show(alt)


def memory_flow(stages: Mapping[str, Mapping[tuple[str, str], int]], *, title: str, alt: str | None = None) -> None:
    """A row per stage: which memory hands how many bytes to which.

    `stages`: name → {(access, space): bytes}, as a launch counts them.
    """
    _, ax = plt.subplots(figsize=(6.4, 0.62 * len(stages) + 1.0))
    for i, (name, moved) in enumerate(stages.items()):
        y = -i
        ax.axhline(y - 0.5, color="#d9d9e3", lw=0.8)
        ax.text(-1.15, y, name, va="center", fontsize=9.5)
        for move, num_bytes in moved.items():
            start, stop = _MOVES[move]
            both_ways = (stop, start) in [_MOVES[other] for other in moved]
            shift = 0.22 * np.sign(stop - start) if both_ways else 0
            ends = (start + 0.06 * np.sign(stop - start), stop - 0.06 * np.sign(stop - start))
            style = {"arrowstyle": "-|>", "lw": 1.8, "color": BLUE if GLOBAL in (start, stop) else TEAL}
            ax.annotate("", (ends[1], y + shift - 0.1), (ends[0], y + shift - 0.1), arrowprops=style)
            ax.text((start + stop) / 2, y + shift - 0.06, f"{num_bytes:,} B", ha="center", va="bottom", fontsize=8.5)
    for place, memory in enumerate(MEMORIES):
        ax.text(place, 0.75, memory, ha="center", fontsize=9.5, fontweight="bold")
        ax.plot([place, place], [0.6, 0.5 - len(stages)], color=INK, lw=1.2)
    ax.set(title=title, xlim=(-1.2, 2.3), ylim=(0.4 - len(stages), 1.0))
    ax.axis("off")
    show(alt)


def kept_between_reads(
    orders: Mapping[str, Sequence[tuple[str, int]]], *, title: str, ylabel: str, alt: str | None = None
) -> None:
    """Ways to read the same tensors, one below the other: after each read, how many numbers wait for the next.

    `orders`: name → (what is read, numbers kept after it). Reads of one tensor share its first letter, and a colour.
    """
    letters = sorted({read[0] for reads in orders.values() for read, _ in reads})
    figure, axes = plt.subplots(len(orders), 1, figsize=(6.4, 1.7 * len(orders) + 0.5), squeeze=False, sharey=True)
    for ax, (name, reads) in zip(axes[:, 0], orders.items(), strict=True):
        for i, (read, kept) in enumerate(reads):
            of = letters.index(read[0])
            ax.bar(i, kept, 0.86, color=PALETTE[of], hatch="//" * of, ec="white")
            ax.text(i, kept, str(kept), ha="center", va="bottom", fontsize=8)
        ax.set_xticks(range(len(reads)), [read for read, _ in reads])
        ax.set_title(name, fontsize=10)
        ax.set_ylabel(ylabel, fontsize=9)
        ax.grid(visible=False, axis="x")
        ax.margins(y=0.2)
    axes[-1][0].set_xlabel("what is read, in the order of time")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)
