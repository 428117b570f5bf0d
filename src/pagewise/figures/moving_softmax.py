"""Softmax over a row that arrives in pieces, step by step: online softmax, and FlashDecoding++'s three ways."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from torch import Tensor

from pagewise.figures.drawing import box, colour_key, diagram
from pagewise.figures.palette import BLUE, INK, ORANGE, SAND, TEAL
from pagewise.figures.steps import Embedded, stepper

STEPS_TITLE = "How do m, l and acc change as pieces of keys arrive?"
STEPS_ALT = (
    "Three rows: scores with a line at m, bars of exp(score − m), and boxes with m, l and acc. When m rises, all "
    "earlier bars shrink before the new bar appears."
)

NOT_ARRIVED = "#e4e4ec"  # the field of keys that have not arrived


class _Moment(NamedTuple):
    state: Any  # the summary (m, l, acc)
    old: int  # number of keys that arrived before this step
    seen: int  # number of keys that have arrived now
    m_old: float | None = None  # the earlier m if m has just risen; the new keys are not yet added


class _Scheme(NamedTuple):
    state: Any  # the summary (m, l, acc)
    old: int  # number of keys that arrived before this step
    seen: int  # number of keys that have arrived now
    synchronised: list[float]  # exp(score − m) of each key, with the m at its arrival
    shrunk: float | None = None  # the factor of the old sums if m has just risen


def softmax_steps(
    partial: type[Any],
    scores: Tensor,
    values: Tensor,
    *,
    pieces: Sequence[int],
    title: str = STEPS_TITLE,
    alt: str = STEPS_ALT,
) -> Embedded:
    """Return a stepper over the summary (m, l, acc) as keys arrive. If m rises, there are two steps: shrink, grow.

    Args:
        partial: the class of the summary, `Partial`, whose methods `empty`, `of` and `merge` do all the work.
        scores: the scores of the keys in the order of arrival, [S]. A masked key has −∞.
        values: the values of the same keys, [S].
        pieces: the numbers of keys that arrive at a time.
    """
    state, seen, numbers = partial.empty(head_size=1, dtype=scores.dtype), 0, scores.tolist()
    frames = [("No key yet: m = −∞, l = 0, acc = 0.", _Moment(state, 0, 0))]
    for size in pieces:
        old, seen = seen, seen + size
        piece = partial.of(scores[old:seen], values[old:seen, None])
        names = f"Key {old}" if size == 1 else f"Keys {old} {'and' if size == 2 else 'to'} {seen - 1}"
        m_old, m = float(state.m), max(float(state.m), float(piece.m))
        if -math.inf < m_old < m:
            state = state.merge(piece._replace(l=0 * piece.l, acc=0 * piece.acc))  # only the m of the piece
            caption = f"{names}: m rises from {m_old:g} to {m:g}. First, the old sums shrink: "
            caption += f"l and acc are multiplied by exp({m_old:g} − {m:g}) = {math.exp(m_old - m):.3f}."
            frames.append((caption, _Moment(state, old, seen, m_old)))
        state = state.merge(piece)
        frames.append((_added(names, _weights(numbers[old:seen], m), m), _Moment(state, old, seen)))
    out = state.output().item()
    frames.append((f"All keys seen. Divide once, at the end: acc / l = {out:.3f}.", _Moment(state, seen, seen)))

    def draw(figure: Figure, moment: _Moment) -> None:
        _draw_online(figure, numbers, values.tolist(), moment)

    shrinks = [i for i, (_, moment) in enumerate(frames) if moment.m_old is not None]
    return stepper(frames, draw, title=title, alt=alt, height=4.8, still=shrinks[0] if shrinks else -1)


def _added(names: str, weights: Sequence[float], m: float) -> str:
    """Return what happens when these keys arrive with these weights, in words. `names` is "Key 4" or "Keys 4 and 5"."""
    one = len(weights) == 1
    if max(weights) == 0.0:
        masked = "is masked, so its weight is 0." if one else "are masked, so their weight is 0."
        return f"{names} {masked} " + ("m stays −∞." if m == -math.inf else "Nothing changes.")
    sums = " + ".join(f"{weight:.3f}" for weight in weights)
    acc = f"{sums} times the value of {names.lower()}" if one else "each of these weights times its key's value"
    return f"{names} {'is' if one else 'are'} added: l grows by {sums}, and acc by {acc}."


def _weights(scores: Sequence[float], m: float) -> list[float]:
    return [math.exp(s - m) if s > -math.inf else 0.0 for s in scores]


def _draw_online(figure: Figure, scores: Sequence[float], values: Sequence[float], moment: _Moment) -> None:
    top, middle, bottom = figure.subplots(3, 1, height_ratios=(1.2, 1.2, 0.45))
    visible = [score for score in scores if score > -math.inf] or [0.0]
    room = 0.25 * (max(visible) - min(visible)) + 0.3
    floor, m = min(visible) - room, float(moment.state.m)
    if m > -math.inf:
        top.axhline(m, color=INK, lw=2)
        top.text(-0.4, m, f"m = {m:g}", va="bottom", fontweight="bold")
    for key, score in enumerate(scores[: moment.seen]):
        fill = BLUE if key < moment.old else ORANGE
        if score == -math.inf:
            top.text(key, floor + 0.05, "−∞", ha="center", va="bottom", color=fill, fontweight="bold")
        else:
            top.plot(key, score, "o", color=fill, ms=8, mec=INK, zorder=3)
    top.set(ylim=(floor, max(visible) + room), ylabel="score")
    top.tick_params(labelbottom=False)
    if moment.seen < len(scores):  # one grey field, because empty bars would look like data
        for ax in (top, middle):
            ax.axvspan(moment.seen - 0.5, len(scores) - 0.5, color=NOT_ARRIVED, zorder=0)
    added = moment.seen
    if moment.m_old is not None:
        added = moment.old
        middle.bar(range(added), _weights(scores[:added], moment.m_old), 0.7, fc="none", ec=INK, ls=":", lw=1.4)
    fills = [BLUE if key < moment.old else ORANGE for key in range(added)]
    middle.bar(range(added), _weights(scores[:added], m), 0.7, color=fills, ec=INK)
    middle.set(ylim=(0, 1.1), ylabel="exp(score − m)", xlabel="key, and below it its value")
    for ax in (top, middle):
        ax.set(xlim=(-0.5, len(scores) - 0.5), xticks=range(len(scores)))
    middle.set_xticklabels([f"{key}\n{value:.3g}" for key, value in enumerate(values)])
    texts = ["m = −∞" if m == -math.inf else f"m = {m:g}", f"l = {float(moment.state.l):.3f}"]
    texts.append(f"acc = {moment.state.acc.item():.3f}")
    if moment.old == len(scores):
        texts.append(f"out = {moment.state.output().item():.3f}")
    for i, text in enumerate(texts):
        box(bottom, i * 6 / len(texts), 0, 5.6 / len(texts), 1, text, fill=SAND)
    diagram(bottom, (-0.05, 5.95), (-0.05, 1.05))
    looks = {"earlier key": BLUE, "new key": ORANGE, "not arrived": NOT_ARRIVED}
    looks["before m rose"] = {"fc": "none", "ls": ":"}
    colour_key(figure, looks, loc="outside lower center", ncols=4, fontsize=9, columnspacing=1.2, handlelength=1.4)


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
    """Return a stepper over three ways of softmax on one row: whole, in synchronised pieces, with a unified maximum φ.

    Args:
        partial: the class of the summary (m, l, acc), `Partial`. The second scheme uses it.
        scores, values: the scores and values of the keys, [S]. Pieces of them arrive one after the other.
        pieces: the sizes of these pieces.
        phi: the number φ that the third scheme subtracts from every score.
        band: two limits. The row's largest score − φ must be strictly between these limits.
    """
    state, seen = partial.empty(head_size=1, dtype=scores.dtype), 0
    frames: list[tuple[str, _Scheme]] = [("No key yet.", _Scheme(state, 0, 0, []))]
    synchronised: list[float] = []  # exp(score − m) with the m at the arrival of each key
    for size in pieces:
        old, seen = seen, seen + size
        before = float(state.m)
        state = state.merge(partial.of(scores[old:seen], values[old:seen, None]))
        m = float(state.m)
        synchronised = synchronised + _weights(scores[old:seen].tolist(), m)
        shrink = f"m rises from {before:g} to {m:g}, so l and acc shrink by {math.exp(before - m):.3f} first"
        said = shrink if -math.inf < before < m else f"m = {m:g}"
        caption = f"Keys {old} to {seen - 1}. Whole row: keeps the scores. Synchronised: {said}. Unified: adds."
        shrunk = math.exp(before - m) if -math.inf < before < m else None
        frames.append((caption, _Scheme(state, old, seen, synchronised, shrunk)))
    low, high = band
    verdict = f"Equal outputs. The largest score (teal) is φ + {m - phi:g}, and the band is {low:g} to {high:g}. "
    inside = low < m - phi < high
    verdict += "The row is inside." if inside else "The row is outside, so the rule recomputes it."
    frames.append((verdict, _Scheme(state, seen, seen, synchronised)))

    def draw(figure: Figure, frame: _Scheme) -> None:
        old, seen = frame.old, frame.seen
        ended, largest = old == len(scores), scores.max().item()
        rows = _rows(frame, scores[:seen].tolist(), values, phi, ended=ended)
        rule = (
            f"{largest:g} − φ = {largest - phi:g}, the band is {low:g} to {high:g}: {'keep' if inside else 'recompute'}"
        )
        notes = "", "", "\n" + rule if ended else ""
        for ax, note, (title, centre, weights, text) in zip(figure.subplots(3, 1), notes, rows, strict=True):
            for key, score in enumerate(scores.tolist()):
                fill = "white" if key >= seen else ORANGE if key >= old else SAND
                fill = TEAL if ended and score == largest else fill
                box(ax, key, 1, 0.92, 0.8, f"{score:g}" if key < seen else "", fill=fill)
                box(ax, key, 0, 0.92, 0.8, f"{weights[key]:.3f}" if key < len(weights) else "")
            for y, name in ((1.4, "score s"), (0.4, f"exp(s − {centre})")):
                ax.text(-0.1, y, name, ha="right", va="center", fontsize=9)
            ax.text(0, -0.25, text + note, ha="left", va="top", fontsize=10)
            ax.set_title(title, fontsize=10)
            diagram(ax, (-0.8, len(scores)), (-0.9, 1.9))

    still = next((i for i, (_, frame) in enumerate(frames) if frame.shrunk is not None), -1)
    return stepper(frames, draw, title=title, alt=alt, height=4.6, still=still)


def _rows(
    frame: _Scheme, seen: list[float], values: Tensor, phi: float, *, ended: bool
) -> list[tuple[str, str, list[float], str]]:
    """Return (name, maximum that is subtracted, exp(score − maximum), known results) of each scheme."""
    m, l, acc = (float(x) for x in frame.state)
    said = "m = −∞" if m == -math.inf else f"m = {m:g}"
    by_phi = _weights(seen, phi)
    l_phi, acc_phi = sum(by_phi), sum(w * v for w, v in zip(by_phi, values.tolist(), strict=False))
    whole = [], f"{said}, {len(seen)} scores kept" if seen else said
    shrunk = "" if frame.shrunk is None else f"   (old × {frame.shrunk:.3f})"
    synchronised = frame.synchronised, f"{said}   l = {l:.3f}   acc = {acc:.2f}{shrunk}"
    unified = by_phi, f"l = {l_phi:.3f}   acc = {acc_phi:.2f}"
    if ended:
        synchronised = frame.synchronised, f"{synchronised[1]}   out = {acc / l:.3f}"
        unified = by_phi, f"{unified[1]}   out = {acc_phi / l_phi:.3f}"
        whole = _weights(seen, m), synchronised[1]  # once the whole row is there
    name = f"in pieces, unified φ = {phi:g}"
    return [("whole row", "m", *whole), ("in pieces, synchronised", "m so far", *synchronised), (name, "φ", *unified)]
