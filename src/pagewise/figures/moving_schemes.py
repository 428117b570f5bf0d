"""Three ways to take a softmax over a row that arrives in pieces, step by step and side by side (FlashDecoding++)."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from pagewise.figures.drawing import box, diagram
from pagewise.figures.palette import ORANGE, SAND
from pagewise.figures.steps import Embedded, stepper


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
    state, seen = partial.empty(head_size=1, dtype=scores.dtype), 0
    frames = [("No key yet.", (state, 0, 0))]
    for size in pieces:
        old, seen = seen, seen + size
        before = float(state.m)
        state = state.merge(partial.of(scores[old:seen], values[old:seen, None]))
        m = float(state.m)
        shrink = f"m rises from {before:g} to {m:g}: l and acc shrink by {math.exp(before - m):.3f} first"
        said = shrink if -math.inf < before < m else f"m = {m:g}"
        caption = f"Keys {old} to {seen - 1}. Whole row: waits. Synchronised: {said}. Unified: just adds."
        frames.append((caption, (state, old, seen)))
    low, high = band
    verdict = f"All seen: acc / l, alike. The largest score lies {m - phi:g} above φ, the band is {low:g} to {high:g}: "
    inside = low < m - phi < high
    verdict += "inside, done." if inside else "outside, so the third one recomputes this row as the second."
    frames.append((verdict, (state, seen, seen)))

    def draw(figure: Figure, frame: tuple[Any, int, int]) -> None:
        state, old, seen = frame
        rows = _rows(state, scores[:seen].tolist(), values, phi, ended=old == len(scores))
        for ax, (title, centre, weights, text) in zip(figure.subplots(3, 1), rows, strict=True):
            for key, score in enumerate(scores.tolist()):
                fill = "white" if key >= seen else ORANGE if key >= old else SAND
                box(ax, key, 1, 0.92, 0.8, f"{score:g}" if key < seen else "", fill=fill)
                box(ax, key, 0, 0.92, 0.8, f"{weights[key]:.3f}" if key < len(weights) else "")
            for y, name in ((1.4, "score s"), (0.4, f"exp(s − {centre})")):
                ax.text(-0.1, y, name, ha="right", va="center", fontsize=9)
            ax.text(0, -0.25, text, ha="left", va="top", fontsize=10)
            ax.set_title(title, fontsize=10)
            diagram(ax, (-0.8, len(scores)), (-0.9, 1.9))

    return stepper(frames, draw, title=title, alt=alt, height=4.6)


def _rows(
    state: Any, seen: list[float], values: Tensor, phi: float, *, ended: bool
) -> list[tuple[str, str, list[float], str]]:
    """Return (name, what is subtracted from every score, exp(score − that), what is known) of each scheme."""
    m, l, acc = (float(x) for x in state)
    said = "m = −∞" if m == -math.inf else f"m = {m:g}"
    by_max, by_phi = ([math.exp(score - centre) for score in seen] for centre in (m, phi))
    l_phi, acc_phi = sum(by_phi), sum(w * v for w, v in zip(by_phi, values.tolist(), strict=False))
    whole = [], f"{said}, {len(seen)} scores kept" if seen else said
    synchronised = by_max, f"{said}   l = {l:.3f}   acc = {acc:.2f}"
    unified = by_phi, f"l = {l_phi:.3f}   acc = {acc_phi:.2f}"
    if ended:
        synchronised = by_max, f"{synchronised[1]}   out = {acc / l:.3f}"
        unified = by_phi, f"{unified[1]}   out = {acc_phi / l_phi:.3f}"
        whole = synchronised  # once the whole row is there
    name = f"partial, unified φ = {phi:g}"
    return [("whole row", "m", *whole), ("partial, synchronised", "m", *synchronised), (name, "φ", *unified)]
