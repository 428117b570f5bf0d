"""Where a memory goes under different allocators: slot by slot, and as shares of the whole."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle

from pagewise.figures.blocks import NOBODY, WIDTH, owner_colours
from pagewise.figures.charts import HATCHES, INK, PALETTE, show


def memory_map(
    rows: Mapping[str, Sequence[tuple[str, Hashable | None]]],
    *,
    title: str,
    colours: Mapping[Hashable, str] | None = None,
    alt: str | None = None,
) -> None:
    """Memory slot by slot, one row per allocator: (state, owner) of each slot, as `workload.slots_at` gives them.

    A used piece has its owner's colour and name, the other states the hatches that `stacks` gives them.
    """
    looks = {
        "reserved": {"fc": NOBODY, "hatch": "///"},
        "internal": {"fc": NOBODY, "hatch": "..."},
        "external": {"fc": "#d3d3da", "hatch": "xx"},
        "idle": {"fc": NOBODY},
    }
    names = {"used": "used", "external": "free, in pieces (external)", "idle": "free"}
    owners = dict.fromkeys(owner for slots in rows.values() for _, owner in slots if owner is not None)
    colours = owner_colours(*owners) | dict(colours or {})
    _, ax = plt.subplots(figsize=(WIDTH, 0.5 * len(rows) + 1.7))
    for row, slots in enumerate(rows.values()):
        start = 0
        for (state, owner), piece in groupby(slots):
            size = len(list(piece))
            look = looks.get(state) or {"fc": colours[owner]}
            ax.add_patch(Rectangle((start, row - 0.36), size, 0.72, ec=INK, lw=0.6, **look))
            if state == "used":
                ax.text(start + size / 2, row, str(owner), ha="center", va="center", fontsize=9, fontweight="bold")
            start += size
    looks = {"used": {"fc": "#8d8da0"}} | looks
    handles = [Patch(ec=INK, lw=0.6, label=names.get(state, state), **look) for state, look in looks.items()]
    ax.legend(handles=handles, ncols=3, loc="lower left", bbox_to_anchor=(-0.01, 0.98), fontsize=9, columnspacing=1.2)
    ax.set_xlim(-0.5, max(map(len, rows.values())) + 0.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.grid(visible=False)
    ax.set_title(title, pad=42)
    ax.set_xlabel("slot of the memory (one token each)")
    show(alt)


def stacks(
    names: Sequence[str], shares: Mapping[str, Sequence[float]], *, title: str, xlabel: str, alt: str | None = None
) -> None:
    """Horizontal bars of shares (0 … 1) that add up to a whole; a share that has room carries its per cent."""
    _, ax = plt.subplots(figsize=(7.6, 0.55 * len(names) + 1.8))
    left = np.zeros(len(names))
    for i, (label, values) in enumerate(shares.items()):
        values, fill = 100 * np.asarray(values), PALETTE[i % 5]
        ax.barh(range(len(names)), values, 0.7, left=left, label=label, color=fill, hatch=HATCHES[i % 5], ec="white")
        for row, value in enumerate(values):
            if value > 4:
                plate = {"fc": fill if i == 0 else "white", "ec": "none", "pad": 1}
                colour = "white" if i == 0 else INK
                place = (left[row] + value / 2, row)
                ax.text(*place, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=9, bbox=plate)
        left += values
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set(xlabel=xlabel, xlim=(0, 100.5))
    ax.set_title(title, pad=28)
    ax.legend(ncols=len(shares), loc="lower left", bbox_to_anchor=(-0.02, 0.98), fontsize=9, columnspacing=1.2)
    show(alt)
