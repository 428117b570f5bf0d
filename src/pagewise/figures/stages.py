"""The levels of a CUDA launch: grid, thread block, warp."""

from collections.abc import Sequence

from pagewise.figures.drawing import box, chart, diagram
from pagewise.figures.palette import INK, ORANGE


def nested_levels(levels: Sequence[tuple[str, int, int]], *, title: str, alt: str = "") -> None:
    """Draw levels that contain each other. Every strip is the enlarged marked cell of the strip above.

    `levels` are (name of the cells, their number, the marked cell), from the outermost to the innermost.
    """
    with chart(6.4, 0.8 * len(levels) + 0.5, title, alt) as ax:
        for depth, (name, cells, marked) in enumerate(levels):
            y = -1.6 * depth
            plate = {"fc": "white", "ec": "none", "pad": 1}  # the dotted lines pass behind the name
            ax.text(0, 0.78 + y, name, va="bottom", fontsize=9.5, bbox=plate, zorder=3)
            for cell in range(cells):
                label = str(cell) if cells <= 16 or cell == marked else ""
                box(ax, 10 * cell / cells, y, 10 / cells, 0.7, label, fill=ORANGE if cell == marked else "white")
            if depth + 1 < len(levels):
                for corner, end in ((marked, 0.0), (marked + 1, 10.0)):
                    ax.plot([10 * corner / cells, end], [y, y - 0.9], color=INK, lw=0.7, ls=":")
        diagram(ax, (-0.05, 10.05), (-1.6 * len(levels) + 1.5, 1.4))
