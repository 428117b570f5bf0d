"""FlashAttention's loops, tile by tile, drawn from the trace of a run: reads, writes, and the tiles kept on chip."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pagewise.figures.drawing import diagram, rectangle
from pagewise.figures.palette import BLUE, ORANGE, SAND
from pagewise.figures.steps import WIDTH, Embedded, stepper

DONE, IDLE, KEPT = SAND, "#ffffff", "#9db4d8"  # visited, not touched, on chip since an earlier step
GAP, STRIP = 0.6, 1.2  # the gap between the scores and the strips of Q, K, V, O; the width of a strip
ABOVE, BESIDE, BELOW = 5.4, 6.9, 7.2  # space around the scores of a panel for strips, names and counts


class Move(NamedTuple):
    """A tile that a loop reads from main memory or writes to it."""

    access: str  # "read" or "write"
    tensor: str  # its name in the paper: Q, K, V, O, m, l, L
    start: int  # its first row; `stop` is the row after its last
    stop: int
    numbers: int


class Visit(NamedTuple):
    """One tile of the scores: its moves, and its rows of Q and K."""

    moves: list[Move]
    rows: tuple[int, int]
    cols: tuple[int, int]


def tile_moves(trace: Iterable[tuple[str, Tensor]], **tensors: Tensor) -> list[Move]:
    """Return the moves of a trace (`tools.work.trace_moves`), with names as in Q=q. Unnamed tensors are left out.

    `tensors` are [B, H, N, D] or [B, H, N].
    """
    moves = []
    for access, part in trace:
        for name, whole in tensors.items():
            first, row = part.data_ptr() - whole.data_ptr(), whole.stride(2) * whole.element_size()
            if 0 <= first < whole.shape[2] * row:
                moves.append(Move(access, name, first // row, first // row + part.shape[2], part.numel()))
    return moves


def visits(moves: Iterable[Move]) -> list[Visit]:
    """Return the tiles of the scores in the order in which the loops visit them.

    The inner loop reads one of Q and K, and reads it more often: each of these reads is a visit. The moves from a read
    of the outer loop's tensor on belong to the next visit. All other moves belong to the visit before them.
    """
    moves = list(moves)
    reads = [move.tensor for move in moves if move.access == "read"]
    outer, inner = ("K", "Q") if reads.count("Q") > reads.count("K") else ("Q", "K")
    found: list[Visit] = []
    held: dict[str, tuple[int, int]] = {}
    waiting: list[Move] = []
    for move in moves:
        tensor = move.tensor if move.access == "read" else None
        held[move.tensor] = move.start, move.stop
        if tensor == outer:
            waiting = [move]
        elif tensor == inner:
            found.append(Visit([*waiting, move], held["Q"], held["K"]))
            waiting = []
        elif waiting or found:
            (waiting or found[-1].moves).append(move)
    return found


def loop_steps(loops: Mapping[str, Sequence[Move]], *, title: str, alt: str) -> Embedded:
    """Return a stepper over loops side by side. Step i shows the i-th tile of the scores that each loop visits.

    Args:
        loops: name of a loop → its moves, in the order of time.
    """
    of_loop = {name: visits(moves) for name, moves in loops.items()}
    most = max(sum(move.numbers for move in moves) for moves in loops.values())
    T, S = (max(move.stop for moves in loops.values() for move in moves if move.tensor == name) for name in "QK")
    steps = max(map(len, of_loop.values()))
    frames = []
    for i in range(steps):
        frames.append((" ".join(_said(name, found, i) for name, found in of_loop.items()), i))
    done = ", ".join(f"{name} {sum(_numbers(found).values()):,}" for name, found in of_loop.items())
    frames[-1] = (f"{frames[-1][0]} Numbers read and written in all: {done}.", steps - 1)

    def draw(figure: Figure, i: int) -> None:
        """Draw all panels on one pair of axes, because thousands of rectangles are faster on few axes."""
        figure.set_layout_engine("none")
        ax = figure.add_axes((0, 0, 1, 1))
        diagram(ax, (0, len(loops) * (S + BESIDE)), (T + BELOW, -ABOVE))
        for panel, (name, found) in enumerate(of_loop.items()):
            left = panel * (S + BESIDE) + STRIP + GAP + 0.3
            start = left - GAP - STRIP
            ax.text(start, -2 * STRIP - 2.2 * GAP, name, va="bottom", fontsize=10, fontweight="bold")
            _draw_tiles(ax, loops[name], found[: i + 1], left, T, S)
            counts = _numbers(found[: i + 1])
            for y, access, word, fill in ((T + 3.0, "read", "read", BLUE), (T + 5.6, "write", "written", ORANGE)):
                ax.text(start, y, f"{counts[access]:,} numbers {word}", va="bottom", fontsize=9)
                rectangle(ax, start, y, (S + BESIDE - 1) * counts[access] / most, 0.8, fill)

    # Without scripts: one loop has just finished a row or a column, and the other turns back for the same tiles.
    still = min(len({visit.cols for visit in found}) for found in of_loop.values()) - 1
    height = WIDTH * (T + ABOVE + BELOW) / (len(loops) * (S + BESIDE))
    return stepper(frames, draw, title=title, alt=alt, height=height, still=still)


def _numbers(found: Sequence[Visit]) -> Counter[str]:
    """Return how many numbers these visits read and write."""
    counts: Counter[str] = Counter()
    for visit in found:
        for move in visit.moves:
            counts[move.access] += move.numbers
    return counts


def _said(name: str, found: Sequence[Visit], i: int) -> str:
    if i >= len(found):
        return f"{name} is done."
    done = []
    for access in ("read", "write"):
        tensors = dict.fromkeys(move.tensor for move in found[i].moves if move.access == access)
        done += [f"{access}s {', '.join(tensors)}"] if tensors else []
    rows, cols = (f"{start}–{stop - 1}" for start, stop in (found[i].rows, found[i].cols))
    return f"{name}, queries {rows}, keys {cols}: {' and '.join(done)}."


def _draw_tiles(ax: Axes, moves: Sequence[Move], found: Sequence[Visit], left: float, T: int, S: int) -> None:
    """Draw the scores and the tensors around them. The last visit is happening now."""
    held = _held(moves, found[-1])
    tiles: dict[str, dict[tuple[int, int], None]] = {}
    for move in moves:
        tiles.setdefault(move.tensor, {})[move.start, move.stop] = None
    now, seen = found[-1], {(visit.rows, visit.cols) for visit in found}
    for rows in tiles["Q"]:
        for cols in tiles["K"]:
            fill = BLUE if (now.rows, now.cols) == (rows, cols) else DONE if (rows, cols) in seen else IDLE
            rectangle(ax, left + cols[0], rows[0], cols[1] - cols[0], rows[1] - rows[0], fill)
    ax.text(left + S / 2, T + 0.3, "scores", ha="center", va="top", fontsize=9)
    columns = {"Q": -GAP - STRIP, "O": S + GAP}
    if statistics := " ".join(name for name in ("l", "m", "L") if name in tiles):
        columns[statistics] = S + 2.5 * GAP + STRIP
    for label, x in columns.items():
        width = STRIP if label in "QO" else STRIP / 2
        for start, stop in tiles[label[0]]:
            rectangle(ax, left + x, start, width, stop - start, **_look(now, label[0], (start, stop), held))
        ax.text(left + x + width / 2, T + 0.3, label, ha="center", va="top", fontsize=9)
    for name, y in (("K", -GAP - STRIP), ("V", -1.5 * GAP - 2 * STRIP)):
        for start, stop in tiles[name]:
            rectangle(ax, left + start, y, stop - start, STRIP, **_look(now, name, (start, stop), held))
        ax.text(left - 0.3, y + STRIP / 2, name, ha="right", va="center", fontsize=9)


def _held(moves: Sequence[Move], now: Visit) -> dict[str, tuple[int, int]]:
    """Return the tile of each tensor that is on chip during a visit.

    A loop that stores O once per tile of queries keeps O and its statistics on chip until then.
    """
    held = {"Q": now.rows, "K": now.cols, "V": now.cols}
    if not any(move.access == "read" and move.tensor == "O" for move in moves):
        held |= {"O": now.rows, "L": now.rows}
    return held


def _look(now: Visit, name: str, tile: tuple[int, int], held: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Return the look of a tile: hatched while it is written, dark while it is read, pale while it stays on chip."""
    moved = {move.access for move in now.moves if (move.tensor, move.start) == (name, tile[0])}
    if "write" in moved:
        return {"fill": ORANGE, "hatch": "////"}
    return {"fill": BLUE if moved else KEPT if held.get(name) == tile else IDLE}
