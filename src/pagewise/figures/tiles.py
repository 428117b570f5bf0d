"""The T × S scores, cut into tiles: the tiles that a loop visits under a mask, and the owners of a gradient's tiles."""

from collections.abc import Mapping, Sequence

from jaxtyping import Bool
from torch import Tensor

from pagewise.figures.drawing import arrow, colour_key, diagram, rectangle, subplots
from pagewise.figures.palette import BLUE, ORANGE, SAND, TEAL

Tile = tuple[tuple[int, int], tuple[int, int]]  # (first query, last query + 1), and the same for keys
HIDDEN = {"ec": "#9a9aae", "hatch": "/////", "lw": 0}
READ, WRITTEN, ADDED = {"fill": SAND}, {"fill": ORANGE, "hatch": "////"}, {"fill": TEAL, "hatch": "++"}


def visited_tiles(
    panels: Mapping[str, tuple[Bool[Tensor, "T S"], Sequence[Tile]]],
    tile: tuple[int, int],
    *,
    title: str,
    alt: str = "",
) -> None:
    """Draw a panel per mask: the tiles that a loop visits, and the tiles that it skips.

    A visited tile is dark if every query sees every key, and orange if none sees any: it was visited for nothing.

    Args:
        panels: name → (mask of the keys that each query sees, visited tiles).
        tile: the number of queries and of keys in a tile.
    """
    tallest = max(visible.shape[0] / visible.shape[1] for visible, _ in panels.values())
    lines = len(panels) // 2
    size = (4.8, (1.8 * tallest + 0.75) * lines + 0.9)
    with subplots(lines, 2, size=size, title=title, alt=alt) as (figure, axes):
        for ax, (name, (visible, visits)) in zip(axes, panels.items(), strict=True):
            T, S = visible.shape
            tiles = -(-T // tile[0]) * -(-S // tile[1])
            for i in range(0, T, tile[0]):
                for j in range(0, S, tile[1]):
                    rows, cols = (i, min(i + tile[0], T)), (j, min(j + tile[1], S))
                    seen = visible[slice(*rows), slice(*cols)]
                    fill = BLUE if seen.all() else SAND if seen.any() else ORANGE
                    fill = fill if (rows, cols) in visits else "white"
                    rectangle(ax, j, i, cols[1] - j, rows[1] - i, fill, lw=1.0)
            for i, j in (~visible).nonzero().tolist():
                rectangle(ax, j, i, 1, 1, "none", **HIDDEN)
            ax.set(xlim=(-0.2, S + 0.2), ylim=(T + 0.2, -0.2), aspect="equal", xlabel="key", ylabel="query")
            ax.set_title(f"{name}: {len(set(visits))} of {tiles}", fontweight="normal", fontsize=10)
            ax.set(xticks=[0, S], yticks=[0, T])
        looks = {"visited, nothing hidden": BLUE, "visited, keys hidden": SAND, "visited, all hidden": ORANGE}
        looks["skipped"] = "white"
        looks["hidden by the mask"] = {"fc": "white", **HIDDEN}
        colour_key(figure, looks, loc="outside lower center", ncols=2)


DOWN = ["Q", "dO", "L", "$D_i$"], ["dK", "dV"]
OWNERS = {
    "columns add to dQ:\nfive products": ("column", *DOWN, ["dQ"]),
    "or columns, dK and dV:\nfour products": ("column", *DOWN, []),
    "and rows, dQ:\nthree products": ("row", ["K", "V"], ["dQ"], []),
}


def gradient_owners(
    programs: Mapping[str, tuple[str, Sequence[str], Sequence[str], Sequence[str]]] = OWNERS,
    tiles: tuple[int, int] = (4, 6),
    *,
    title: str,
    alt: str = "Left: down a column, dK and dV above it, five products per tile, and dQ at the right is added to. "
    "Or one owner for each sum: down a column, four products, and along a row, dQ at its left, three.",
) -> None:
    """Draw a panel per kind of program: the tiles of the scores on its way, and the results that it writes or adds to.

    Args:
        programs: name → ("row" or "column", tensors that it reads along its way, tensors that it writes at its end,
            tensors that it adds to in every tile of a column). By default, the ways of a backward pass.
        tiles: the number of rows and of columns of tiles.
    """
    rows, columns = tiles
    i, j = rows // 2, columns // 2
    with subplots(1, len(programs), size=(2.4 * len(programs), 3.2), title=title, alt=alt) as (figure, axes):
        for ax, (name, (way, read, written, added)) in zip(axes, programs.items(), strict=True):
            down = way == "column"
            for row in range(rows):
                for column in range(columns):
                    rectangle(ax, column, row, 1, 1, BLUE if (column == j if down else row == i) else "white")
            tail, tip = ((j + 0.5, 0.2), (j + 0.5, rows - 0.2)) if down else ((0.2, i + 0.5), (columns - 0.2, i + 0.5))
            arrow(ax, tail, tip, color="white", lw=1.8, gap=2)
            for row in range(rows):
                look = READ if down else WRITTEN if row == i else {}
                rectangle(ax, -0.9, row, 0.6, 1, **look)
            for row in range(rows if added else 0):
                rectangle(ax, columns + 0.3, row, 0.6, 1, **ADDED)
            ax.text(columns + 1.0, rows / 2, ", ".join(added), ha="left", va="center", fontsize=9)
            for column in range(columns):
                look = READ if not down else WRITTEN if column == j else {}
                rectangle(ax, column, -0.9, 1, 0.6, **look)
            left, top = (read, written) if down else (written, read)
            ax.text(-1.05, rows / 2, ",\n".join(left), ha="right", va="center", fontsize=9)
            ax.text(columns / 2, -1.05, ", ".join(top), ha="center", va="bottom", fontsize=9)
            ax.set(title=name, aspect="equal")
            diagram(ax, (-2.2, columns + 1.8), (rows + 0.2, -2.0))
        looks = {"tiles of its scores": BLUE, "reads in its loop": SAND, "writes once": {"fc": ORANGE, "hatch": "////"}}
        looks["adds in each tile"] = {"fc": TEAL, "hatch": "++"}
        colour_key(figure, looks, loc="outside lower center", ncols=4)
