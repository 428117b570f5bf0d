"""The T × S scores cut into tiles: which of them a loop visits under a mask, and which tile of a gradient who owns."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from jaxtyping import Bool
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from pagewise.figures.charts import BLUE, INK, ORANGE, SAND, TEAL, show

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
    figure, axes = plt.subplots(lines, 2, figsize=(4.8, (1.8 * tallest + 0.75) * lines + 0.9), squeeze=False)
    for ax, (name, (visible, visits)) in zip(axes.flat, panels.items(), strict=True):
        T, S = visible.shape
        for i in range(0, T, tile[0]):
            for j in range(0, S, tile[1]):
                rows, cols = (i, min(i + tile[0], T)), (j, min(j + tile[1], S))
                full = bool(visible[slice(*rows), slice(*cols)].all())
                fill = "#ffffff" if (rows, cols) not in visits else BLUE if full else SAND
                _tile(ax, rows, cols, fc=fill, ec=INK, lw=1.0)
        for i, j in (~visible).nonzero().tolist():
            ax.add_patch(Rectangle((j, i), 1, 1, fc="none", **HIDDEN))
        tiles = -(-T // tile[0]) * -(-S // tile[1])
        _frame(ax, T, S, f"{name}: {len(set(visits))} of {tiles}")
    meanings = {"visited, no mask needed": BLUE, "visited and masked": SAND, "skipped": "#ffffff"}
    keys: list[Patch] = [Rectangle((0, 0), 1, 1, fc=fill, ec=INK, label=label) for label, fill in meanings.items()]
    keys.append(Rectangle((0, 0), 1, 1, fc="white", label="may not look", **HIDDEN))
    figure.legend(handles=keys, loc="outside lower center", ncols=2)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


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
    figure, axes = plt.subplots(1, len(programs), figsize=(4.8, 2.9), squeeze=False)
    for ax, (name, (way, read, written)) in zip(axes[0], programs.items(), strict=True):
        i, j = rows // 2, columns // 2
        for row in range(rows):
            for column in range(columns):
                mine = column == j if way == "column" else row == i
                _tile(ax, (row, row + 1), (column, column + 1), fc=BLUE if mine else "#ffffff", ec=INK, lw=0.8)
        down = way == "column"
        start, stop = ((j + 0.5, 0.2), (j + 0.5, rows - 0.2)) if down else ((0.2, i + 0.5), (columns - 0.2, i + 0.5))
        ax.annotate("", stop, start, arrowprops={"arrowstyle": "-|>", "color": "white", "lw": 1.8})
        along, across = ("left", "top") if down else ("top", "left")
        _strip(ax, along, tiles, read, range(rows if down else columns), SAND)
        _strip(ax, across, tiles, written, [j if down else i], ORANGE)
        ax.set(title=name, xlim=(-2.2, columns + 0.2), ylim=(rows + 0.2, -2.0), aspect="equal")
        ax.axis("off")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def _strip(ax: Axes, side: str, tiles: tuple[int, int], names: Sequence[str], filled: Sequence[int], fill: str) -> None:
    """The tiles of tensors along one side of the scores, those of `filled` in colour."""
    count = tiles[0] if side == "left" else tiles[1]
    for n in range(count):
        spans = ((n, n + 1), (-0.9, -0.3)) if side == "left" else ((-0.9, -0.3), (n, n + 1))
        hatch = "////" if fill == ORANGE and n in filled else None
        _tile(ax, *spans, fc=fill if n in filled else "#ffffff", ec=INK, lw=0.8, hatch=hatch)
    place = (-1.05, tiles[0] / 2) if side == "left" else (tiles[1] / 2, -1.05)
    upright = {"ha": "right", "va": "center"} if side == "left" else {"ha": "center", "va": "bottom"}
    ax.text(*place, (",\n" if side == "left" else ", ").join(names), fontsize=9, **upright)


def _tile(ax: Axes, rows: tuple[float, float], cols: tuple[float, float], **style) -> None:
    ax.add_patch(Rectangle((cols[0], rows[0]), cols[1] - cols[0], rows[1] - rows[0], **style))


def _frame(ax: Axes, T: int, S: int, name: str) -> None:
    ax.set(xlim=(-0.2, S + 0.2), ylim=(T + 0.2, -0.2), aspect="equal", xlabel="key", ylabel="query")
    ax.set_title(name, fontweight="normal", fontsize=10)
    ax.set_xticks([0, S])
    ax.set_yticks([0, T])
    ax.grid(visible=False)


def warp_shares(
    splits: Mapping[str, Sequence[tuple[Sequence[int], Sequence[int]]]], *, title: str, alt: str | None = None
) -> None:
    """A panel per way to split a tile between warps: who scores what, and beside it whose sums a row of O consists of.

    Args:
        splits: name → for each warp, the queries and the keys of the tile that it reads.
    """
    figure, axes = plt.subplots(1, len(splits), figsize=(4.8, 3.0), squeeze=False)
    for ax, (name, warps) in zip(axes[0], splits.items(), strict=True):
        Br, Bc = (1 + max(max(read[axis]) for read in warps) for axis in (0, 1))
        for w, (rows, cols) in enumerate(warps):
            spans = (min(rows) / Br, (max(rows) + 1) / Br), (min(cols) / Bc, (max(cols) + 1) / Bc)
            _tile(ax, *spans, fc=WARPS[w % 4], ec=INK, lw=1.0)
            ax.text(sum(spans[1]) / 2, sum(spans[0]) / 2, f"{w}", ha="center", va="center", **_on(WARPS[w % 4]))
        parts = 1
        for row in range(0, Br, Br // len(warps)):
            sharing = [w for w, (rows, _) in enumerate(warps) if row in rows]
            parts = max(parts, len(sharing))
            for n, w in enumerate(sharing):
                cols = (1.15 + 0.3 * n / len(sharing), 1.15 + 0.3 * (n + 1) / len(sharing))
                _tile(ax, (row / Br, row / Br + 1 / len(warps)), cols, fc=WARPS[w % 4], ec=INK, lw=1.0)
        ax.text(0.5, 1.04, f"scores: {Br} queries,\n{Bc} keys", ha="center", va="top", fontsize=9)
        ax.text(1.3, 1.04, "O" if parts == 1 else f"O: sum\nof {parts}", ha="center", va="top", fontsize=9)
        ax.set(title=name, xlim=(-0.05, 1.5), ylim=(1.22, -0.05))
        ax.axis("off")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def _on(fill: str) -> dict[str, str]:
    """How to write on this colour."""
    return {"color": "white" if fill in (BLUE, TEAL) else INK, "fontweight": "bold"}
