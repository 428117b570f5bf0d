"""Latencies of requests that arrive over time, and how many are served in time (lesson 9)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from pagewise.figures.drawing import subplots
from pagewise.figures.palette import INK, MARKERS, PALETTE


def latencies(points: Sequence, objectives: tuple[float, float], *, alt: str = "") -> None:
    """Draw latencies and goodput over the rate: solid lines are medians, dashed lines the 99th percentile.

    Args:
        points: `Point`s of `pagewise.experiments.engine_arrivals`.
        objectives: the longest time to the first token and between tokens, in seconds; dotted lines.
    """
    title = "How long do clients wait, and how many are served in time?"
    with subplots(3, 1, size=(5.6, 7.6), title=title, alt=alt, sharex=True) as (figure, (first, gap, good)):
        for i, name in enumerate(dict.fromkeys(p.engine for p in points)):
            own = sorted((p for p in points if p.engine == name), key=lambda p: p.rate)
            rates, look = [p.rate for p in own], {"color": PALETTE[i], "marker": MARKERS[i]}
            for ax, which in ((first, "first_token"), (gap, "gaps")):
                p50, _, p99 = zip(*(1e3 * np.array(p.percentiles(which)) for p in own), strict=True)
                ax.plot(rates, p50, label=name, **look)
                ax.plot(rates, p99, ls="--", **look)
            good.plot(rates, [p.goodput for p in own], **look)
        for ax, label, objective in (
            (first, "to the first token", objectives[0]),
            (gap, "between tokens", objectives[1]),
        ):
            ax.axhline(1e3 * objective, color=INK, ls=":")
            ax.set(yscale="log", ylabel=f"ms {label}")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter("{x:g}")
        good.set(ylabel="goodput (requests/s)", ylim=(0, None), xlabel="requests per second that arrive")
        for label, ls in (("median", "-"), ("99th percentile", "--"), ("objective", ":")):
            first.plot([], [], color=INK, ls=ls, label=label)
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
