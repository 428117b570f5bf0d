"""The parts of every figure: a figure with a title, boxes and arrows in data units, a legend of colours."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from pagewise.figures.palette import INK, readable_on


@contextmanager
def subplots(
    rows: int, columns: int = 1, *, size: tuple[float, float], title: str = "", alt: str = "", **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Open a figure of `size` inches, yield it with its axes, row by row, and `show` it at the end of the block.

    The options are those of `plt.subplots`, and `fontsize`, the size of the title in points.
    """
    fontsize = options.pop("fontsize", 11)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=fontsize)
    yield figure, list(axes.flat)
    show(alt)


@contextmanager
def chart(width: float, height: float, title: str, alt: str = "") -> Iterator[Axes]:
    """Open a figure of one pair of axes with a title, yield the axes, and `show` the figure at the end of the block."""
    _, ax = plt.subplots(figsize=(width, height))
    ax.set_title(title)
    yield ax
    show(alt)


def show(alt: str = "") -> None:
    """Show the current figure. `alt` describes it in words; the default is its titles, axes and legends.

    A notebook stores `alt` as text/plain beside the picture, and the book uses it as the picture's alternative text.
    """
    figure = plt.gcf()
    words = alt or titles_and_axes(figure)
    figure._repr_mimebundle_ = lambda include=None, exclude=None: {"text/plain": words}
    plt.show()


def titles_and_axes(figure: Figure) -> str:
    """Return the words of a figure: its title, and the title, labels and legend of each axes."""
    said = [figure.get_suptitle()]
    for ax in figure.axes:
        of, over, names = ax.get_ylabel(), ax.get_xlabel(), ax.get_legend_handles_labels()[1]
        axes = f"{of} over {over}" if of and over else of or over
        said += [ax.get_title(loc="left"), ": ".join(filter(None, [axes, ", ".join(names)]))]
    sentences = [" ".join(text.split()) for text in said if text]
    return " ".join(text if text[-1] in ".?!" else f"{text}." for text in sentences) or "A figure."


def diagram(ax: Axes, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    """Show a part of the plane, without axes."""
    ax.set(xlim=xlim, ylim=ylim)
    ax.axis("off")


def bare(ax: Axes) -> None:
    """Remove everything of the axes except the labels."""
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def rectangle(ax: Axes, x: float, y: float, width: float, height: float, fill: str = "white", **style: Any) -> None:
    """Draw a rectangle in data units."""
    ax.add_patch(Rectangle((x, y), width, height, **{"fc": fill, "ec": INK, "lw": 0.8} | style))


def box(
    ax: Axes, x: float, y: float, width: float, height: float, text: str = "", *, fill: str = "white", **style: Any
) -> None:
    """Draw a labelled rectangle in data units. The text is dark on a light fill, and light on a dark fill."""
    rectangle(ax, x, y, width, height, fill, **style)
    middle = x + width / 2, y + height / 2
    ax.text(*middle, text, ha="center", va="center", color=readable_on(fill), fontsize=9)


def arrow(
    ax: Axes, tail: tuple[float, float], tip: tuple[float, float], *, color: str = INK, gap: float = 0, **style: Any
) -> None:
    """Draw an arrow in data units. `gap` is the distance to its ends in points."""
    style = {"arrowstyle": "-|>", "color": color, "shrinkA": gap, "shrinkB": gap} | style
    ax.annotate("", tip, tail, arrowprops=style)


def colour_key(of: Figure | Axes, looks: Mapping[str, Any], **options: Any) -> None:
    """Add a legend of patches: name → its colour, or the whole style of its patch."""
    styles = {name: look if isinstance(look, dict) else {"fc": look} for name, look in looks.items()}
    of.legend(handles=[Patch(**{"ec": INK} | style, label=name) for name, style in styles.items()], **options)
