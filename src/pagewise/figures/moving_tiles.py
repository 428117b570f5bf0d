"""FlashAttention's loops at work, tile by tile, drawn from the trace of a run: what is read, written and kept."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pagewise.figures.drawing import rectangle
from pagewise.figures.embed import Embedded
from pagewise.figures.palette import BLUE, ORANGE, SAND
from pagewise.figures.steps import WIDTH, stepper

DONE, IDLE = SAND, "#ffffff"
GAP, STRIP = 0.6, 1.2  # between the scores and the strips of Q, K, V, O; how wide a strip is
ABOVE, BESIDE, BELOW = 5.4, 6.9, 7.2  # room for strips, names and counts around the scores of a panel


class Move(NamedTuple):
    """A tile that a loop takes from main memory or puts there."""

    access: str  # "read" or "write"
    tensor: str  # its name in the paper: Q, K, V, O, m, l, L
    start: int  # its first row, and the one behind its last
    stop: int
    numbers: int


class Visit(NamedTuple):
    """One tile of the scores: the moves that go with it, and the rows of Q and K that meet."""

    moves: list[Move]
    rows: tuple[int, int]
    cols: tuple[int, int]


class _Moment(NamedTuple):
    visits: list[Visit]  # the last of them is happening now
    edges: dict[str, list[tuple[int, int]]]  # tensor → its tiles
    read: int
    written: int
    most: int  # numbers that any of the loops moves in all: the length of a full bar


def tile_moves(trace: Iterable[tuple[str, Tensor]], **tensors: Tensor) -> list[Move]:
    """A trace (`tools.work.trace_moves`) in the names of the paper, as in Q=q; what has no name is left out.

    `tensors` are [B, H, N, D] or [B, H, N], a name for each.
    """
    moves = []
    for access, part in trace:
        for name, whole in tensors.items():
            first, row = part.data_ptr() - whole.data_ptr(), whole.stride(2) * whole.element_size()
            if 0 <= first < whole.shape[2] * row:
                moves.append(Move(access, name, first // row, first // row + part.shape[2], part.numel()))
    return moves


def visits(moves: Iterable[Move]) -> list[Visit]:
    """The tiles of the scores in the order in which the loops come to them.

    The tensor, of Q and K, that is read more often belongs to the inner loop: each of its reads is a visit. What is
    read from the outer tensor on until then belongs to that visit too, as does what follows it.
    """
    moves = list(moves)
    reads = [move.tensor for move in moves if move.access == "read"]
    outer = "K" if reads.count("Q") > reads.count("K") else "Q"
    found: list[Visit] = []
    held: dict[str, tuple[int, int]] = {}
    waiting: list[Move] | None = None
    for move in moves:
        if move.access == "read" and move.tensor in ("Q", "K"):
            held[move.tensor] = move.start, move.stop
            if move.tensor == outer:
                waiting = [move]
            else:
                found.append(Visit([*(waiting or ()), move], held["Q"], held["K"]))
                waiting = None
        elif waiting is not None:
            waiting.append(move)
        elif found:
            found[-1].moves.append(move)
    return found


def loop_steps(loops: Mapping[str, Sequence[Move]], *, title: str, alt: str) -> Embedded:
    """Loops over the same tiles, side by side: step i is the i-th tile of the scores that each of them visits.

    Args:
        loops: name of a loop → its moves, in the order of time.
    """
    of_loop = {name: visits(moves) for name, moves in loops.items()}
    most = max(sum(move.numbers for move in moves) for moves in loops.values())
    moments = {name: _moments(found, most) for name, found in of_loop.items()}
    steps = max(map(len, of_loop.values()))
    frames = []
    for i in range(steps):
        at = {name: of_time[min(i, len(of_time) - 1)] for name, of_time in moments.items()}
        said = " ".join(_said(name, of_loop[name], i) for name in of_loop)
        frames.append((f"Turn {i}. {said}", at))
    done = ", ".join(f"{name} {at[-1].read + at[-1].written:,}" for name, at in moments.items())
    frames.append((f"Done. Numbers read and written: {done}.", {name: at[-1] for name, at in moments.items()}))
    T, S = _size(frames[0][1])
    height = WIDTH * (T + ABOVE + BELOW) / (len(loops) * (S + BESIDE))
    return stepper(frames, _draw, title=title, alt=alt, height=height, still=steps // 2)


def _moments(found: Sequence[Visit], most: int) -> list[_Moment]:
    edges: dict[str, list[tuple[int, int]]] = {}
    for move in (move for visit in found for move in visit.moves):
        tiles = edges.setdefault(move.tensor, [])
        if (move.start, move.stop) not in tiles:
            tiles.append((move.start, move.stop))
    read = list(accumulate(_numbers(visit, "read") for visit in found))
    written = list(accumulate(_numbers(visit, "write") for visit in found))
    return [_Moment(list(found[: i + 1]), edges, read[i], written[i], most) for i in range(len(found))]


def _numbers(visit: Visit, access: str) -> int:
    return sum(move.numbers for move in visit.moves if move.access == access)


def _said(name: str, found: Sequence[Visit], i: int) -> str:
    if i >= len(found):
        return f"{name} is done."
    moved = {
        access: ", ".join(dict.fromkeys(move.tensor for move in found[i].moves if move.access == access))
        for access in ("read", "write")
    }
    done = " and ".join(f"{access}s {tensors}" for access, tensors in moved.items() if tensors)
    return f"{name}, queries {_span(found[i].rows)}, keys {_span(found[i].cols)}: {done}."


def _span(tile: tuple[int, int]) -> str:
    return f"{tile[0]}–{tile[1] - 1}"


def _draw(figure: Figure, moments: Mapping[str, _Moment]) -> None:
    """All panels on one pair of axes, whose unit is a row of Q or K: thousands of rectangles want few axes."""
    T, S = _size(moments)
    figure.set_layout_engine("none")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, len(moments) * (S + BESIDE)), ylim=(T + BELOW, -ABOVE))
    ax.axis("off")
    for panel, (name, moment) in enumerate(moments.items()):
        left = panel * (S + BESIDE) + STRIP + GAP + 0.3
        ax.text(left - GAP - STRIP, -2 * STRIP - 2.2 * GAP, name, va="bottom", fontsize=10, fontweight="bold")
        _draw_tiles(ax, moment, left, T, S)
        for row, (kind, count, fill) in enumerate((("read", moment.read, BLUE), ("written", moment.written, ORANGE))):
            y = T + 3.0 + 2.6 * row
            ax.text(left - GAP - STRIP, y, f"{count:,} numbers {kind}", va="bottom", fontsize=9)
            rectangle(ax, left - GAP - STRIP, y, (S + BESIDE - 1) * count / moment.most, 0.8, fill)


def _size(moments: Mapping[str, _Moment]) -> tuple[int, int]:
    """How many queries and keys there are."""
    edges = [moment.edges for moment in moments.values()]
    T, S = (max(stop for of in edges for _, stop in of[name]) for name in ("Q", "K"))
    return T, S


def _draw_tiles(ax: Axes, moment: _Moment, left: float, T: int, S: int) -> None:
    now = moment.visits[-1]
    seen = {(visit.rows, visit.cols) for visit in moment.visits}
    for rows in moment.edges["Q"]:
        for cols in moment.edges["K"]:
            fill = BLUE if (now.rows, now.cols) == (rows, cols) else DONE if (rows, cols) in seen else IDLE
            rectangle(ax, left + cols[0], rows[0], cols[1] - cols[0], rows[1] - rows[0], fill)
    ax.text(left + S / 2, T + 0.3, "scores", ha="center", va="top", fontsize=9)
    columns = {"Q": -GAP - STRIP, "O": S + GAP}
    if statistics := " ".join(name for name in ("l", "m", "L") if name in moment.edges):
        columns[statistics] = S + 2.5 * GAP + STRIP
    for label, x in columns.items():
        width = STRIP if label in "QO" else STRIP / 2
        for tile in moment.edges[label[0]]:
            rectangle(ax, left + x, tile[0], width, tile[1] - tile[0], **_look(now, label[0], tile))
        ax.text(left + x + width / 2, T + 0.3, label, ha="center", va="top", fontsize=9)
    for row, name in enumerate("KV"):
        y = -GAP - STRIP - row * (STRIP + GAP / 2)
        for tile in moment.edges[name]:
            rectangle(ax, left + tile[0], y, tile[1] - tile[0], STRIP, **_look(now, name, tile))
        ax.text(left - 0.3, y + STRIP / 2, name, ha="right", va="center", fontsize=9)


def _look(now: Visit, name: str, tile: tuple[int, int]) -> dict[str, str]:
    """A tile of Q, K, V, O or a statistic: hatched as it is written, dark while it is read or held on chip."""
    if any((move.access, move.tensor, move.start) == ("write", name, tile[0]) for move in now.moves):
        return {"fill": ORANGE, "hatch": "////"}
    held = {"Q": now.rows, "K": now.cols, "V": now.cols}.get(name)
    read = any((move.tensor, move.start) == (name, tile[0]) for move in now.moves)
    return {"fill": BLUE if read or held == tile else IDLE}
