"""Where a memory goes under different allocators: slot by slot, and as shares of the whole."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

import numpy as np

from pagewise.figures.blocks import NOBODY, WIDTH, colours_of
from pagewise.figures.drawing import chart, colour_key, rectangle
from pagewise.figures.palette import HATCHES, PALETTE, readable_on

ABOVE = {"loc": "lower left", "fontsize": 9, "columnspacing": 1.2}  # a legend between the title and the axes


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
    names = {"external": "free, in pieces (external)", "idle": "free"}
    looks = {
        "used": {"fc": "#8d8da0"},
        "reserved": {"fc": NOBODY, "hatch": "///"},
        "internal": {"fc": NOBODY, "hatch": "..."},
        "external": {"fc": "#d3d3da", "hatch": "xx"},
        "idle": {"fc": NOBODY},
    }
    colours = colours_of((owner for slots in rows.values() for _, owner in slots if owner is not None), colours)
    with chart(WIDTH, 0.5 * len(rows) + 1.7, title, alt) as ax:
        for row, slots in enumerate(rows.values()):
            start = 0
            for (state, owner), piece in groupby(slots):
                size = len(list(piece))
                look = {"fc": colours[owner]} if state == "used" else looks[state]
                rectangle(ax, start, row - 0.36, size, 0.72, lw=0.6, **look)
                if state == "used":
                    ax.text(start + size / 2, row, str(owner), ha="center", va="center", fontsize=9, fontweight="bold")
                start += size
        patches = {names.get(state, state): {"lw": 0.6, **look} for state, look in looks.items()}
        colour_key(ax, patches, ncols=3, **ABOVE, bbox_to_anchor=(-0.01, 0.98))
        ax.set(xlim=(-0.5, max(map(len, rows.values())) + 0.5), ylim=(len(rows) - 0.5, -0.5))
        ax.set_yticks(range(len(rows)), list(rows))
        ax.grid(visible=False)
        ax.set_title(title, pad=42)
        ax.set_xlabel("slot of the memory (one token each)")


def stacks(
    names: Sequence[str], shares: Mapping[str, Sequence[float]], *, title: str, xlabel: str, alt: str | None = None
) -> None:
    """Horizontal bars of shares (0 … 1) that add up to a whole; a share that has room carries its per cent."""
    left = np.zeros(len(names))
    with chart(7.6, 0.55 * len(names) + 1.8, title, alt) as ax:
        for i, (label, values) in enumerate(shares.items()):
            values, fill = 100 * np.asarray(values), PALETTE[i % 5]
            drawn = ax.barh(
                range(len(names)), values, 0.7, left=left, label=label, color=fill, hatch=HATCHES[i % 5], ec="white"
            )
            plate = {"fc": fill if i == 0 else "white", "ec": "none", "pad": 1}
            texts = [f"{value:.0f}" if value > 4 else "" for value in values]
            ax.bar_label(drawn, texts, label_type="center", color=readable_on(plate["fc"]), fontsize=9, bbox=plate)
            left += values
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set(xlabel=xlabel, xlim=(0, 100.5))
        ax.set_title(title, pad=28)
        ax.legend(ncols=len(shares), **ABOVE, bbox_to_anchor=(-0.02, 0.98))
