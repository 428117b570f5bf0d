"""Histograms of values, and the band in which exp(score − φ) is safe."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from pagewise.figures.drawing import chart
from pagewise.figures.palette import BLUE, DASHES, HATCHES, INK, ORANGE, PALETTE


def histogram(values: Tensor, *, title: str, xlabel: str, alt: str = "") -> None:
    """Draw how often each value occurs, and mark 0."""
    with chart(4.8, 2.4, title, alt) as ax:
        ax.hist(values.tolist(), bins=21, color=BLUE, edgecolor="white")
        ax.axvline(0, color=INK, ls="--", lw=1.2)
        ax.grid(visible=True)
        ax.set(xlabel=xlabel, ylabel="count")


def score_histogram(groups: Mapping[str, Tensor], *, title: str, xlabel: str, alt: str = "") -> None:
    """Draw the distribution of the scores of each group as an outline. The axis of the shares is logarithmic."""
    arrays = {name: values.detach().double().cpu().numpy().ravel() for name, values in groups.items()}
    everything = np.concatenate(list(arrays.values()))
    bins = np.linspace(everything.min(), everything.max(), 61)
    with chart(6.4, 3.2, title, alt) as ax:
        for i, (name, values) in enumerate(arrays.items()):
            style = {"color": PALETTE[i], "ls": DASHES[i], "lw": 1.8, "histtype": "step", "label": name}
            ax.hist(values, bins, weights=np.full_like(values, 1 / values.size), log=True, **style)
        ax.grid(visible=True)
        ax.set(xlabel=xlabel, ylabel="share")
        ax.set_ylim(top=4)  # space for the legend
        ax.legend(loc="upper left", ncols=len(groups))


def score_bands(
    ranges: Mapping[str, tuple[float, float, float | None]],
    band: tuple[float, float],
    *,
    marks: Mapping[str, float],
    title: str,
    alt: str = "",
) -> None:
    """Draw ranges of scores beside the safe band of score − φ.

    Args:
        ranges: name → (smallest score, largest score, φ). If φ is None, the range is too wide for any φ. It is then
            hatched and drawn around the middle of the band.
        marks: label → score − φ.
    """
    (low, high), reach = band, 1.6 * max(abs(end) for end in (*band, *marks.values()))
    with chart(6.4, 0.5 * len(ranges) + 1.8, title, alt) as ax:
        ax.axvspan(low, high, color="#d9d9e3", zorder=0, label=f"{low:.1f} to {high:.1f}: safe")
        for row, (smallest, largest, phi) in enumerate(ranges.values()):
            if phi is None:
                phi = (smallest + largest - low - high) / 2
                text, x, align, style = "too wide", (low + high) / 2, "center", {"fc": ORANGE, "hatch": HATCHES[1]}
            else:
                text, x, align, style = f"φ = {phi:g}", reach, "right", {"fc": BLUE}
            ax.barh(row, largest - smallest, 0.55, left=smallest - phi, ec=INK, **style)
            ax.text(x, row, text, va="center", ha=align, fontsize=9, bbox={"fc": "white", "ec": "none", "pad": 2})
        for i, (name, place) in enumerate(marks.items(), 1):
            ax.axvline(place, color=INK, ls=DASHES[i], lw=1.2, label=f"{place:.1f}: {name}")
        ax.set_yticks(range(len(ranges)), [f"{name}\n{a:g} to {b:g}" for name, (a, b, _) in ranges.items()])
        ax.invert_yaxis()
        ax.grid(axis="x")
        ax.set(xlabel="score − φ", xlim=(-reach, reach))
        ax.figure.legend(loc="outside lower left", ncols=2, fontsize=9)
