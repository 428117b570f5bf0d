"""FlashAttention in one picture: what lies in memory, what fits on the chip, and what crosses between them."""

from matplotlib.axes import Axes

from pagewise.figures.drawing import arrow, box, chart, diagram, rectangle
from pagewise.figures.palette import BLUE, ORANGE, SAND, TEAL
from pagewise.tools.roofline import standard_attention_bytes
from pagewise.tools.sizes import cdiv

PALE = "#ececf2"


def sram_box(tokens: int, head_size: int, rows: int, cols: int) -> None:
    """Draw one head's matrices in memory and the tiles of one program on its SM, for numbers of 16 bits.

    Arrows say how often the matrices cross. The title compares the bytes with those of three kernels.

    Args:
        rows, cols: queries and keys of a tile.
    """
    matrix, turns = 2 * tokens * head_size, cdiv(tokens, rows)  # bytes; K and V are read once in each turn
    moved = 2 * matrix + turns * 2 * matrix
    standard = sum(standard_attention_bytes(1, 1, 1, tokens, tokens, head_size).values())
    scores, tile = 2 * tokens * tokens, 4 * rows * cols  # bytes: 16 bits in memory, float32 in the tile
    title = f"{tokens * tokens:,} scores pass through a tile of {rows * cols:,}:\n"
    title += f"{_size(moved)} cross the border of the SMs, not {_size(standard)}"
    alt = f"{title}. Above, Q, K, V and O in memory, {_size(matrix)} each, and S and P, which are never there. "
    alt += f"Below, an SM with the tiles of {rows} queries and {cols} keys."
    alt += f" Over all programs, Q and O cross once, K and V {turns} times."
    with chart(6.4, 4.9, title, " ".join(alt.split())) as ax:
        rectangle(ax, 0, 3.7, 10, 2.5, PALE)
        ax.text(0.15, 5.95, f"memory (HBM and L2): {_size(matrix)} each", va="center", fontsize=9)
        places = {"Q": 0.9, "K": 2.6, "V": 4.3, "O": 6.0}
        for name, x in places.items():
            _matrix(ax, name, x, BLUE if name in "QO" else ORANGE, turns)
        for i in range(2):
            rectangle(ax, 7.55 + 0.35 * i, 4.15 - 0.2 * i + 0.15, 1.6, 1.4, "white", ls="--")
        ax.text(8.7, 4.8, f"S and P,\n{_size(scores)} each:\nnever here", ha="center", va="center", fontsize=9)
        rectangle(ax, 0, -0.55, 10, 3.3, "white", lw=2)
        ax.text(8.75, 0.6, "one SM:\n192 KB of SRAM,\n256 KB of registers", ha="center", va="center", fontsize=9)
        small = 2 * head_size
        box(ax, 0.3, 1.2, 1.6, 0.85, f"$Q_i$\n{_size(rows * small)}", fill=BLUE)
        box(ax, 2.1, 1.2, 1.6, 0.85, f"$K_j$\n{_size(cols * small)}", fill=ORANGE)
        box(ax, 3.9, 1.2, 1.6, 0.85, f"$V_j$\n{_size(cols * small)}", fill=ORANGE)
        box(ax, 5.7, 1.2, 1.8, 0.85, f"m, l, acc\n{_size(4 * rows * (head_size + 2))}", fill=SAND)
        box(ax, 2.1, -0.3, 3.4, 0.95, f"$S_{{ij}}$, {rows} × {cols} scores\n{_size(tile)}, overwritten", fill=TEAL)
        for x in (1.4, 2.9):
            arrow(ax, (x, 1.2), (3.8 + 0.2 * (x - 2.9), 0.65), color="#6a6a80")
        arrow(ax, (5.5, 0.2), (6.5, 1.2), color="#6a6a80")
        arrow(ax, (5.4, 1.62), (5.78, 1.62), color="#6a6a80")  # V_j meets the weights in acc
        for name, x in places.items():
            inside = {"Q": 1.1, "K": 2.9, "V": 4.7, "O": 6.6}[name]
            ends = (x + 0.45, 4.05), (inside, 2.05)
            arrow(ax, *(reversed(ends) if name == "O" else ends), lw=1.6)
            times = f"{1 if name in 'QO' else turns} × in all"
            plate = {"fc": "white", "ec": "none", "pad": 1}
            ax.text((x + 0.45 + inside) / 2, 3.2, times, ha="center", va="center", fontsize=9, bbox=plate)
        diagram(ax, (-0.1, 10.1), (-0.7, 6.3))


def _matrix(ax: Axes, name: str, x: float, fill: str, turns: int) -> None:
    """Draw a matrix whose second tile of `turns` is on the chip."""
    rectangle(ax, x, 4.05, 0.9, 1.6, "white")
    height = 1.6 / max(turns, 4)
    rectangle(ax, x, 5.65 - 2 * height, 0.9, height, fill)
    ax.text(x - 0.12, 4.85, name, ha="right", va="center", fontsize=11)


def _size(n: float) -> str:
    """Return bytes in words: 16 KB or 2.1 MB."""
    return f"{n / 1e6:.1f} MB" if n >= 1e6 else f"{n / 1024:.0f} KB"
