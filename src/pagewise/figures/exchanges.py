"""Processes that exchange data: tokens for heads in an all-to-all, and the time of sending beside that of computing."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patheffects import withStroke

from pagewise.figures.drawing import arrow, box, colour_key, diagram, rectangle, subplots
from pagewise.figures.moving_rings import PROCESSES
from pagewise.figures.palette import INK

SPANS = {"compute": {"fc": "#b9c3d9"}, "send": {"fc": "#e07a3f", "hatch": "////"}, "wait": {"fc": "white"}}


def all_to_all(num_processes: int, num_heads: int, *, marked: int, title: str, alt: str = "") -> None:
    """Draw tokens × heads before and after an all-to-all. The colour and number of a box name its process.

    Args:
        marked: a process. Thick frames mark what it sends, and where these boxes are afterwards.

    Raises:
        ValueError: the heads cannot be shared out evenly, or there are more processes than colours.
    """
    if num_processes > len(PROCESSES) or num_heads % num_processes:
        message = f"num_heads must be a multiple of num_processes, which is at most {len(PROCESSES)}"
        raise ValueError(f"{message}, got {num_heads} and {num_processes}")
    share = num_heads // num_processes
    with subplots(1, size=(5.4, 0.45 * num_processes + 1.3), title=title, alt=alt) as (_, (ax,)):
        right = num_heads + 2.4
        diagram(ax, (-1.0, right + num_heads + 0.1), (num_processes + 0.9, -1.05))
        for left, name in ((0.0, "before: own tokens, all heads"), (right, "after: all tokens, own heads")):
            ax.text(left, -0.4, name, fontsize=9, fontweight="bold")
            ax.text(left + num_heads / 2, num_processes + 0.75, "head", ha="center", fontsize=9)
            for head in range(num_heads):
                ax.text(left + head + 0.5, num_processes + 0.3, f"{head}", ha="center", fontsize=8)
        for piece in range(num_processes):
            ax.text(-0.2, piece + 0.5, f"tokens {piece}", ha="right", va="center", fontsize=8)
            for head in range(num_heads):
                for left, holder in ((0.0, piece), (right, head // share)):
                    box(ax, left + head, piece, 1, 1, f"{holder}", fill=PROCESSES[holder])
        on_dark_boxes = [withStroke(linewidth=5.0, foreground="white")]
        for head in range(num_heads):
            if head // share != marked:
                for left in (0.0, right):
                    frame = {"ec": INK, "lw": 2.6, "path_effects": on_dark_boxes}
                    rectangle(ax, left + head + 0.07, marked + 0.07, 0.86, 0.86, "none", **frame)
        middle = num_processes / 2
        arrow(ax, (num_heads + 0.3, middle), (right - 0.3, middle), lw=2)


def process_timelines(panels: Mapping[str, Sequence[Sequence[Any]]], *, title: str, alt: str = "") -> None:
    """Draw a panel per run and two rows per process: when it computes, and when its transfers are under way.

    Args:
        panels: name → the spans of each process. A span has a name of `SPANS`, a start and seconds.
    """
    end = max(span.start + span.seconds for runs in panels.values() for spans in runs for span in spans)
    most = max(map(len, panels.values()))
    size = (5.8, len(panels) * (0.42 * most + 0.75) + 0.7)
    with subplots(len(panels), size=size, title=title, alt=alt, sharex=True) as (figure, axes):
        for ax, (name, runs) in zip(axes, panels.items(), strict=True):
            for r, spans in enumerate(runs):
                for span in spans:
                    row = 0.5 if span.name == "send" else 0.05
                    rectangle(ax, 1e3 * span.start, r + row, 1e3 * span.seconds, 0.43, **_look(span.name))
            last = max(span.start + span.seconds for spans in runs for span in spans)
            ax.set_title(f"{name}: {1e3 * last:.0f} ms", fontsize=10)
            ax.set(xlim=(0, 1e3 * end * 1.01), ylim=(len(runs), 0), ylabel="process")
            ax.set_yticks([r + 0.5 for r in range(len(runs))], range(len(runs)))
        axes[-1].set_xlabel("time (ms)")
        used = dict.fromkeys(span.name for runs in panels.values() for spans in runs for span in spans)
        colour_key(figure, {name: SPANS[name] for name in used}, loc="outside lower center", ncols=len(used))


def _look(name: str) -> dict[str, Any]:
    return {"lw": 0.5} | SPANS[name]
