"""Attention itself in pictures: matrices that are multiplied, heads that share, what three kernels move.

Everything is drawn from the matrices, the heads and the bytes that a lesson computed.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from torch import Tensor

from pagewise.figures.charts import heatmap
from pagewise.figures.dataflow import Arrows, Boxes, flow
from pagewise.figures.drawing import bare, box, diagram, subplots
from pagewise.figures.palette import BLUE, INK, ORANGE, SAND, TEAL

GAP = 1.0  # between two matrices of an equation, in cells; more for a longer sign

# Standard attention: main memory above, a kernel for each step below. {box: (x and y of its centre, width, text)}
_KERNELS = {
    "Q": (0.4, 1.6, 0.7, "Q"),
    "K": (1.4, 1.6, 0.7, "K"),
    "S": (3.1, 1.6, 2.2, "S"),
    "P": (6.5, 1.6, 2.2, "P"),
    "V": (8.6, 1.6, 0.7, "V"),
    "O": (9.7, 1.6, 0.7, "O"),
    "QK": (1.275, 0, 2.45, "$S = QK^T/\\sqrt{D}$"),
    "softmax": (4.8, 0, 2.2, "$P = $softmax$(S)$"),
    "PV": (8.6, 0, 2.9, "$O = PV$"),
}
_MOVES = [
    ("Q", "QK", "read Q"),
    ("K", "QK", "read K"),
    ("QK", "S", "write S"),
    ("S", "softmax", "read S"),
    ("softmax", "P", "write P"),
    ("P", "PV", "read P"),
    ("V", "PV", "read V"),
    ("PV", "O", "write O"),
]

_FUSED = {name: _KERNELS[name] for name in "QKVO"} | {
    "fused": (5.05, 0, 10.0, "tile of $S$, tile of $P$, tile of $O$: on chip, never in main memory"),
}
_FUSED_MOVES = [("Q", "fused", "read Q"), ("K", "fused", "read K"), ("V", "fused", "read V"), ("fused", "O", "write O")]


def equations(
    rows: Sequence[Sequence[str | tuple[str, Tensor]]], *, title: str, names: Sequence[str] = (), alt: str | None = None
) -> None:
    """Equations of matrices, all drawn to one scale: ("Q", Q) is a matrix, a plain string a sign between two.

    Each matrix carries its name and shape above and its numbers inside; `names` are those of the rows.
    """
    widths = [sum(_gap(part) if isinstance(part, str) else part[1].shape[1] for part in row) for row in rows]
    heights = [max(part[1].shape[0] for part in row if not isinstance(part, str)) for row in rows]
    size = (6.4, 0.31 * sum(heights) + 0.75 * len(rows))
    with subplots(len(rows), size=size, title=title, alt=alt, fontsize=12, height_ratios=heights) as (_, axes):
        for ax, row, height in zip(axes, rows, heights, strict=True):
            x = 0.0
            for part in row:
                if isinstance(part, str):
                    ax.text(x + _gap(part) / 2 - 0.5, height / 2 - 0.5, part, ha="center", va="center", fontsize=11)
                    x += _gap(part)
                else:
                    _matrix(ax, x, *part)
                    x += part[1].shape[1]
            ax.set(xlim=(-0.6, max(widths) - 0.4), ylim=(height - 0.4, -1.7), xticks=[])
            ax.set_yticks(range(len(names)), names)
            bare(ax)


def _matrix(ax: Axes, x: float, label: str, matrix: Tensor) -> None:
    """Draw a matrix whose first column is centred at x."""
    T, width = matrix.shape
    before = len(ax.texts)
    image = heatmap(ax, matrix.detach().cpu().numpy(), "", annotate="g" if (matrix % 1 == 0).all() else ".2f")
    image.set_extent((x - 0.5, x + width - 0.5, T - 0.5, -0.5))
    for number in ax.texts[before:]:
        number.set(x=x + number.get_position()[0], fontsize=7.5)
    ax.text(x + width / 2 - 0.5, -0.7, f"{label}  [{T}, {width}]", ha="center", va="bottom", fontsize=9)


def _gap(sign: str) -> float:
    return GAP + 0.3 * len(sign)


def head_maps(maps: Mapping[str, Sequence[int]], *, title: str, alt: str | None = None) -> None:
    """One panel per way of sharing: `maps` gives, for each query head, the KV head that it reads."""
    heads = max(map(len, maps.values()))
    with subplots(1, len(maps), size=(6.4, 2.1), title=title, alt=alt, fontsize=12) as (_, axes):
        for ax, (name, reads) in zip(axes, maps.items(), strict=True):
            kv_heads = max(reads) + 1
            for h, kv_head in enumerate(reads):
                ax.plot([h, _middle(kv_head, kv_heads, heads)], [0.75, 0.25], color=INK, lw=1)
                _head(ax, h, 0.75, f"q{h}", kv_head)
            for kv_head in range(kv_heads):
                _head(ax, _middle(kv_head, kv_heads, heads), 0.0, f"kv{kv_head}", kv_head)
            ax.set_title(name)
            diagram(ax, (-0.5, heads - 0.5), (-0.05, 1.1))


def _middle(kv_head: int, kv_heads: int, heads: int) -> float:
    """Below the middle of the query heads that read it."""
    return (kv_head + 0.5) * heads / kv_heads - 0.5


def _head(ax: Axes, x: float, y: float, text: str, kv_head: int) -> None:
    box(ax, x - 0.4, y, 0.8, 0.25, text, fill=(BLUE, SAND, TEAL, ORANGE)[kv_head % 4])


def three_kernels(moved: Mapping[str, int], *, title: str, alt: str | None = None) -> None:
    """Standard attention's eight reads and writes, from `standard_attention_bytes`: the more bytes, the thicker."""
    _kernels(_KERNELS, _MOVES, "a kernel per step", moved, max(moved.values()), title, alt)


def one_kernel(moved: Mapping[str, int], largest: int, *, title: str, alt: str | None = None) -> None:
    """The same three steps fused: what is left of the eight moves, drawn to the scale on which `largest` bytes are."""
    _kernels(_FUSED, _FUSED_MOVES, "one kernel", moved, largest, title, alt)


def _kernels(
    boxes: Boxes, moves: Arrows, below: str, moved: Mapping[str, int], largest: int, title: str, alt: str | None
) -> None:
    texts = {move: f"{move[:-2]}\n{n / 1e6:.1f} MB" for move, n in moved.items()}
    panel = {f"above: matrices in main memory; below: {below}": texts}
    weights = {move: 0.8 + 4.0 * n / largest for move, n in moved.items()}
    flow(panel, boxes, moves, title=title, filled=list("QKSPVO"), weights=weights, size=(6.4, 2.9), alt=alt)
