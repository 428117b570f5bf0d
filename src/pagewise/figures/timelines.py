"""Where a step's time goes: what lies inside what, from the spans of a profile (lesson 9)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewise.figures.drawing import colour_key, rectangle, subplots
from pagewise.figures.palette import BLUE, INK, ORANGE, SAND, TEAL

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
    begins = {name: min(span.start for span in spans) for name, spans in panels.items()}
    lasts = {name: max(span.start + span.seconds for span in spans) - begins[name] for name, spans in panels.items()}
    everything = [span for spans in panels.values() for span in spans]
    size = (5.6, 1.5 * len(panels) + 1.0)
    with subplots(len(panels), size=size, title=title, alt=alt, sharex=True) as (figure, axes):
        for ax, (name, spans) in zip(axes, panels.items(), strict=True):
            for span in spans:
                left = 1e3 * (span.start - begins[name])
                rectangle(ax, left, span.depth, 1e3 * span.seconds, 1, **_look(span.name))
            ax.set_title(f"{name}: {1e3 * lasts[name]:.1f} ms", fontsize=10)
            deepest = 1 + max(span.depth for span in everything)
            ax.set(xlim=(0, 1e3 * max(lasts.values())), ylim=(deepest, 0), yticks=())
            ax.grid(visible=False)
        axes[-1].set_xlabel("time of the host (ms)")
        looks = {span.name: _look(span.name) for span in everything}
        colour_key(figure, looks, loc="outside lower center", ncols=5, fontsize=8, handlelength=1.4)


def _look(name: str) -> dict[str, Any]:
    fill, hatch = LOOK.get(name, ("white", ""))
    return {"fc": fill, "hatch": hatch, "lw": 0.3}
