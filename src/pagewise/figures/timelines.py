"""Where a step's time goes: what lies inside what, from the spans of a profile (lesson 9)."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from pagewise.figures.charts import BLUE, INK, ORANGE, SAND, TEAL, show

# Colour and hatch of each span. What paging removes stands out; what is the model's own is quiet.
LOOK = {
    "step": ("#f1f1f5", ""),
    "schedule": (INK, ""),
    "prefill": ("#dcdce6", ""),
    "decode": ("#dcdce6", ""),
    "build batch": (ORANGE, "///"),
    "block tables": (SAND, "..."),
    "model": ("#b9c3d9", ""),
    "cache write": ("#c9b8dc", "\\\\"),
    "attention": (TEAL, "xx"),
    "sampling": (BLUE, ""),
}


def step_timelines(panels: Mapping[str, Sequence[Any]], *, title: str, alt: str | None = None) -> None:
    """A panel per way to run it: one step's spans along its time, each drawn below the span that it lies in.

    Args:
        panels: name → the spans of one step: name, start, seconds, depth, as `Profile.spans` has them.
    """
    ends = {name: _ends(spans) for name, spans in panels.items()}
    longest = max(stop - start for start, stop in ends.values())
    deepest = max(span.depth for spans in panels.values() for span in spans) + 1
    figure, axes = plt.subplots(len(panels), 1, figsize=(5.6, 1.5 * len(panels) + 1.0), sharex=True, squeeze=False)
    seen: dict[str, None] = {}
    for ax, (name, spans) in zip(axes[:, 0], panels.items(), strict=True):
        begin, stop = ends[name]
        for span in spans:
            fill, hatch = LOOK.get(span.name, ("white", ""))
            seen[span.name] = None
            left, width = 1e3 * (span.start - begin), 1e3 * span.seconds
            ax.add_patch(Rectangle((left, span.depth), width, 1, fc=fill, ec=INK, lw=0.3, hatch=hatch))
        ax.set_title(f"{name}: {1e3 * (stop - begin):.1f} ms", fontsize=10)
        ax.set(xlim=(0, 1e3 * longest), ylim=(deepest, 0), yticks=())
        ax.grid(visible=False)
    axes[-1, 0].set_xlabel("time of the host (ms)")
    handles = [
        Patch(fc=LOOK.get(name, ("white", ""))[0], hatch=LOOK.get(name, ("", ""))[1], ec=INK, lw=0.3, label=name)
        for name in seen
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, handlelength=1.4)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def _ends(spans: Sequence[Any]) -> tuple[float, float]:
    """When the first of the spans begins, and when the last one ends."""
    return min(span.start for span in spans), max(span.start + span.seconds for span in spans)
