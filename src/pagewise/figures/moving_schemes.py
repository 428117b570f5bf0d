"""Three ways to take a softmax over a row that arrives in pieces, step by step and side by side (FlashDecoding++)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from torch import Tensor

from pagewise.figures.drawing import box, diagram
from pagewise.figures.embed import Embedded
from pagewise.figures.palette import ORANGE, SAND
from pagewise.figures.steps import stepper


class _Scheme(NamedTuple):
    name: str
    centre: str  # what is subtracted from every score, m or φ
    weights: Sequence[float]  # exp(score − centre) of the keys that have one
    state: str


class _Moment(NamedTuple):
    scores: Sequence[float]
    seen: int
    arriving: int  # how many of them just now
    schemes: Sequence[_Scheme]


def scheme_steps(
    partial: type[Any],
    scores: Tensor,
    values: Tensor,
    *,
    pieces: Sequence[int],
    phi: float,
    band: tuple[float, float],
    title: str,
    alt: str,
) -> Embedded:
    """A whole-row softmax, a synchronised partial one and one with a unified maximum φ on the same row.

    Args:
        partial: the class of the summary (m, l, acc), `Partial`: its empty, of and merge are the synchronised one.
        scores: of the keys, [S].
        values: of the same keys, [S].
        pieces: how many keys arrive at a time.
        phi: what the third subtracts from every score.
        band: what the row's largest score − φ must lie strictly between.
    """
    synchronised = partial.empty(head_size=1, dtype=scores.dtype)
    numbers = scores.tolist()
    frames = [("No key yet.", _Moment(numbers, 0, 0, _schemes(numbers, 0, synchronised, values, phi)))]
    seen = 0
    for size in pieces:
        arriving = slice(seen, seen + size)
        seen += size
        before = float(synchronised.m)
        synchronised = synchronised.merge(partial.of(scores[arriving], values[arriving, None]))
        m = float(synchronised.m)
        shrink = f"m rises from {before:g} to {m:g}: l and acc shrink by {math.exp(before - m):.3f} first"
        said = shrink if -math.inf < before < m else f"m = {m:g}"
        caption = f"Keys {arriving.start} to {seen - 1}. Whole row: waits. Synchronised: {said}. Unified: just adds."
        frames.append((caption, _Moment(numbers, seen, size, _schemes(numbers, seen, synchronised, values, phi))))
    frames.append((_verdict(m - phi, band), _Moment(numbers, seen, 0, _at_the_end(numbers, synchronised, values, phi))))
    return stepper(frames, _draw, title=title, alt=alt, height=4.6)


def _schemes(numbers: Sequence[float], seen: int, synchronised: Any, values: Tensor, phi: float) -> list[_Scheme]:
    m = max(numbers[:seen], default=-math.inf)
    by_max, by_phi = ([math.exp(x - centre) for x in numbers[:seen]] for centre in (m, phi))
    l, acc = float(synchronised.l), float(synchronised.acc)
    said = "m = −∞" if m == -math.inf else f"m = {m:g}"
    l_phi, acc_phi = _sums(by_phi, values)
    return [
        _Scheme("whole row", "m", [], f"{said}, {seen} scores kept" if seen else said),
        _Scheme("partial, synchronised", "m", by_max, f"{said}   l = {l:.3f}   acc = {acc:.2f}"),
        _Scheme(f"partial, unified φ = {phi:g}", "φ", by_phi, f"l = {l_phi:.3f}   acc = {acc_phi:.2f}"),
    ]


def _at_the_end(numbers: Sequence[float], synchronised: Any, values: Tensor, phi: float) -> list[_Scheme]:
    _, partial, unified = _schemes(numbers, len(numbers), synchronised, values, phi)
    whole = partial._replace(name="whole row")  # once the whole row is there
    found = []
    for scheme in (whole, partial, unified):
        l, acc = _sums(scheme.weights, values)
        found.append(scheme._replace(state=f"{scheme.state}   out = {acc / l:.3f}"))
    return found


def _sums(weights: Sequence[float], values: Tensor) -> tuple[float, float]:
    return sum(weights), sum(w * v for w, v in zip(weights, values.tolist(), strict=False))


def _verdict(height: float, band: tuple[float, float]) -> str:
    low, high = band
    inside = low < height < high
    said = f"All seen: acc / l, alike. The largest score lies {height:g} above φ, the band is {low:g} to {high:g}: "
    return said + ("inside, done." if inside else "outside, so the third one recomputes this row as the second.")


def _draw(figure: Figure, moment: _Moment) -> None:
    for ax, scheme in zip(figure.subplots(3, 1), moment.schemes, strict=True):
        for key, score in enumerate(moment.scores):
            fill = "white" if key >= moment.seen else ORANGE if key >= moment.seen - moment.arriving else SAND
            box(ax, key, 1, 0.92, 0.8, f"{score:g}" if key < moment.seen else "", fill=fill)
            box(ax, key, 0, 0.92, 0.8, f"{scheme.weights[key]:.3f}" if key < len(scheme.weights) else "")
        for y, name in ((1.4, "score s"), (0.4, f"exp(s − {scheme.centre})")):
            ax.text(-0.1, y, name, ha="right", va="center", fontsize=9)
        ax.text(0, -0.25, scheme.state, ha="left", va="top", fontsize=10)
        ax.set_title(scheme.name, fontsize=10)
        diagram(ax, (-0.8, len(moment.scores)), (-0.9, 1.9))
