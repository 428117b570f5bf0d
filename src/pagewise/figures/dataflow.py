"""Diagrams of what really ran: boxes, arrows and spans, drawn from recorded shapes and lengths.

A lesson runs its code, records what passed by, and hands the record to a function here; nothing is laid out twice.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pagewise.figures.charts import BLUE, INK, SAND, box, show

BOX_HEIGHT = 0.5

# A decoder's step: {box: (x and y of its centre, width, text)} and (from, to, what travels).
_DECODER_BOXES = {
    "token ids": (1.6, 6, 1.6, "token ids"),
    "embed": (1.6, 5, 3.4, "embed, RMSNorm"),
    "Wq": (0.3, 4, 0.9, "$W_q$, RoPE"),
    "Wk": (1.6, 4, 0.9, "$W_k$, RoPE"),
    "Wv": (3.0, 4, 0.9, "$W_v$"),
    "KV cache": (2.5, 3, 2.6, "KV cache"),
    "qk": (0.3, 2, 2.2, "$q\\,k^T / \\sqrt{D}$, mask"),
    "softmax": (1.5, 1, 3.0, "softmax, times $V$"),
    "rest": (1.6, 0, 3.4, "$W_o$, feed-forward, layers above, $W_{vocab}$"),
    "logits": (1.6, -1, 1.6, "logits"),
}
_DECODER_ARROWS = [
    ("token ids", "embed", ""), ("embed", "Wq", ""), ("embed", "Wk", "x"), ("embed", "Wv", ""),
    ("Wq", "qk", "q"), ("Wk", "KV cache", "k"), ("Wv", "KV cache", "v"), ("KV cache", "qk", "K"),
    ("KV cache", "softmax", "V"), ("qk", "softmax", "scores"), ("softmax", "rest", "out"), ("rest", "logits", ""),
]  # fmt: skip


def decoder_flow(panels: Mapping[str, Mapping[str, str]], *, title: str, alt: str | None = None) -> None:
    """One call of a decoder per panel, labelled with what was recorded of it.

    Texts for the boxes "token ids", "KV cache" and "logits", and for the arrows "x" (hidden states), "q", "k", "v" (of
    the new tokens), "K", "V" (of all tokens), "scores" and "out".
    """
    flow(panels, _DECODER_BOXES, _DECODER_ARROWS, title=title, filled=["KV cache"], size=(9.6, 6.4), alt=alt)


def flow(
    panels: Mapping[str, Mapping[str, str]],
    boxes: Mapping[str, tuple[float, float, float, str]],
    arrows: Sequence[tuple[str, str, str]],
    *,
    title: str,
    filled: Sequence[str] = (),
    weights: Mapping[str, float] | None = None,
    size: tuple[float, float],
    alt: str | None = None,
) -> None:
    """The same boxes and arrows once per panel, side by side, each panel with its own labels.

    Args:
        panels: title of the panel → {key of an arrow: what travels along it; key of a box: another text for it}.
        boxes: key → (x of the centre, y of the centre, width, text), in columns and rows; y grows upwards.
        arrows: (from box, to box above or below it, key of the label). Without a label in the panel it is drawn bare.
        filled: the boxes to set off by colour.
        weights: key of a label → width of its arrow's line, in points; 1 if not given.
        size: width and height of the whole figure in inches.
    """
    left, right = min(x - w / 2 for x, _, w, _ in boxes.values()), max(x + w / 2 for x, _, w, _ in boxes.values())
    bottom, top = min(y for _, y, _, _ in boxes.values()), max(y for _, y, _, _ in boxes.values())
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for ax, (name, labels) in zip(axes[0], panels.items(), strict=True):
        for start, end, key in arrows:
            _arrow(ax, boxes[start][:3], boxes[end][:3], labels.get(key, ""), (weights or {}).get(key, 1.0))
        for key, (x, y, width, text) in boxes.items():
            fill = SAND if key in filled else "#ffffff"
            box(ax, x - width / 2, y - BOX_HEIGHT / 2, width, BOX_HEIGHT, labels.get(key, text), fill=fill)
        ax.set(title=name, xlim=(left - 0.1, right + 0.1), ylim=(bottom - 0.4, top + 0.4))
        ax.axis("off")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    show(alt)


def _arrow(
    ax: Axes, start: tuple[float, float, float], end: tuple[float, float, float], label: str, weight: float
) -> None:
    """Straight where one box stands over the other, else from middle to middle; the label beside its middle."""
    (x0, y0, w0), (x1, y1, w1) = start, end
    low, high = max(x0 - w0 / 2, x1 - w1 / 2), min(x0 + w0 / 2, x1 + w1 / 2)
    if low < high:
        narrower = x0 if w0 <= w1 else x1
        x0 = x1 = narrower if low <= narrower <= high else (low + high) / 2
    half = BOX_HEIGHT / 2 if y1 < y0 else -BOX_HEIGHT / 2
    tail, tip = (x0, y0 - half), (x1, y1 + half)
    style = {"arrowstyle": "-|>", "color": INK, "lw": weight, "mutation_scale": 10 + 2 * weight}
    ax.annotate("", tip, tail, arrowprops=style | {"shrinkA": 0, "shrinkB": 0})
    middle = ((x0 + x1) / 2 + 0.06 * max(1.0, weight / 2), (tail[1] + tip[1]) / 2 + 0.02)
    ax.text(*middle, label, ha="left", va="center", fontsize=8.5, bbox={"fc": "white", "ec": "none", "pad": 0.5})


def cache_timeline(
    lengths: Sequence[tuple[int, int]],
    max_len: int,
    *,
    title: str,
    ylabel: str = "call of append",
    alt: str | None = None,
) -> None:
    """One row per append: slots that held something before, slots written now, slots reserved and still empty.

    `lengths` holds (length before, length after) of each call.
    """
    figure, ax = plt.subplots(figsize=(7.0, 0.28 * len(lengths) + 1.5))
    for row, (before, after) in enumerate(lengths):
        for start, stop, fill in ((0, before, SAND), (before, after, BLUE), (after, max_len, "#ffffff")):
            for slot in range(start, stop):
                box(ax, slot, row - 0.5, 1, 1, fill=fill)
    kinds = {"kept": SAND, "written": BLUE, "reserved, empty": "#ffffff"}
    handles = [Patch(fc=colour, ec=INK, label=name) for name, colour in kinds.items()]
    figure.legend(handles=handles, ncols=3, loc="outside lower left")
    ax.set_xlim(-0.2, max_len + 0.2)
    ax.set_ylim(len(lengths) - 0.4, -0.6)
    ax.set_xticks([i + 0.5 for i in range(0, max_len, 4)], [str(i) for i in range(0, max_len, 4)])
    ax.set_yticks(range(len(lengths)), [str(i + 1) for i in range(len(lengths))])
    ax.grid(visible=False)
    ax.set_title(title)
    ax.set_xlabel("slot of the cache (tokens)")
    ax.set_ylabel(ylabel)
    show(alt)
