"""Diagrams of a run: boxes, arrows and spans, drawn from recorded shapes and lengths.

A lesson runs its code, records the shapes of its tensors, and passes the record to a function of this module.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from pagewise.figures.drawing import arrow, box, colour_key, diagram, subplots
from pagewise.figures.palette import BLUE, SAND

Boxes = Mapping[str, tuple[float, float, float, str]]  # key → (x of the centre, y of the centre, width, text)
Arrows = Sequence[tuple[str, str, str]]  # (from box, to box, key of the label)

BOX_HEIGHT = 0.5

# A decoder's step: {box: (x and y of its centre, width, text)} and (from, to, tensor).
_DECODER_BOXES = {
    "token ids": (2.4, 7, 1.8, "token ids"),
    "embed": (2.4, 6, 5.2, "embed: hidden state h"),
    "norm": (1.4, 5, 3.8, "RMSNorm"),
    "Wq": (-0.2, 4, 0.9, "$W_q$, RoPE"),
    "Wk": (1.6, 4, 0.9, "$W_k$, RoPE"),
    "Wv": (3.0, 4, 0.9, "$W_v$"),
    "KV cache": (2.6, 3, 2.8, "KV cache"),
    "residual": (4.42, 1.3, 1.15, "h (residual)"),
    "qk": (0.3, 2, 2.2, "$q\\,k^T / \\sqrt{D}$, mask"),
    "softmax": (1.5, 1, 3.0, "softmax, times $V$"),
    "add": (2.4, 0, 5.2, "$h + W_o\\,$out"),
    "rest": (2.4, -1, 5.2, "h + feed-forward(RMSNorm(h)), layers above, RMSNorm, $W_{vocab}$"),
    "logits": (2.4, -2, 4.4, "logits"),
}
_DECODER_ARROWS = [
    ("token ids", "embed", ""),
    ("embed", "norm", ""),
    ("embed", "residual", ""),
    ("norm", "Wq", ""),
    ("norm", "Wk", "x"),
    ("norm", "Wv", ""),
    ("Wq", "qk", "q"),
    ("Wk", "KV cache", "k"),
    ("Wv", "KV cache", "v"),
    ("KV cache", "qk", "K"),
    ("KV cache", "softmax", "V"),
    ("qk", "softmax", "scores"),
    ("softmax", "add", "out"),
    ("residual", "add", ""),
    ("add", "rest", ""),
    ("rest", "logits", ""),
]

# Standard attention: matrices in main memory above, a kernel for each step below, and the bytes that it moves.
_KERNELS = {
    "Q": (0.4, 1.6, 0.7, "Q"),
    "K": (1.4, 1.6, 0.7, "K"),
    "S": (3.1, 1.6, 2.2, "scores"),
    "P": (6.5, 1.6, 2.2, "P"),
    "V": (8.6, 1.6, 0.7, "V"),
    "O": (9.7, 1.6, 0.7, "O"),
    "QK": (1.275, 0, 2.45, "$QK^T/\\sqrt{D}$"),
    "softmax": (4.8, 0, 2.2, "$P = $softmax"),
    "PV": (8.6, 0, 2.9, "$O = PV$"),
}
_MOVES = {
    "QK": ["read Q", "read K", "write S"],
    "softmax": ["read S", "write P"],
    "PV": ["read P", "read V", "write O"],
}
_FUSED = {name: _KERNELS[name] for name in "QKVO"}
_FUSED["fused"] = (5.05, 0, 10.0, "tile of scores, tile of $P$, tile of $O$: on chip, never in main memory")
_FUSED_MOVES = {"fused": ["read Q", "read K", "read V", "write O"]}


def decoder_flow(panels: Mapping[str, Mapping[str, str]], *, title: str, alt: str = "") -> None:
    """Draw one call of a decoder per panel, labelled with the recorded shapes.

    The boxes are "token ids", "KV cache" and "logits". The arrows are "x" (hidden states), "q", "k", "v" (of the new
    tokens), "K", "V" (of all tokens), "scores" and "out". Each panel gives a text for each of them.
    """
    size = (5.4, 5.6 * len(panels))
    flow(panels, _DECODER_BOXES, _DECODER_ARROWS, title=title, filled=["KV cache"], size=size, alt=alt)


def decoder_shapes(prefill: Mapping[str, Sequence[int]], decode: Mapping[str, Sequence[int]]) -> None:
    """Draw one call of a decoder with the shapes of a prefill. A size that decode changes is bold, as in **6 → 1**."""

    def marked(name: str) -> str:
        pairs = zip(prefill[name], decode[name], strict=True)
        return ", ".join(str(a) if a == b else rf"$\mathbf{{{a} \to {b}}}$" for a, b in pairs)

    labels = {name: f"{name} [{marked(name)}]" for name in prefill}
    (before, after), new = (shapes["K"][2] for shapes in (prefill, decode)), decode["q"][2]
    labels["KV cache"] = rf"KV cache: $\mathbf{{{before} \to {after}}}$ tokens"
    alt = "One call of a decoder: embed, norm, q k v, cache, attention, output projection, logits. The token axis goes "
    alt += f"from {before} to {new}, but in K, V and the keys of the scores from {before} to {after}."
    title = "Which sizes change from prefill to decode?"
    decoder_flow({"shapes in prefill → in decode": labels}, title=title, alt=alt)


def three_kernels(moved: Mapping[str, int], *, title: str = "", alt: str = "") -> None:
    """Draw standard attention's eight reads and writes, from `standard_attention_bytes`. More bytes: thicker arrow.

    The default title is the share of scores and P in all bytes.
    """
    large, small = (f"{moved[move] / 1e6:.1f} MB" for move in ("read S", "read Q"))
    share = sum(n for move, n in moved.items() if move[-1] in "SP") / sum(moved.values())
    title = title or f"{share:.0%} of the bytes are scores and P, which nobody asked for"
    alt = alt or (
        "The first kernel reads Q and K and writes scores. Softmax reads scores and writes P. The last one reads P and "
        f"V and writes O. Scores or P are {large}, any other matrix {small}."
    )
    _kernels(_KERNELS, _MOVES, "a kernel per step", moved, max(moved.values()), title=title, alt=alt)


def _kernels(
    boxes: Boxes, moves: Mapping[str, list[str]], below: str, moved: Mapping[str, int], largest: int, **words: str
) -> None:
    arrows = []
    for kernel, of_kernel in moves.items():
        for move in of_kernel:
            start, end = (move[-1], kernel) if move.startswith("read") else (kernel, move[-1])
            arrows.append((start, end, move))
    texts = {move: f"{move[:-2]}\n{n / 1e6:.1f} MB" for move, n in moved.items()}
    panel = {f"above: matrices in main memory; below: {below}": texts}
    weights = {move: 0.8 + 4.0 * n / largest for move, n in moved.items()}
    flow(panel, boxes, arrows, filled=list("QKSPVO"), weights=weights, size=(6.4, 2.9), **words)


def flow(
    labels: Mapping[str, Mapping[str, str]],
    boxes: Boxes,
    arrows: Arrows,
    *,
    title: str,
    filled: Sequence[str] = (),
    weights: Mapping[str, float] | None = None,
    size: tuple[float, float],
    alt: str = "",
) -> None:
    """Draw the same boxes and arrows once per panel, below each other. Each panel has its own labels.

    Args:
        labels: title of the panel → {key of an arrow: its label, or key of a box: another text for the box}.
        boxes: in columns and rows; y grows upwards.
        arrows: from a box to a box above or below. An arrow may have no label in a panel.
        filled: the boxes with a fill colour.
        weights: key of a label → width of its arrow's line, in points. The default is 1.
        size: width and height of the whole figure in inches.
    """
    left, right = min(x - w / 2 for x, _, w, _ in boxes.values()), max(x + w / 2 for x, _, w, _ in boxes.values())
    bottom, top = min(y for _, y, _, _ in boxes.values()), max(y for _, y, _, _ in boxes.values())
    with subplots(len(labels), size=size, title=title, alt=alt, fontsize=12) as (_, axes):
        for ax, (name, texts) in zip(axes, labels.items(), strict=True):
            for start, end, key in arrows:
                _arrow(ax, boxes[start][:3], boxes[end][:3], texts.get(key, ""), (weights or {}).get(key, 1.0))
            for key, (x, y, width, text) in boxes.items():
                fill = SAND if key in filled else "white"
                box(ax, x - width / 2, y - BOX_HEIGHT / 2, width, BOX_HEIGHT, texts.get(key, text), fill=fill)
            ax.set_title(name)
            diagram(ax, (left - 0.1, right + 0.1), (bottom - 0.4, top + 0.4))


def _arrow(
    ax: Axes, start: tuple[float, float, float], end: tuple[float, float, float], label: str, weight: float
) -> None:
    """Draw an arrow: vertical if one box is over the other, else from middle to middle. The label is at its middle."""
    (x0, y0, w0), (x1, y1, w1) = start, end
    low, high = max(x0 - w0 / 2, x1 - w1 / 2), min(x0 + w0 / 2, x1 + w1 / 2)
    if low < high:
        narrower = x0 if w0 <= w1 else x1
        x0 = x1 = narrower if low <= narrower <= high else (low + high) / 2
    half = BOX_HEIGHT / 2 if y1 < y0 else -BOX_HEIGHT / 2
    tail, tip = (x0, y0 - half), (x1, y1 + half)
    arrow(ax, tail, tip, lw=weight, mutation_scale=10 + 2 * weight)
    middle = ((x0 + x1) / 2 + 0.06 * max(1.0, weight / 2), (tail[1] + tip[1]) / 2 + 0.02)
    ax.text(*middle, label, ha="left", va="center", fontsize=8.5, bbox={"fc": "white", "ec": "none", "pad": 0.5})


def cache_timeline(panels: Mapping[str, Sequence[tuple[int, int]]], max_len: int, *, title: str, alt: str = "") -> None:
    """Draw the tokens that each call of a model computes or finds in the cache: a panel per way, a row per call.

    `panels` holds (tokens kept before, tokens known after) of each call. The call computes the difference.
    """
    rows = max(map(len, panels.values()))
    size = (2.6 * len(panels), 0.24 * rows + 1.7)
    with subplots(1, len(panels), size=size, title=title, alt=alt, sharey=True) as (figure, axes):
        for ax, (name, calls) in zip(axes, panels.items(), strict=True):
            for row, (before, after) in enumerate(calls):
                for token in range(max_len):
                    fill = SAND if token < before else BLUE if token < after else "white"
                    box(ax, token, row - 0.5, 1, 1, fill=fill)
            ax.set(xlim=(-0.2, max_len + 0.2), ylim=(rows - 0.4, -0.6), xlabel="token", yticks=range(rows))
            ax.set_title(name, fontweight="normal", fontsize=10)
            ax.set_xticks([i + 0.5 for i in range(0, max_len, 4)], range(0, max_len, 4))
        looks = {"kept": SAND, "computed": BLUE, "not there yet": "white"}
        colour_key(figure, looks, ncols=3, loc="outside lower left")
        axes[0].set_ylabel("call of the model")
