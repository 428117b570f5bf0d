"""Flat matrix products: how wide a tile should be, and the ring of buffers that weights come through."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pagewise.figures.charts import lines
from pagewise.figures.drawing import box, subplots
from pagewise.figures.palette import BLUE, SAND


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
    axes = {"title": "", "logx": True, "logy": True}
    with subplots(2, size=(6.4, 5.6), title=title, alt=alt) as (_, (top, bottom)):
        lines(widths, ratios, xlabel="", ylabel="FLOPs per number moved", ax=top, **axes)
        labels = {"xlabel": "columns of a tile, $B_N$", "ylabel": "thread blocks, N / $B_N$"}
        lines(widths, thread_blocks, ax=bottom, **labels, **axes)
        low, high = wanted
        bottom.axhspan(low, high, color="#d9d9e3", zorder=0, label=f"wanted: {low:g} to {high:g}")
        bottom.legend()


class _Stay(NamedTuple):
    """A tile's stay in a stage: in which turn of the loop its copy was started, and in which it was multiplied."""

    stage: int
    tile: int
    started: int
    read: int


def ring(panels: Mapping[str, Sequence[Any]], *, title: str, alt: str | None = None) -> None:
    """The stages of a ring over the turns of a loop, a panel per ring: which tile is on its way, and which is read.

    Args:
        panels: name → what one warp did, in its order: events with `what`, "copy" or "multiply", `turn`, the turn in
            which this tile is multiplied, `stage` and `k_tile`, the tile's number.
    """
    stays = {name: _stays(events) for name, events in panels.items()}
    num_stages = [1 + max(stay.stage for stay in of_ring) for of_ring in stays.values()]
    turns = 1 + max(stay.read for of_ring in stays.values() for stay in of_ring)
    size = (6.4, 0.42 * sum(num_stages) + 0.75 * len(panels) + 0.6)
    with subplots(len(panels), size=size, title=title, alt=alt, height_ratios=num_stages) as (_, axes):
        for ax, (name, of_ring), height in zip(axes, stays.items(), num_stages, strict=True):
            for stay in of_ring:
                box(ax, stay.started, stay.stage + 0.1, stay.read - stay.started, 0.8, fill=SAND, hatch="///")
                box(ax, stay.read, stay.stage + 0.1, 1, 0.8, str(stay.tile), fill=BLUE)
            ax.set(xlim=(-1.1, turns + 0.1), ylim=(height, 0), ylabel="stage")
            ax.set_title(name, fontweight="normal", fontsize=10)
            ax.set_yticks([i + 0.5 for i in range(height)], range(height))
            ax.set_xticks([i + 0.5 for i in range(-1, turns)], ["before", *range(turns)])
            ax.grid(visible=False)
        axes[-1].set_xlabel("turn of the loop over K (dark: the tile that is multiplied; hatched: on its way)")


def _stays(events: Sequence[Any]) -> list[_Stay]:
    """A turn starts a copy, then multiplies: of the copies before the first product all but one precede the loop."""
    first = next(i for i, event in enumerate(events) if event.what == "multiply")
    stays, now = [], -1
    for i, event in enumerate(events):
        if i >= first - 1 and (event.what == "copy" or event.turn > now):
            now += 1
        if event.what == "copy":
            stays.append(_Stay(event.stage, event.k_tile, now, event.turn))
    return stays
