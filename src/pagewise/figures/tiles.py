"""The T × S scores cut into tiles: which of them a loop visits under a mask, and which tile of a gradient who owns."""

from collections.abc import Mapping, Sequence

from jaxtyping import Bool
from matplotlib.axes import Axes
from torch import Tensor

from pagewise.figures.drawing import arrow, colour_key, diagram, rectangle, subplots
from pagewise.figures.palette import BLUE, ORANGE, SAND, TEAL, readable_on

Tile = tuple[tuple[int, int], tuple[int, int]]  # (first query, one behind the last), the same of keys
WARPS = (SAND, TEAL, ORANGE, BLUE)
HIDDEN = {"ec": "#9a9aae", "hatch": "/////", "lw": 0}


def visited_tiles(
    panels: Mapping[str, tuple[Bool[Tensor, "T S"], Sequence[Tile]]],
    tile: tuple[int, int],
    *,
    title: str,
    alt: str | None = None,
) -> None:
    """A panel per mask: tiles that a loop visits, dark where every query sees every key, and those that it skips.

    Args:
        panels: name → (which query sees which key, the tiles that the loop came to).
        tile: its queries and keys.
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
                    full = bool(visible[slice(*rows), slice(*cols)].all())
                    _tile(ax, rows, cols, "white" if (rows, cols) not in visits else BLUE if full else SAND, lw=1.0)
            for i, j in (~visible).nonzero().tolist():
                rectangle(ax, j, i, 1, 1, "none", **HIDDEN)
            ax.set(xlim=(-0.2, S + 0.2), ylim=(T + 0.2, -0.2), aspect="equal", xlabel="key", ylabel="query")
            ax.set_title(f"{name}: {len(set(visits))} of {tiles}", fontweight="normal", fontsize=10)
            ax.set(xticks=[0, S], yticks=[0, T])
            ax.grid(visible=False)
        looks = {"visited, no mask needed": BLUE, "visited and masked": SAND, "skipped": "white"}
        looks["may not look"] = {"fc": "white", **HIDDEN}
        colour_key(figure, looks, loc="outside lower center", ncols=2)


def gradient_owners(
    programs: Mapping[str, tuple[str, Sequence[str], Sequence[str]]],
    tiles: tuple[int, int] = (4, 6),
    *,
    title: str,
    alt: str | None = None,
) -> None:
    """A panel per kind of program: the tiles of the scores that one of them goes through, and what it alone writes.

    Args:
        programs: name → ("row" or "column", what it reads along its way, what it writes at its end).
        tiles: rows and columns of tiles.
    """
    rows, columns = tiles
    i, j = rows // 2, columns // 2
    with subplots(1, len(programs), size=(4.8, 2.9), title=title, alt=alt) as (_, axes):
        for ax, (name, (way, read, written)) in zip(axes, programs.items(), strict=True):
            down = way == "column"
            for row in range(rows):
                for column in range(columns):
                    mine = column == j if down else row == i
                    _tile(ax, (row, row + 1), (column, column + 1), BLUE if mine else "white")
            if down:
                arrow(ax, (j + 0.5, 0.2), (j + 0.5, rows - 0.2), color="white", lw=1.8, gap=2)
            else:
                arrow(ax, (0.2, i + 0.5), (columns - 0.2, i + 0.5), color="white", lw=1.8, gap=2)
            along, across = ("left", "top") if down else ("top", "left")
            _strip(ax, along, tiles, read, range(rows if down else columns), SAND)
            _strip(ax, across, tiles, written, [j if down else i], ORANGE)
            ax.set(title=name, aspect="equal")
            diagram(ax, (-2.2, columns + 0.2), (rows + 0.2, -2.0))


def _strip(ax: Axes, side: str, tiles: tuple[int, int], names: Sequence[str], filled: Sequence[int], fill: str) -> None:
    """The tiles of tensors along one side of the scores, those of `filled` in colour."""
    count = tiles[0] if side == "left" else tiles[1]
    for n in range(count):
        spans = ((n, n + 1), (-0.9, -0.3)) if side == "left" else ((-0.9, -0.3), (n, n + 1))
        hatch = "////" if fill == ORANGE and n in filled else None
        _tile(ax, *spans, fill if n in filled else "white", hatch=hatch)
    place = (-1.05, tiles[0] / 2) if side == "left" else (tiles[1] / 2, -1.05)
    upright = {"ha": "right", "va": "center"} if side == "left" else {"ha": "center", "va": "bottom"}
    ax.text(*place, (",\n" if side == "left" else ", ").join(names), fontsize=9, **upright)


def _tile(ax: Axes, rows: tuple[float, float], cols: tuple[float, float], fill: str, **style) -> None:
    rectangle(ax, cols[0], rows[0], cols[1] - cols[0], rows[1] - rows[0], fill, **style)


def warp_shares(
    splits: Mapping[str, Sequence[tuple[Sequence[int], Sequence[int]]]], *, title: str, alt: str | None = None
) -> None:
    """A panel per way to split a tile between warps: who scores what, and beside it whose sums a row of O consists of.

    Args:
        splits: name → for each warp, the queries and the keys of the tile that it reads.
    """
    with subplots(1, len(splits), size=(4.8, 3.0), title=title, alt=alt) as (_, axes):
        for ax, (name, warps) in zip(axes, splits.items(), strict=True):
            Br, Bc = (1 + max(max(read[axis]) for read in warps) for axis in (0, 1))
            for w, (rows, cols) in enumerate(warps):
                fill = WARPS[w % 4]
                spans = (min(rows) / Br, (max(rows) + 1) / Br), (min(cols) / Bc, (max(cols) + 1) / Bc)
                _tile(ax, *spans, fill, lw=1.0)
                look = {"ha": "center", "va": "center", "color": readable_on(fill), "fontweight": "bold"}
                ax.text(sum(spans[1]) / 2, sum(spans[0]) / 2, f"{w}", **look)
            parts = 1
            for row in range(0, Br, Br // len(warps)):
                sharing = [w for w, (rows, _) in enumerate(warps) if row in rows]
                parts = max(parts, len(sharing))
                for n, w in enumerate(sharing):
                    cols = (1.15 + 0.3 * n / len(sharing), 1.15 + 0.3 * (n + 1) / len(sharing))
                    _tile(ax, (row / Br, row / Br + 1 / len(warps)), cols, WARPS[w % 4], lw=1.0)
            ax.text(0.5, 1.04, f"scores: {Br} queries,\n{Bc} keys", ha="center", va="top", fontsize=9)
            ax.text(1.3, 1.04, "O" if parts == 1 else f"O: sum\nof {parts}", ha="center", va="top", fontsize=9)
            ax.set_title(name)
            diagram(ax, (-0.05, 1.5), (1.22, -0.05))
