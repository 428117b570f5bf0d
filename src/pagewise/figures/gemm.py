"""Flat matrix products: how wide a tile should be, and the ring of buffers that weights come through."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt

from pagewise.figures.charts import BLUE, SAND, box, lines, show


def tile_width(
    widths: Sequence[int],
    ratios: Mapping[str, Sequence[float]],
    thread_blocks: Mapping[str, Sequence[float]],
    wanted: tuple[float, float],
    *,
    title: str,
    alt: str | None = None,
) -> None:
    """What a tile's width trades: work per byte above, thread blocks below.

    Args:
        widths: of a tile, B_N, the common x axis.
        ratios: curve → computation per memory access.
        thread_blocks: curve → N / B_N.
        wanted: between how many thread blocks the rule of thumb wants; what lies there is marked.
    """
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6.4, 5.6))
    names = {"title": "", "xlabel": "", "logx": True, "logy": True}
    lines(widths, ratios, **names | {"ylabel": "FLOPs per number moved"}, ax=top)
    below = names | {"ylabel": "thread blocks, N / $B_N$", "xlabel": "columns of a tile, $B_N$"}
    lines(widths, thread_blocks, **below, ax=bottom)
    low, high = wanted
    bottom.axhspan(low, high, color="#d9d9e3", zorder=0, label=f"wanted: {low:g} to {high:g}")
    bottom.legend()
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


class Copy(NamedTuple):
    """A tile's stay in a buffer: in which turn of the loop its copy was started, waited for, and read."""

    buffer: int
    tile: int
    started: int
    arrived: int
    read: int


def ring(panels: Mapping[str, Sequence[Copy]], *, title: str, alt: str | None = None) -> None:
    """The buffers of a ring over the turns of a loop, a panel per ring: which tile is on its way, and which is read."""
    turns = 1 + max(copy.read for copies in panels.values() for copy in copies)
    buffers = [1 + max(copy.buffer for copy in copies) for copies in panels.values()]
    first = min(copy.started for copies in panels.values() for copy in copies)
    size = (6.4, 0.42 * sum(buffers) + 0.75 * len(panels) + 0.6)
    figure, axes = plt.subplots(len(panels), 1, figsize=size, height_ratios=buffers, squeeze=False)
    for ax, (name, copies), height in zip(axes[:, 0], panels.items(), buffers, strict=True):
        for copy in copies:
            if copy.read > copy.started:
                box(ax, copy.started, copy.buffer + 0.1, copy.read - copy.started, 0.8, fill=SAND, hatch="///")
            box(ax, copy.read, copy.buffer + 0.1, 1, 0.8, str(copy.tile), fill=BLUE)
        ax.set(xlim=(first - 0.1, turns + 0.1), ylim=(height, 0), ylabel="buffer")
        ax.set_title(name, fontweight="normal", fontsize=10)
        ax.set_yticks([i + 0.5 for i in range(height)], range(height))
        ax.set_xticks([i + 0.5 for i in range(0, turns)], range(0, turns))
        ax.grid(visible=False)
    axes[-1, 0].set_xlabel("turn of the loop over K (dark: the tile that is read; hatched: a copy on its way)")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)
