"""Where a model's scores lie, and the band in which exp(score − φ) is safe."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from pagewise.figures.drawing import chart
from pagewise.figures.palette import BLUE, DASHES, HATCHES, INK, ORANGE, PALETTE


def score_histogram(groups: Mapping[str, Tensor], *, title: str, xlabel: str, alt: str | None = None) -> None:
    """How large a share of each group has which value, one outline per group, the share on a logarithmic axis."""
    low = min(float(values.min()) for values in groups.values())
    high = max(float(values.max()) for values in groups.values())
    with chart(6.4, 3.2, title, alt) as ax:
        for i, (name, values) in enumerate(groups.items()):
            values = values.detach().double().cpu().numpy().ravel()
            style = {"color": PALETTE[i], "ls": DASHES[i], "lw": 1.8, "histtype": "step", "label": name}
            ax.hist(values, 60, range=(low, high), weights=np.full_like(values, 1 / values.size), log=True, **style)
        ax.set(xlabel=xlabel, ylabel="share")
        ax.set_ylim(top=4)  # room for the legend
        ax.legend(loc="upper left", ncols=len(groups))


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
    (low, high), reach = band, 1.6 * max(abs(end) for end in (*band, *marks.values()))
    with chart(6.4, 0.5 * len(ranges) + 1.8, title, alt) as ax:
        ax.axvspan(low, high, color="#d9d9e3", zorder=0, label=f"{low:.1f} to {high:.1f}: safe")
        for row, (smallest, largest, phi) in enumerate(ranges.values()):
            middle = (smallest + largest - low - high) / 2
            style = {"fc": ORANGE, "hatch": HATCHES[1]} if phi is None else {"fc": BLUE}
            ax.barh(row, largest - smallest, 0.55, left=smallest - (middle if phi is None else phi), ec=INK, **style)
            text, x, align = (
                ("too wide", (low + high) / 2, "center") if phi is None else (f"φ = {phi:g}", reach, "right")
            )
            ax.text(x, row, text, va="center", ha=align, fontsize=9, bbox={"fc": "white", "ec": "none", "pad": 2})
        for i, (name, place) in enumerate(marks.items(), 1):
            ax.axvline(place, color=INK, ls=DASHES[i], lw=1.2, label=f"{place:.1f}: {name}")
        ax.set_yticks(range(len(ranges)), [f"{name}\n{a:g} to {b:g}" for name, (a, b, _) in ranges.items()])
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set(xlabel="score − φ", xlim=(-reach, reach))
        ax.figure.legend(loc="outside lower left", ncols=2, fontsize=9)
