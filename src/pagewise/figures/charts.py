"""Every figure of the course: one palette, one font size, labelled axes, readable in grey-scale.

A figure answers the question in its title. Functions take tensors or plain lists, draw, and show; several lines or
bars differ in lightness and in dash or hatch, not in hue alone. Every figure has its alternative text: `alt`.
"""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from pagewise.figures.drawing import show, subplots
from pagewise.figures.palette import DASHES, DIVERGING, HATCHES, INK, MARKERS, PALETTE, SEQUENTIAL, readable_on


def _array(values) -> np.ndarray:
    return values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


# ------------------------------------------------------------------------------------------------ matrices


def heatmaps(
    matrices: Mapping[str, torch.Tensor],
    *,
    xlabel: str,
    ylabel: str,
    xticks: Sequence[str] | None = None,
    yticks: Sequence[str] | None = None,
    annotate: str | None = None,
    suptitle: str = "",
    size: float = 3.0,
    shared: bool = False,
    alt: str | None = None,
) -> None:
    """Matrices side by side, one title each. −∞ is left white.

    Args:
        annotate: a format such as ".2f" for the numbers.
        shared: one colour scale for all of them, and one bar to read it by.
    """
    tallest = max(matrix.shape[0] / matrix.shape[1] for matrix in matrices.values())
    shape = (size * len(matrices), size * tallest + (1.1 if tallest < 0.5 else 0.7))
    limits = _limits(np.concatenate([_array(matrix).ravel() for matrix in matrices.values()])) if shared else None
    options = {"size": shape, "title": suptitle, "alt": alt, "fontsize": 12, "layout": "compressed"}
    with subplots(1, len(matrices), **options) as (figure, axes):
        for ax, (title, matrix) in zip(axes, matrices.items(), strict=True):
            image = heatmap(ax, _array(matrix), title, annotate=annotate, limits=limits)
            if annotate is None and not shared:
                figure.colorbar(image, ax=ax, shrink=0.75, aspect=14, pad=0.03).ax.tick_params(labelsize=8)
            ax.set_xlabel(xlabel)
            for axis, ticks in ((ax.xaxis, xticks), (ax.yaxis, yticks)):
                axis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
                if ticks is not None:
                    axis.set_ticks(range(len(ticks)), ticks)
        axes[0].set_ylabel(ylabel)
        if shared:
            figure.colorbar(image, ax=axes, shrink=0.75, aspect=14, pad=0.02).ax.tick_params(labelsize=8)


def heatmap(
    ax: Axes, values: np.ndarray, title: str, *, annotate: str | None = None, limits: tuple[float, float] | None = None
) -> AxesImage:
    """One matrix; signed values get a diverging map centred at 0."""
    low, high = limits or _limits(values)
    shown = np.ma.masked_invalid(values)
    image = ax.imshow(shown, cmap=DIVERGING if low < 0 else SEQUENTIAL, vmin=low, vmax=high, aspect="equal")
    ax.set_title(title)
    ax.grid(visible=False)
    if annotate:
        for (row, col), value in np.ndenumerate(values):
            fill = image.cmap(image.norm(value)) if np.isfinite(value) else "white"
            text = "−∞" if value == -np.inf else format(value, annotate)
            ax.text(col, row, text, ha="center", va="center", color=readable_on(fill), fontsize=8)
    return image


def _limits(values: np.ndarray) -> tuple[float, float]:
    """What the colours span: from 0 to the largest, or as far on both sides of 0."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    bound = max(abs(low), abs(high), 1e-12)
    return (-bound if low < 0 else 0.0, bound)


# ------------------------------------------------------------------------------------------------ curves and bars


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    logx: bool = False,
    logy: bool = False,
    caption: str | None = None,
    ax: Axes | None = None,
    alt: str | None = None,
) -> None:
    """Curves over x. `caption` says where the numbers come from (device, date)."""
    own = ax is None
    if own:
        _, ax = plt.subplots(figsize=(6.4, 3.6))
    for i, (label, y) in enumerate(series.items()):
        ax.plot(x, y, color=PALETTE[i % 5], ls=DASHES[i % 5], marker=MARKERS[i % 5], label=label)
    _finish(ax, title, xlabel, ylabel, legend=len(series) > 1, caption=caption)
    if logx:
        ax.set_xscale("log", base=2)
        if len(x) <= 8 and max(x) < 2**17:
            ax.set_xticks(list(x), [f"{value:,}" for value in x])
    if logy:
        _log_y(ax)
    elif all(_array(y).min() >= 0 for y in series.values()):
        ax.set_ylim(bottom=0)
    if own:
        show(alt)


def _log_y(ax: Axes) -> None:
    """A logarithmic y axis with plain numbers; a range of less than two decades is labelled at 2 and 5 too."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    between = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    ax.yaxis.set_minor_formatter(between if high < 100 * low else NullFormatter())


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    ylabel: str,
    stacked: bool = False,
    values: str | None = None,
    caption: str | None = None,
    horizontal: bool = False,
    width: float = 6.4,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    legend_outside: bool = False,
    alt: str | None = None,
) -> None:
    """Bars for each group: beside each other, or stacked. `values` is a format for the number at each bar's end;
    `ranges` are bands (low, high) to hold the bars against, grey and named; `legend_outside`: where bars leave no room.
    """
    _, ax = plt.subplots(figsize=(width, 0.45 * len(groups) + 1.4 if horizontal else 3.6))
    draw: Callable = ax.barh if horizontal else ax.bar
    positions, base = np.arange(len(groups)), np.zeros(len(groups))
    thickness = 0.7 if stacked else 0.8 / len(series)
    for i, (label, heights) in enumerate(series.items()):
        heights = _array(heights)
        offset = 0.0 if stacked else (i - (len(series) - 1) / 2) * thickness
        start = {"left" if horizontal else "bottom": base.copy()} if stacked else {}
        style = {"color": PALETTE[i % 5], "edgecolor": "white", "label": label}
        style["hatch"] = HATCHES[(i + i // 5) % 5]  # a sixth bar has the first one's colour, not its hatch
        drawn = draw(positions + offset, heights, thickness, **start, **style)
        if values:
            ax.bar_label(drawn, fmt="{:" + values + "}", padding=2, fontsize=9)
            ax.margins(**{"x" if horizontal else "y": 0.08})
        base += heights if stacked else 0
    for i, (label, (low, high)) in enumerate((ranges or {}).items()):
        span = ax.axvspan if horizontal else ax.axhspan
        span(low, high, fc="#b8b8c4", ec=INK, alpha=0.45, lw=0.6, ls=DASHES[i + 1], zorder=0, label=label)
    axis = ax.yaxis if horizontal else ax.xaxis
    axis.set_ticks(positions, groups)
    axis.grid(visible=False)
    if horizontal:
        ax.invert_yaxis()
    _finish(ax, title, *((ylabel, "") if horizontal else ("", ylabel)), legend=len(series) > 1, caption=caption)
    if legend_outside:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    show(alt)


def _finish(ax: Axes, title: str, xlabel: str, ylabel: str, *, legend: bool, caption: str | None) -> None:
    ax.set_title(title)
    ax.set_xlabel(xlabel + (f"\n{caption}" if caption else ""))
    ax.set_ylabel(ylabel)
    if legend:
        ax.legend()
