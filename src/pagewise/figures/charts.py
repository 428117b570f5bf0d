"""Heat maps, curves, bars and rooflines.

A figure answers the question in its title. The functions take tensors or plain lists, draw, and show. Several lines or
bars differ in lightness and in dash or hatch, not in hue alone.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from pagewise.figures import palette
from pagewise.figures.drawing import chart, rectangle, show, subplots
from pagewise.figures.palette import DASHES, HATCHES, INK, PALETTE, readable_on


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
    shared: str = "",
    outlined: int | None = None,
    alt: str = "",
) -> None:
    """Draw matrices side by side, each with a title. −∞ and NaN are white.

    Args:
        annotate: a format such as ".2f" for the numbers. NaN stays blank.
        shared: the name of the quantity, if all matrices use one colour scale. outlined: the framed row and column.
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
            if outlined is not None:
                frame = {"ec": palette.ORANGE, "lw": 3, "clip_on": False}
                rectangle(ax, -0.5, outlined - 0.5, matrix.shape[1], 1, "none", **frame)
                rectangle(ax, outlined - 0.5, -0.5, 1, matrix.shape[0], "none", ls=":", **frame)
            for axis, ticks in ((ax.xaxis, xticks), (ax.yaxis, yticks)):
                axis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
                if ticks is not None:
                    axis.set_ticks(range(len(ticks)), ticks)
        axes[0].set_ylabel(ylabel)
        if shared:
            figure.colorbar(image, ax=axes, shrink=0.75, aspect=14, pad=0.02, label=shared).ax.tick_params(labelsize=8)


def heatmap(
    ax: Axes,
    values: np.ndarray,
    title: str,
    *,
    annotate: str | None = None,
    limits: tuple[float, float] | None = None,
    left: float = 0.0,
    fontsize: float = 8,
) -> AxesImage:
    """Draw one matrix with its first column at x = `left`. Signed values get a diverging map centred at 0."""
    low, high = limits or _limits(values)
    colours = palette.DIVERGING if low < 0 else palette.SEQUENTIAL
    extent = (left - 0.5, left + values.shape[1] - 0.5, len(values) - 0.5, -0.5)
    image = ax.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=low, vmax=high, aspect="equal", extent=extent)
    ax.set_title(title)
    if annotate:
        for (row, col), value in np.ndenumerate(values):
            fill = image.cmap(image.norm(value)) if np.isfinite(value) else "white"
            text = "" if np.isnan(value) else "−∞" if value == -np.inf else format(value, annotate)
            ax.text(left + col, row, text, ha="center", va="center", color=readable_on(fill), fontsize=fontsize)
    return image


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the colour scale: 0 and the largest value, or the same distance on both sides of 0."""
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
    marks: Sequence[float] = (),
    ax: Axes | None = None,
    alt: str = "",
) -> None:
    """Draw curves over x, and a dotted line with its number at each x of `marks`.

    `caption` names the source of the numbers (device, date).
    """
    own = ax is None
    ax = ax or plt.subplots(figsize=(6.4, 3.6))[1]
    for i, (label, y) in enumerate(series.items()):
        ax.plot(x, y, color=PALETTE[i % 5], ls=DASHES[i % 5], marker=palette.MARKERS[i % 5], label=label)
    ax.grid(visible=True)
    ax.set_title(title)
    _finish(ax, xlabel, ylabel, caption, legend=len(series) > 1)
    if logx:
        ax.set_xscale("log", base=2)
        if len(x) <= 8 and max(x) < 2**17:
            ax.set_xticks(list(x), [f"{value:,}" for value in x])
    if logy:
        _log_y(ax)
    elif all(_array(y).min() >= 0 for y in series.values()):
        ax.set_ylim(bottom=0)
    for mark in marks:
        ax.axvline(mark, color=palette.INK, ls=":", lw=1)
        ax.text(mark, 0.02, f" {mark:,.0f}", transform=ax.get_xaxis_transform(), fontsize=9)
    if own:
        show(alt)


def _log_y(ax: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers. A range of less than two decades has labels at 2 and 5 too."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format(value, ".0e" if low < 1e-5 else "g")))
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
    alt: str = "",
) -> None:
    """Draw bars for each group, beside each other or stacked.

    `values` is a format for the number at the end of each bar. `ranges` are grey bands (low, high) with names. Set
    `legend_outside` if the bars leave no space for the legend.
    """
    positions, base = np.arange(len(groups)), np.zeros(len(groups))
    thickness = 0.7 if stacked else 0.8 / len(series)
    with chart(width, 0.45 * len(groups) + 1.4 if horizontal else 3.6, title, alt) as ax:
        draw, span, start = (ax.barh, ax.axvspan, "left") if horizontal else (ax.bar, ax.axhspan, "bottom")
        for i, (label, heights) in enumerate(series.items()):
            offset = 0.0 if stacked else (i - (len(series) - 1) / 2) * thickness
            style = {"color": PALETTE[i % 5], "edgecolor": "white", "label": label, start: base}
            style["hatch"] = HATCHES[(i + i // 5) % 5]  # the sixth bar has the colour of the first, but another hatch
            drawn = draw(positions + offset, _array(heights), thickness, **style)
            if values:
                ax.bar_label(drawn, fmt="{:" + values + "}", padding=2, fontsize=9)
                ax.margins(**{"x" if horizontal else "y": 0.08})
            if stacked:
                base = base + _array(heights)
        for i, (label, (low, high)) in enumerate((ranges or {}).items()):
            look = {"fc": "#b8b8c4", "ec": INK, "alpha": 0.45, "lw": 0.6, "hatch": HATCHES[2 * i % 5]}
            span(low, high, **look, zorder=0, label=label)
        if horizontal:
            ax.set_yticks(positions, groups)
            ax.invert_yaxis()
        else:
            ax.set_xticks(positions, groups)
        ax.grid(axis="x" if horizontal else "y")
        _finish(ax, *((ylabel, "") if horizontal else ("", ylabel)), caption, legend=len(series) > 1)
        if legend_outside:
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _finish(ax: Axes, xlabel: str, ylabel: str, caption: str | None, *, legend: bool) -> None:
    ax.set(xlabel=xlabel + (f"\n{caption}" if caption else ""), ylabel=ylabel)
    if legend:
        ax.legend()


def stacks(
    names: Sequence[str], shares: Mapping[str, Sequence[float]], *, title: str, xlabel: str, alt: str = ""
) -> None:
    """Draw horizontal bars of shares (0 … 1) that add up to 1. A large enough share shows its per cent."""
    left = np.zeros(len(names))
    with chart(7.6, 0.55 * len(names) + 1.8, title, alt) as ax:
        for i, (label, values) in enumerate(shares.items()):
            values, fill = 100 * np.asarray(values), PALETTE[i % 5]
            style = {"color": fill, "hatch": HATCHES[i % 5], "ec": "white", "label": label}
            drawn = ax.barh(range(len(names)), values, 0.7, left=left, **style)
            plate = {"fc": fill if i == 0 else "white", "ec": "none", "pad": 1}
            texts = [f"{value:.0f}" if value > 4 else "" for value in values]
            ax.bar_label(drawn, texts, label_type="center", color=readable_on(plate["fc"]), fontsize=9, bbox=plate)
            left += values
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.grid(axis="x")
        ax.set(xlabel=xlabel, xlim=(0, 100.5))
        ax.set_title(title, pad=28)
        above = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.98)}  # between the title and the axes
        ax.legend(ncols=len(shares), fontsize=9, columnspacing=1.2, **above)


def roofline(gpus: Sequence, points: Mapping[str, float], *, title: str, alt: str = "") -> None:
    """Draw attainable TFLOP/s over intensity for each GPU of `tools.roofline`, with a mark at each point's intensity.

    A diamond marks each ridge. If several GPUs share a roof, the roof has one label.
    """
    top = max(gpu.peak_flops for gpu in gpus) / 1e12
    with chart(6.4, 4.4, title, alt) as ax:
        for i, gpu in enumerate(gpus):
            x = [0.1, gpu.ridge, 1e4]
            ax.loglog(x, [gpu.attainable(v) / 1e12 for v in x], color=PALETTE[i], ls=DASHES[i])
            label = f"{gpu.name}, ridge at {gpu.ridge:.0f}"
            ax.plot([], [], "D", color=PALETTE[i], ls=DASHES[i], ms=6, label=label)
            ax.plot(gpu.ridge, gpu.peak_flops / 1e12, "D", color=PALETTE[i], ms=6)
        for peak in {gpu.peak_flops / 1e12 for gpu in gpus}:
            names = " and ".join(gpu.name.split()[0] for gpu in gpus if gpu.peak_flops / 1e12 == peak)
            ax.annotate(f"{names}: {peak:.0f}", (9e3, peak), (0, 3), textcoords="offset points", ha="right")
        ax.text(0.13, top, "memory-bound", fontstyle="italic", va="center")
        ax.text(9e3, top / 8, "compute-bound", fontstyle="italic", ha="right", va="center")
        for i, (label, intensity) in enumerate(points.items()):
            ax.axvline(intensity, color=INK, lw=0.8, ls=":")
            ax.plot([intensity] * len(gpus), [g.attainable(intensity) / 1e12 for g in gpus], "o", color=INK, ms=4)
            plate = {"fc": "white", "ec": "none", "pad": 1}
            ax.annotate(label, (intensity, top * (2, 4, 8)[i % 3]), ha="center", fontsize=8.5, bbox=plate)
        ax.grid(visible=True)
        ax.set(xlabel="intensity (FLOPs per byte moved)", ylabel="attainable TFLOP/s", ylim=(0.1, top * 14))
        ax.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="none")
