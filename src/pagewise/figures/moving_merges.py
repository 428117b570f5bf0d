"""Online softmax at work, step by step: when the maximum rises, all that was summed shrinks, then the new keys add."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from pagewise.figures.drawing import box, diagram
from pagewise.figures.embed import Embedded
from pagewise.figures.palette import BLUE, INK, ORANGE, SAND
from pagewise.figures.steps import stepper


class _Moment(NamedTuple):
    scores: list[float]  # of the keys that have arrived
    arriving: int  # how many of them just now
    weights: list[float]  # exp(score − m) of those that have been added
    before: list[float]  # what these weights were before m rose
    summary: Any
    lowest: float
    highest: float
    num_keys: int
    divided: bool = False


def softmax_steps(
    partial: type[Any], scores: Tensor, values: Tensor, *, pieces: Sequence[int] | None = None, title: str, alt: str
) -> Embedded:
    """Keys arrive, and the summary (m, l, acc) changes; a rise of m is two steps: shrink, then grow.

    Args:
        partial: the class of the summary, `Partial`: its empty, of and merge do all the work.
        scores: of the keys in the order of their arrival, [S]; −∞ is a masked key.
        values: of the same keys, [S] or [S, D].
        pieces: how many keys arrive at a time; default: one.
    """
    values = values if values.dim() == 2 else values[:, None]
    state = partial.empty(head_size=values.shape[1], dtype=scores.dtype)
    visible = [s for s in scores.tolist() if s > -math.inf] or [0.0]
    limits = (min(visible), max(visible), len(scores))
    frames = [("No key yet: m = −∞, l = 0, acc = 0.", _Moment([], 0, [], [], state, *limits))]
    weights: list[float] = []
    seen = 0
    for size in pieces or [1] * len(scores):
        arriving = scores[seen : seen + size]
        piece = partial.of(arriving, values[seen : seen + size])
        names = f"Key {seen}" if size == 1 else f"Keys {seen} {'and' if size == 2 else 'to'} {seen + size - 1}"
        seen += size
        so_far = scores[:seen].tolist()
        m_old, m = float(state.m), max(float(state.m), float(piece.m))
        rises = -math.inf < m_old < m
        if rises:
            state = state.merge(piece._replace(l=0 * piece.l, acc=0 * piece.acc))  # m of the piece, nothing else
            weights, before = _weights(so_far[:-size], m), weights
            caption = f"{names}: m rises from {m_old:g} to {m:g}. First, all that was summed shrinks: "
            caption += f"l and acc times exp({m_old:g} − {m:g}) = {math.exp(m_old - m):.3f}."
            frames.append((caption, _Moment(so_far, size, weights, before, state, *limits)))
        state = state.merge(piece)
        weights = _weights(so_far, m)
        caption = f"{names}{', then' if rises else ''}: {_added(weights[-size:], m)}"
        frames.append((caption, _Moment(so_far, size, weights, [], state, *limits)))
    last = _Moment(so_far, 0, weights, [], state, *limits, divided=True)
    frames.append((f"All keys seen. Divide once, at the end: acc / l = {_vector(state.output())}.", last))
    return stepper(frames, _draw, title=title, alt=alt, height=4.4)


def _added(weights: Sequence[float], m: float) -> str:
    if max(weights) == 0.0:
        return "masked, so of weight 0; " + ("m stays −∞." if m == -math.inf else "nothing changes.")
    sums = " + ".join(f"{weight:.3f}" for weight in weights)
    return f"l grows by {sums}, acc by {'that' if len(weights) == 1 else 'each'} times the value."


def _weights(scores: Sequence[float], m: float) -> list[float]:
    return [math.exp(s - m) if s > -math.inf else 0.0 for s in scores]


def _draw(figure: Figure, moment: _Moment) -> None:
    top, middle, bottom = figure.subplots(3, 1, height_ratios=(1.2, 1.2, 0.45))
    n, m = moment.num_keys, float(moment.summary.m)
    room = 0.25 * (moment.highest - moment.lowest) + 0.3
    floor = moment.lowest - room
    old = len(moment.scores) - moment.arriving
    if m > -math.inf:
        top.axhline(m, color=BLUE, lw=2)
        top.text(-0.4, m, f"m = {m:g}", va="bottom", color=BLUE, fontweight="bold")
    for key, score in enumerate(moment.scores):
        fill = INK if key < old else ORANGE
        if score == -math.inf:
            top.text(key, floor + 0.05, "−∞", ha="center", va="bottom", color=fill, fontweight="bold")
        else:
            top.plot(key, score, "o", color=fill, ms=8, mec=INK, zorder=3)
    top.set(xlim=(-0.5, n - 0.5), ylim=(floor, moment.highest + room), ylabel="score")
    middle.bar(range(len(moment.before)), moment.before, 0.7, fc="none", ec=INK, ls=":", lw=1.4)
    fills = [BLUE if key < old else ORANGE for key in range(len(moment.weights))]
    middle.bar(range(len(moment.weights)), moment.weights, 0.7, color=fills, ec=INK)
    middle.set(xlim=(-0.5, n - 0.5), ylim=(0, 1.1), ylabel="exp(score − m)", xlabel="key (orange: new, dotted: before)")
    for ax in (top, middle):
        ax.set_xticks(range(n))
        ax.grid(visible=False)
    top.tick_params(labelbottom=False)
    acc, out = (_vector(x) for x in (moment.summary.acc, moment.summary.output()))
    texts = ["m = −∞" if m == -math.inf else f"m = {m:g}", f"l = {float(moment.summary.l):.3f}", f"acc = {acc}"]
    texts += [f"out = {out}"] if moment.divided else []
    for i, text in enumerate(texts):
        box(bottom, i * 6 / len(texts), 0, 5.6 / len(texts), 1, text, fill=SAND)
    diagram(bottom, (-0.05, 5.95), (-0.05, 1.05))


def _vector(values: Tensor) -> str:
    return ", ".join(f"{x:.3f}" for x in torch.atleast_1d(values).tolist())
