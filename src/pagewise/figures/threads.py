"""Pictures of a CUDA kernel at work, drawn from the trace of a launch that was observed (pagewise.cuda.simt).

Each takes the part of the trace that it draws, as `Launch.accesses` gives it. Nothing is laid out by hand: a cell has a
thread's number because that thread touched that address.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from pagewise.figures.charts import BLUE, INK, ORANGE, PALETTE, SAND, TEAL, box, show

SECTOR, BANK = 32, 4  # bytes
LIGHT = ("#ffffff", SAND, "#bfe3e6", "#d9d9e3")  # of thread groups side by side


def vecs_of_block(
    trace: np.ndarray,
    shape: tuple[int, int],
    first_element: int,
    *,
    title: str,
    rows: str,
    columns: str,
    group_size: int,
    turns: str,
    alt: str | None = None,
) -> None:
    """One block in memory order, `shape` = (rows, elements in a row): who reads which vec, and in which turn.

    The number in a cell is the thread; neighbouring groups of `group_size` threads differ in shade. The turn, how many
    times these threads have executed the load before, stands at the right of each row.
    """
    per_vec = _elements_per_access(trace)
    height, width = shape[0], shape[1] // per_vec
    inside = trace[(trace["element"] >= first_element) & (trace["element"] < first_element + shape[0] * shape[1])]
    _, ax = plt.subplots(figsize=(min(10.0, 0.34 * width + 2.4), 0.3 * height + 1.5))
    turn = np.zeros(height, int)
    earliest = int(inside["execution"].min())
    for access in inside:
        row, column = divmod((int(access["element"]) - first_element) // per_vec, width)
        fill = LIGHT[access["thread"] // group_size % 2]
        box(ax, column, row, 1, 1, str(access["thread"]), fill=fill)
        turn[row] = access["execution"] - earliest
    for row in range(height):
        ax.text(width + 0.3, row + 0.5, f"{turns} = {turn[row]}", va="center", fontsize=9)
    ax.set(title=title, xlim=(-0.1, width + 3), ylim=(height + 0.1, -0.1))
    step = max(1, height // 8)
    ax.set_yticks([row + 0.5 for row in range(0, height, step)], [str(row) for row in range(0, height, step)])
    ax.set_xticks([i + group_size / 2 for i in range(0, width, group_size)], range(width // group_size))
    ax.set(xlabel=columns, ylabel=rows)
    _bare(ax)
    show(alt)


def rows_of_block(
    trace: np.ndarray, shape: tuple[int, int], first_element: int, *, title: str, turns: str, alt: str | None = None
) -> None:
    """A block whose rows are short, `shape` = (rows, elements in a row): who reads which vec. A panel per turn."""
    per_vec = _elements_per_access(trace)
    inside = trace[(trace["element"] >= first_element) & (trace["element"] < first_element + shape[0] * shape[1])]
    vecs, turn_of = shape[1] // per_vec, inside["execution"].astype(int) - int(inside["execution"].min())
    num_turns = int(turn_of.max()) + 1
    height = shape[0] // num_turns
    figure, axes = plt.subplots(1, num_turns, figsize=(6.6, 0.24 * height + 1.4), squeeze=False)
    for access, turn in zip(inside, turn_of.tolist(), strict=True):
        row, vec = divmod((int(access["element"]) - first_element) // per_vec, vecs)
        box(axes[0][turn], vec, row, 1, 1, str(access["thread"]), fill=LIGHT[1 + row % 2])
    for turn, ax in enumerate(axes[0]):
        first = turn * height
        ax.set(xlim=(-0.02, vecs + 0.02), ylim=(first + height + 0.1, first - 0.1))
        ax.set_title(f"turn {turns} = {turn}", fontsize=10)
        ax.set_yticks([row + 0.5 for row in range(first, first + height)], range(first, first + height), fontsize=8)
        ax.set_xticks([v + 0.5 for v in range(vecs)], [f"{v * per_vec} – {(v + 1) * per_vec - 1}" for v in range(vecs)])
        ax.set_xlabel("tokens, in the order of memory")
        _bare(ax)
    axes[0][0].set_ylabel("row: element of the head")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def address_strips(
    levels: Sequence[tuple[str, int, int, int]], *, title: str, unit: str = "elements", alt: str | None = None
) -> None:
    """An address as a walk through memory: each strip is the marked cell of the one above, enlarged.

    `levels` are (name, cells, the marked one, cells' size in `unit`), from the whole tensor to the element.
    """
    _, ax = plt.subplots(figsize=(9.4, 0.95 * len(levels) + 0.6))
    for depth, (name, cells, marked, size) in enumerate(levels):
        y = -1.5 * depth
        for cell in range(cells):
            label = str(cell) if cells <= 16 or cell == marked else ""
            box(ax, 10 * cell / cells, y, 10 / cells, 0.7, label, fill=ORANGE if cell == marked else "#ffffff")
        ax.text(10.25, y + 0.35, f"{name} {marked} · {size} = {marked * size}", va="center", fontsize=9.5)
        if depth + 1 < len(levels):
            for corner, end in ((marked, 0.0), (marked + 1, 10.0)):
                ax.plot([10 * corner / cells, end], [y, y - 0.8], color=INK, lw=0.7, ls=":")
    offset = sum(marked * size for _, _, marked, size in levels)
    ax.text(10.25, -1.5 * len(levels) + 0.75, f"together {offset:,} {unit}", va="center", fontsize=9.5, weight="bold")
    ax.set(title=title, xlim=(-0.05, 14.2), ylim=(-1.5 * len(levels) + 0.4, 0.8))
    ax.axis("off")
    show(alt)


def sectors_of_request(
    requests: Mapping[str, np.ndarray], itemsize: int, *, title: str, alt: str | None = None
) -> None:
    """The 32-byte sectors that one request of a warp touches, a row per kernel; dark is what the lanes asked for.

    In the order of memory, without what lies between.
    """
    figure, axes = plt.subplots(len(requests), 1, figsize=(6.6, 0.95 * len(requests) + 0.6), squeeze=False)
    touched = {name: _bytes_by_sector(request, itemsize) for name, request in requests.items()}
    most = max(map(len, touched.values()))
    for ax, (name, sectors) in zip(axes[:, 0], touched.items(), strict=True):
        for place, asked in enumerate(sectors):
            ax.add_patch(Rectangle((place, 0), 1, 1, fc="#d9d9e3", ec=INK, lw=0.6))
            runs = np.split(asked, np.flatnonzero(np.diff(asked) > 1) + 1)
            for run in runs:  # at least a visible sliver
                width = max(len(run) / SECTOR, 0.12)
                ax.add_patch(Rectangle((place + run[0] / SECTOR, 0.15), width, 0.7, fc=BLUE, lw=0))
        used = sum(map(len, sectors)) / (len(sectors) * SECTOR)
        ax.set_title(f"{name}: {len(sectors)} sectors moved, {used:.0%} of them asked for", fontsize=10)
        ax.set(xlim=(-0.1, most + 0.1), ylim=(-0.05, 1.05), yticks=[], xticks=[])
        _bare(ax)
    axes[-1][0].set_xlabel("touched sectors of 32 bytes, in the order of memory")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def _bytes_by_sector(request: np.ndarray, itemsize: int) -> list[list[int]]:
    """For each sector that is touched: which of its bytes are asked for."""
    asked = {int(a["element"]) * itemsize + i for a in request for i in range(int(a["bytes"]))}
    sectors = sorted({byte // SECTOR for byte in asked})
    return [[byte % SECTOR for byte in sorted(asked) if byte // SECTOR == sector] for sector in sectors]


def banks_of_request(requests: Mapping[str, np.ndarray], *, title: str, alt: str | None = None) -> None:
    """Which words of a shared array one request reads, each above its bank; two words in a bank are a conflict."""
    figure, axes = plt.subplots(len(requests), 1, figsize=(6.6, 1.3 * len(requests) + 0.6), squeeze=False)
    of_bank = {}
    for name, request in requests.items():
        words = {int(w) for a in request for w in range(a["element"], a["element"] + a["bytes"] // BANK)}
        of_bank[name] = [sorted(w for w in words if w % 32 == bank) for bank in range(32)]
    most = max(len(words) for banks in of_bank.values() for words in banks)
    for ax, (name, banks) in zip(axes[:, 0], of_bank.items(), strict=True):
        for bank, words in enumerate(banks):
            ax.add_patch(Rectangle((bank, 0), 1, most, fc="white", ec="#d9d9e3", lw=0.6))
            for place, word in enumerate(words):
                box(ax, bank, place, 1, 1, "", fill=(TEAL, ORANGE, BLUE)[place % 3])
                ax.text(bank + 0.5, place + 0.5, str(word), ha="center", va="center", fontsize=7)
        fullest = max(map(len, banks))
        ax.set_title(f"{name}: {fullest} word{'s' * (fullest > 1)} per bank", fontsize=10)
        ax.set(xlim=(-0.1, 32.1), ylim=(-0.05, most + 0.05), yticks=[])
        ax.set_xticks([bank + 0.5 for bank in range(0, 32, 4)], range(0, 32, 4))
        _bare(ax)
    axes[-1][0].set_xlabel("bank (4 bytes); the number in a cell is the word of the array")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def handovers(trace: np.ndarray, *, title: str, alt: str | None = None) -> None:
    """Who writes and who reads a shared array, warp by warp, in the order of time: the rounds of a tree."""
    rounds: list[tuple[str, list[int]]] = []
    for access in np.sort(trace, order="order"):
        warp = int(access["warp"])
        if not rounds or rounds[-1][0] != access["access"]:
            rounds.append((str(access["access"]), []))
        if warp not in rounds[-1][1]:
            rounds[-1][1].append(warp)
    _, ax = plt.subplots(figsize=(6.4, 0.85 * len(rounds) + 0.6))
    for i, (access, warps) in enumerate(rounds):
        for warp in range(int(trace["warp"].max()) + 1):
            fill = (ORANGE if access == "write" else TEAL) if warp in warps else "#ffffff"
            box(ax, warp * 1.5, -i, 1.2, 0.5, f"warp {warp}", fill=fill)
        if access == "read":  # from those that wrote in the row above, in their order
            for giver, taker in zip(rounds[i - 1][1], warps, strict=False):
                ends = (taker * 1.5 + 0.6, 0.52 - i), (giver * 1.5 + 0.6, 0.98 - i)
                ax.annotate("", *ends, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4})
        text = "hand over their sums" if access == "write" else "add them to their own"
        ax.text(6.1, 0.25 - i, text, va="center", fontsize=9.5)
    ax.set(title=title, xlim=(-0.1, 9.0), ylim=(0.9 - len(rounds), 0.7))
    ax.axis("off")
    show(alt)


def butterfly(
    stages: Sequence[tuple[str, Sequence[int]]], *, title: str, lanes: int = 32, alt: str | None = None
) -> None:
    """Shuffles that exchange with the lane `distance` away: which lanes have become one after each distance."""
    distances = [(name, distance) for name, steps in stages for distance in steps]
    _, ax = plt.subplots(figsize=(9.4, 0.62 * len(distances) + 1.2))
    groups = {lane: {lane} for lane in range(lanes)}
    for i, (name, distance) in enumerate(distances):
        for lane in range(lanes):
            ax.plot([lane, lane ^ distance], [-i, -i - 1], color=PALETTE[i % 3], lw=0.8)
            ax.plot([lane, lane], [-i, -i - 1], color="#c8c8d4", lw=0.6)
        groups = {lane: groups[lane] | groups[lane ^ distance] for lane in range(lanes)}
        text = f"{name}: lane ^ {distance}, then {len(groups[0])} lanes agree"
        ax.text(lanes + 0.2, -i - 0.5, text, va="center", fontsize=9)
    for i in range(len(distances) + 1):
        ax.plot(range(lanes), [-i] * lanes, "o", color=INK, ms=2.5)
    ax.set(title=title, xlim=(-0.5, lanes + 15), ylim=(-len(distances) - 0.2, 0.4), yticks=[])
    ax.set_xticks(range(0, lanes, 4))
    ax.set_xlabel("lane", loc="left")
    _bare(ax)
    show(alt)


def _elements_per_access(trace: np.ndarray) -> int:
    """Elements in a vec: the step between neighbouring addresses of the trace."""
    return int(np.diff(np.unique(trace["element"])).min())


def _bare(ax: Axes) -> None:
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
