"""What a GPU's slots do over time, and how full the last wave of a grid is (lesson 7)."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb

from pagewise.figures.blocks import OWNERS
from pagewise.figures.drawing import subplots
from pagewise.figures.moving_sms import Run
from pagewise.figures.palette import BLUE, INK, ORANGE, TEAL

PIXELS = 900  # of a panel, along its time


def slots_over_time(
    panels: Mapping[str, Sequence[Run]],
    num_slots: int,
    *,
    ideal: float,
    title: str,
    xlabel: str,
    alt: str | None = None,
) -> None:
    """A panel per schedule, a row per slot: when it works, and for which sequence (a colour each); white is idle.

    Args:
        ideal: the time that would be enough if all slots had the same to do; a dashed line.
    """
    end = max(run.stop for runs in panels.values() for run in runs)
    size = (5.2, 1.05 * len(panels) + 0.8)
    with subplots(len(panels), size=size, title=title, alt=alt, sharex=True) as (figure, axes):
        for ax, (name, runs) in zip(axes, panels.items(), strict=True):
            image = np.ones((num_slots, PIXELS, 3))
            for run in runs:
                start, stop = (round(time / end * PIXELS) for time in (run.start, run.stop))
                image[run.sm, start : max(stop, start + 1)] = to_rgb(OWNERS[run.sequence % len(OWNERS)])
            ax.imshow(image, aspect="auto", extent=(0, end, num_slots, 0), interpolation="nearest")
            ax.axvline(ideal, color=INK, ls="--", lw=1.2)
            last = max(run.stop for run in runs)
            ax.set_title(f"{name}: {ideal / last:.0%} of the ideal speed", fontsize=10, fontweight="normal")
            ax.set_yticks([0, num_slots])
            ax.grid(visible=False)
        figure.supylabel("slot", fontsize=10)
        axes[-1].set_xlabel(f"{xlabel} (dashed: the ideal)")


def last_waves(
    efficiencies: Mapping[str, Sequence[float]], chosen: Mapping[str, int], *, title: str, alt: str | None = None
) -> None:
    """A panel per grid: how full 1, 2, 3 … splits keep the GPU, the limit of 0.85 of the best, and the chosen one.

    Args:
        efficiencies: panel → efficiency of s = 1, 2, 3 …; NaN: that s is out of the question, and no bar.
        chosen: panel → the s that is taken.
    """
    size = (5.2, 1.35 * len(chosen) + 0.7)
    with subplots(len(chosen), size=size, title=title, alt=alt, sharex=True) as (figure, axes):
        for ax, (name, efficiency) in zip(axes, efficiencies.items(), strict=True):
            splits, s = range(1, len(efficiency) + 1), chosen[name]
            ax.bar(splits, efficiency, 0.75, color=[ORANGE if split == s else BLUE for split in splits])
            ax.patches[s - 1].set_hatch("///")
            ax.axhline(0.85 * np.nanmax(efficiency), color=TEAL, ls="--", label="0.85 of the best")
            ax.annotate(f"{s}", (s, efficiency[s - 1]), ha="center", va="bottom", fontweight="bold")
            ax.set_title(name, fontsize=10, fontweight="normal")
            ax.set(ylim=(0, 1.25), yticks=(0, 0.5, 1), xlim=(0, len(efficiency) + 1))
            ax.grid(visible=False, axis="x")
        axes[0].legend(loc="upper left", bbox_to_anchor=(0.6, 1.35))
        figure.supylabel("waves / ⌈waves⌉", fontsize=10)
        axes[-1].set_xlabel("splits (hatched: chosen)")
