"""Figures of online softmax, drawn from the summaries (m, l, acc) of a real run.

A summary is any object with the fields m, l and acc of one row: m and l are scalars, acc is a vector or a scalar.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from matplotlib.axes import Axes

from pagewise.figures.charts import lines
from pagewise.figures.drawing import box, chart, colour_key, diagram, rectangle, subplots
from pagewise.figures.palette import BLUE, INK, SAND

Tree = Any  # a (label, summary), or a tuple of two Trees


def tiles_held(
    visible: torch.Tensor, tile_size: int, now: int, *, title: str = "Which scores exist at one time?", alt: str = ""
) -> None:
    """Draw the scores of T × S that exist at one time: all of them in naive attention, tile `now` in online attention.

    Args:
        visible: [T, S] bool, whether a query may see a key. Masked scores are computed too.
    """
    T, S = visible.shape
    whole = f"naive: {T * S} scores"
    tiled = f"online: {T * min(tile_size, S - now * tile_size)} scores,\n(m, l, acc) of {T} queries"
    words = alt or f"Two grids of {T} queries by {S} keys. {whole.capitalize()}. {tiled.capitalize()}."
    with subplots(1, 2, size=(4.8, 3.7), title=title, alt=words, sharey=True) as (figure, axes):
        for ax, name, size, alive in ((axes[0], whole, S, 0), (axes[1], tiled, tile_size, now)):
            for tile, start in enumerate(range(0, S, size)):
                fill = BLUE if tile == alive else SAND if tile < alive else "white"
                rectangle(ax, start, 0, min(size, S - start), T, fill, lw=1.2)
            for i, j in (~visible).nonzero().tolist():
                rectangle(ax, j, i, 1, 1, "none", ec="#9a9aae", hatch="////", lw=0)
            ax.set(xlim=(-0.2, S + 0.2), ylim=(T + 0.2, -0.2), aspect="equal", xlabel="key")
            ax.set_title(name, fontweight="normal", fontsize=10)
            ax.set(xticks=range(0, S + 1, tile_size), yticks=range(0, T + 1, tile_size))
        axes[0].set_ylabel("query")
        looks = {"held now": BLUE, "already merged": SAND, "not computed yet": "white"}
        looks["masked"] = {"fc": "white", "ec": "#9a9aae", "hatch": "////"}
        colour_key(figure, looks, loc="outside lower center", ncols=2)


def precision_errors(lengths: Sequence[int], errors: Mapping[str, Sequence[float]]) -> None:
    """Draw the relative error of online softmax over the keys of a row, for each choice of its state's precision."""
    longest = ", ".join(f"{name} {series[-1]:.0e}" for name, series in errors.items())
    alt = f"Relative errors of the output over the number of keys. At {lengths[-1]:,} keys: {longest}."
    title = "l and acc need float32, m does not"
    axes = {"xlabel": "keys in the row", "ylabel": "relative error of the output", "logx": True, "logy": True}
    with chart(6.4, 3.8, title, alt) as ax:
        lines(lengths, errors, title=title, ax=ax, **axes)
        ax.legend(loc="lower left", bbox_to_anchor=(0.25, 0.17), fontsize=9)


def merge_trees(
    trees: Mapping[str, Tree],
    merge: Callable[[Any, Any], Any],
    *,
    title: str = "Does the order of merging matter?",
    alt: str = "",
) -> None:
    """Draw trees of merges below each other, leaves on top.

    Each box shows a summary that `merge` made. Each edge shows the factor of l and acc in that merge.

    Args:
        trees: a panel's title → nested pairs whose leaves are (label, summary).
    """
    rows = [1.5 * _depth(tree) + 1.7 for tree in trees.values()]
    size = (4.6, 0.58 * sum(rows) + 0.4)
    roots = {name: _shown(_root(tree, merge)) for name, tree in trees.items()}
    alt = alt or ". ".join(f"Merged {name}: at the root {shown}" for name, shown in roots.items()) + "."
    with subplots(len(trees), size=size, title=title, alt=alt, height_ratios=rows) as (_, axes):
        for ax, (name, tree) in zip(axes, trees.items(), strict=True):
            leaves, depth = count(), _depth(tree)
            _draw(ax, tree, merge, leaves, depth)
            ax.set_title(name)
            diagram(ax, (-0.1, 1.2 * next(leaves) + 0.1), (-0.1, 1.5 * depth + 1.6))


def _factor(rise: float) -> str:
    """Return the factor by which l and acc shrink in a merge, from the part's m minus the new m."""
    return "×1" if rise == 0 else f"×$e^{{{rise:g}}}$"


def _is_leaf(tree: Tree) -> bool:
    return isinstance(tree[0], str)


def _root(tree: Tree, merge: Callable) -> Any:
    return tree[1] if _is_leaf(tree) else merge(*(_root(child, merge) for child in tree))


def _shown(summary: Any) -> str:
    return f"m {float(summary.m):.2f}, l {float(summary.l):.3f}, acc {float(summary.acc):.3f}"


def _depth(tree: Tree) -> int:
    return 0 if _is_leaf(tree) else 1 + max(map(_depth, tree))


def _draw(ax: Axes, tree: Tree, merge: Callable, leaves: Iterator[int], depth: int) -> tuple[Any, float, float]:
    """Draw `tree` with its leaves in row `depth`. Return (summary, x of its box's middle, y)."""
    if _is_leaf(tree):
        label, summary = tree
        x, y = 1.2 * next(leaves) + 0.6, 1.5 * depth
        ax.text(x, y + 1.0, label, ha="center", va="bottom", fontsize=9)
    else:
        parts = [_draw(ax, child, merge, leaves, depth) for child in tree]
        summary = merge(*(part for part, _, _ in parts))
        x, y = sum(part_x for _, part_x, _ in parts) / 2, 1.5 * (depth - _depth(tree))
        for part, part_x, bottom in parts:
            ax.plot([part_x, x], [bottom, y + 0.9], color=INK, lw=1.0, zorder=0)
            plate = {"fc": "white", "ec": "none", "pad": 0.5}
            middle = ((part_x + x) / 2, (bottom + y + 0.9) / 2)
            ax.text(
                *middle, _factor(float(part.m) - float(summary.m)), ha="center", va="center", fontsize=8, bbox=plate
            )
    box(ax, x - 0.52, y, 1.04, 0.9, _shown(summary).replace(", ", "\n"), fill=SAND if _is_leaf(tree) else "#ffffff")
    return summary, x, y
