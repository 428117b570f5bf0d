"""Where a model's scores lie, and the band in which exp(score − φ) is safe."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from pagewise.figures.charts import BLUE, DASHES, HATCHES, INK, ORANGE, PALETTE, show


def score_histogram(groups: Mapping[str, Tensor], *, title: str, xlabel: str, alt: str | None = None) -> None:
    """How large a share of each group has which value, one outline per group, the share on a logarithmic axis."""
    _, ax = plt.subplots(figsize=(6.4, 3.2))
    low, high = (float(end) for end in (min(x.min() for x in groups.values()), max(x.max() for x in groups.values())))
    for i, (name, values) in enumerate(groups.items()):
        values = values.detach().double().cpu().numpy().ravel()
        each = np.full_like(values, 1 / values.size)
        style = {"color": PALETTE[i], "ls": DASHES[i], "lw": 1.8}
        ax.hist(values, bins=60, range=(low, high), weights=each, histtype="step", log=True, label=name, **style)
    ax.set(title=title, xlabel=xlabel, ylabel="share")
    ax.set_ylim(top=4)  # room for the legend
    ax.legend(loc="upper left", ncols=len(groups))
    show(alt)


def score_bands(
    ranges: Mapping[str, tuple[float, float, float | None]],
    band: tuple[float, float],
    *,
    marks: Mapping[str, float],
    title: str,
    alt: str | None = None,
) -> None:
    """Ranges of scores held against the safe band of score − φ.

    Args:
        ranges: whose → (smallest score, largest, φ). φ None: the range is too wide; it is hatched, about the band's
            middle.
        marks: what happens there → score − φ.
    """
    figure, ax = plt.subplots(figsize=(6.4, 0.5 * len(ranges) + 1.8))
    (low, high), reach = band, 1.6 * max(abs(end) for end in (*band, *marks.values()))
    ax.axvspan(low, high, color="#d9d9e3", zorder=0, label=f"{low:.1f} to {high:.1f}: safe")
    for row, (smallest, largest, phi) in enumerate(ranges.values()):
        middle = (smallest + largest - low - high) / 2
        style = {"fc": ORANGE, "hatch": HATCHES[1]} if phi is None else {"fc": BLUE}
        ax.barh(row, largest - smallest, 0.55, left=smallest - (middle if phi is None else phi), ec=INK, **style)
        text, x, at = ("too wide", (low + high) / 2, "center") if phi is None else (f"φ = {phi:g}", reach, "right")
        ax.text(x, row, text, va="center", ha=at, fontsize=9, bbox={"fc": "white", "ec": "none", "pad": 2})
    for i, (name, place) in enumerate(marks.items(), 1):
        ax.axvline(place, color=INK, ls=DASHES[i], lw=1.2, label=f"{place:.1f}: {name}")
    ax.set_yticks(range(len(ranges)), [f"{name}\n{a:g} to {b:g}" for name, (a, b, _) in ranges.items()])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set(title=title, xlabel="score − φ", xlim=(-reach, reach))
    figure.legend(loc="outside lower left", ncols=2, fontsize=9)
    show(alt)
