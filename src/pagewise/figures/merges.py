"""Figures of online softmax, drawn from the summaries (m, l, acc) of a real run.

A summary is any object with the fields m, l and acc of one row: m and l are scalars, acc is a vector or a scalar.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pagewise.figures.drawing import box, colour_key, diagram, rectangle, subplots
from pagewise.figures.palette import BLUE, DASHES, INK, ORANGE, PALETTE, SAND

Tree = Any  # a (label, summary), or a tuple of two Trees
EARLIER = 0.4  # distance between the shrinking of the sums and the adding of a key


def streaming(scores: Sequence[float], states: Sequence[Any], *, title: str, alt: str = "") -> None:
    """Draw m, l and acc as keys arrive. If a key raises m, there are two steps: the sums shrink, then the key adds.

    Args:
        scores: of the keys in the order of their arrival; −∞ is not drawn.
        states: the summary before the first key, and after each key.
    """
    m, l = (np.array([float(getattr(state, name)) for state in states]) for name in ("m", "l"))
    acc = np.array([torch.atleast_1d(torch.as_tensor(state.acc)).tolist() for state in states])
    scores = np.asarray(scores, dtype=float)
    visible, keys = np.isfinite(scores), np.arange(len(scores))
    rises = [key for key in keys if -np.inf < m[key] < m[key + 1]]
    shrink = np.array([np.exp(m[key] - m[key + 1]) if key in rises else 1.0 for key in keys])

    options = {"sharex": True, "height_ratios": (1.1, 1, 1)}
    with subplots(3, size=(5.2, 5.8), title=title, alt=alt, **options) as (_, (top, middle, bottom)):
        top.plot(keys[visible], scores[visible], "o", color=INK, ms=4, label="score of the key")
        path = _two_steps(np.where(np.isneginf(m), np.nan, m), after=m[1:])
        top.plot(*path, color=BLUE, label="m, the largest so far")
        sums = [(middle, l, {"color": BLUE, "label": "l, the sum of exp(score − m)"})]
        for i, component in enumerate(acc.T):
            sums.append((bottom, component, {"color": PALETTE[2 * i], "ls": DASHES[i], "label": f"acc[{i}]"}))
        for ax, row, style in sums:
            ax.plot(*_two_steps(row, after=shrink * row[:-1]), **style)
            for key in rises:
                ends = row[key], shrink[key] * row[key]
                ax.plot([key - EARLIER] * 2, ends, color=ORANGE, lw=3.5, solid_capstyle="butt", zorder=3)
        middle.plot([], [], color=ORANGE, lw=3.5, label="shrinks")
        middle.set_ylim(bottom=0)
        for ax, name in ((top, "score, m"), (middle, "l"), (bottom, "acc")):
            ax.set_ylabel(name)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.1)
        bottom.set_xlabel("key that arrives")


def _two_steps(row: np.ndarray, *, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the path of a quantity: `after[key]` a little before each key, and `row[key + 1]` at the key."""
    keys = np.arange(len(after))
    x = np.stack([keys - EARLIER, keys - EARLIER, keys, keys], axis=1).ravel()
    y = np.stack([row[:-1], after, after, row[1:]], axis=1).ravel()
    return np.append(x, len(after) - 1 + EARLIER), np.append(y, row[-1])


def tiles_held(visible: torch.Tensor, tile_size: int, now: int, *, title: str, alt: str = "") -> None:
    """Draw the scores of T × S that exist at one time: all of them in naive attention, tile `now` in online attention.

    Args:
        visible: [T, S] bool, whether a query may see a key. Masked scores are computed too.
    """
    T, S = visible.shape
    whole = f"naive: {T * S} scores"
    tiled = f"online: {T * min(tile_size, S - now * tile_size)} scores,\n(m, l, acc) of {T} queries"
    with subplots(1, 2, size=(4.8, 3.7), title=title, alt=alt, sharey=True) as (figure, axes):
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
        looks = {"held now": BLUE, "folded in, forgotten": SAND, "not computed yet": "white"}
        looks["masked"] = {"fc": "white", "ec": "#9a9aae", "hatch": "////"}
        colour_key(figure, looks, loc="outside lower center", ncols=2)


def merge_trees(trees: Mapping[str, Tree], merge: Callable[[Any, Any], Any], *, title: str, alt: str = "") -> None:
    """Draw trees of merges below each other, with the leaves on top. Every box shows the summary that `merge` made.

    Args:
        trees: a panel's title → nested pairs whose leaves are (label, summary).
    """
    rows = [1.5 * _depth(tree) + 1.7 for tree in trees.values()]
    size = (4.6, 0.58 * sum(rows) + 0.4)
    with subplots(len(trees), size=size, title=title, alt=alt, height_ratios=rows) as (_, axes):
        for ax, (name, tree) in zip(axes, trees.items(), strict=True):
            leaves, depth = count(), _depth(tree)
            _draw(ax, tree, merge, leaves, depth)
            ax.set_title(name)
            diagram(ax, (-0.1, 1.2 * next(leaves) + 0.1), (-0.1, 1.5 * depth + 1.6))


def _is_leaf(tree: Tree) -> bool:
    return isinstance(tree[0], str)


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
        for _, part_x, bottom in parts:
            ax.plot([part_x, x], [bottom, y + 0.9], color=INK, lw=1.0, zorder=0)
    text = f"m {float(summary.m):.2f}\nl {float(summary.l):.3f}\nacc {float(summary.acc):.3f}"
    box(ax, x - 0.52, y, 1.04, 0.9, text, fill=SAND if _is_leaf(tree) else "#ffffff")
    return summary, x, y
