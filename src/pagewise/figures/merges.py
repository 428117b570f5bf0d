"""Figures of online softmax at work, drawn from the summaries (m, l, acc) that a run really went through.

A summary here is anything with fields m, l and acc that belongs to one row: scalars, acc a vector or a scalar.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes

from pagewise.figures.charts import BLUE, DASHES, INK, ORANGE, PALETTE, SAND, box, show

Tree = Any  # a (label, summary), or a tuple of two Trees


def streaming(scores: Sequence[float], states: Sequence[Any], *, title: str, alt: str | None = None) -> None:
    """m, l and acc after each key, the scores beside m. Dotted lines: keys that raised m, so that all was rescaled.

    Args:
        scores: of the keys in the order of their arrival; −∞ is not drawn.
        states: the summary after each of them.
    """
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(7.2, 6.4), sharex=True, height_ratios=(1.2, 1, 1))
    keys = np.arange(1, len(scores) + 1)
    m, l = (np.array([float(getattr(state, name)) for state in states]) for name in ("m", "l"))
    acc = np.array([torch.atleast_1d(torch.as_tensor(state.acc)).tolist() for state in states])
    scores = np.asarray(scores, dtype=float)

    visible = np.isfinite(scores)
    top.plot(keys[visible], scores[visible], "o", color=INK, ms=4, label="score of the key")
    top.step(keys, m, where="post", color=BLUE, label="m, the largest so far")
    middle.step(keys, l, where="post", color=BLUE, label="l, the sum of exp(score − m)")
    middle.plot([], [], color=ORANGE, ls=":", label="m rises: what was summed before shrinks")
    middle.set_ylim(bottom=0)
    for i, component in enumerate(acc.T):
        bottom.step(keys, component, where="post", color=PALETTE[i], ls=DASHES[i], label=f"acc[{i}]")
    for axis, name in ((top, "score, m"), (middle, "l"), (bottom, "acc")):
        for key in keys[1:][np.diff(m) > 0]:
            axis.axvline(key, color=ORANGE, ls=":", lw=1.6, zorder=0)
        axis.set_ylabel(name)
        axis.grid(visible=False)
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, borderaxespad=0.1)
    bottom.set_xlabel("keys seen")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def merge_trees(
    trees: Mapping[str, Tree], merge: Callable[[Any, Any], Any], *, title: str, alt: str | None = None
) -> None:
    """Trees of merges side by side, leaves on top; every box shows the summary that `merge` made.

    Args:
        trees: a panel's title → nested pairs whose leaves are (label, summary).
    """
    figure, axes = plt.subplots(1, len(trees), figsize=(4.6 * len(trees), 4.2))
    for ax, (name, tree) in zip(np.atleast_1d(axes), trees.items(), strict=True):
        depth = _depth(tree)
        _, _, width = _draw(ax, tree, merge, left=0.0, depth=depth)
        ax.set_xlim(-0.1, width + 0.1)
        ax.set_ylim(-0.1, 1.5 * max(map(_depth, trees.values())) + 1.7)
        ax.set_title(name)
        ax.axis("off")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def histogram(values: torch.Tensor, *, title: str, xlabel: str, bins: int = 21, alt: str | None = None) -> None:
    """How often each value came up; 0 is marked."""
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    ax.hist(values.tolist(), bins=bins, color=BLUE, edgecolor="white")
    ax.axvline(0, color=INK, ls="--", lw=1.2)
    ax.set_title(title)
    ax.set_xlabel(xlabel)
    ax.set_ylabel("count")
    show(alt)


def _is_leaf(tree: Tree) -> bool:
    return isinstance(tree[0], str)


def _depth(tree: Tree) -> int:
    return 0 if _is_leaf(tree) else 1 + max(map(_depth, tree))


def _draw(ax: Axes, tree: Tree, merge: Callable, *, left: float, depth: int) -> tuple[Any, tuple[float, float], float]:
    """Draw `tree` from x = `left` on, its leaves in row `depth`; return (summary, bottom centre of its box, width)."""
    y = 1.5 * depth if _is_leaf(tree) else 1.5 * (depth - _depth(tree))
    if _is_leaf(tree):
        label, summary = tree
        centre, width = left + 0.6, 1.2
    else:
        label, width, parts = "", 0.0, []
        for child in tree:
            part, position, taken = _draw(ax, child, merge, left=left + width, depth=depth)
            parts.append((part, position))
            width += taken
        summary = merge(*(part for part, _ in parts))
        centre = sum(position[0] for _, position in parts) / 2
        for _, (x, bottom) in parts:
            ax.plot([x, centre], [bottom, y + 0.9], color=INK, lw=1.0, zorder=0)
    text = f"m {float(summary.m):.2f}\nl {float(summary.l):.3f}\nacc {float(summary.acc):.3f}"
    box(ax, centre - 0.52, y, 1.04, 0.9, text, fill=SAND if label else "#ffffff")
    if label:
        ax.text(centre, y + 1.0, label, ha="center", va="bottom", fontsize=9)
    return summary, (centre, y), width
