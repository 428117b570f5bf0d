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
from pagewise.tools.sizes import cdiv

SECTOR, BANK = 32, 4  # bytes
LIGHT = ("#ffffff", SAND, "#bfe3e6", "#d9d9e3")  # of thread groups side by side
WARPS = (SAND, TEAL, ORANGE, BLUE)


def vec_strip(trace: np.ndarray, num_elements: int, *, title: str, alt: str | None = None) -> None:
    """A row of elements in vecs, each with the thread that reads it."""
    per_vec = _elements_per_access(trace)
    _, ax = plt.subplots(figsize=(9.0, 1.7))
    for access in trace:
        text = f"thread {access['thread']}" if num_elements // per_vec <= 8 else f"{access['thread']}"
        box(ax, int(access["element"]), 0, per_vec, 1, text, fill=LIGHT[1])
    for element in range(1, num_elements):
        ax.plot([element, element], [0, 0.15], color=INK, lw=0.5)
    ax.set(title=title, xlim=(-0.2, num_elements + 0.2), ylim=(0, 1.1), yticks=[])
    ax.set_xticks(range(0, num_elements + 1, per_vec))
    ax.set_xlabel("element")
    _bare(ax)
    show(alt)


def blocks_of_warps(
    trace: np.ndarray, block_table: Sequence[int], block_elements: int, *, title: str, alt: str | None = None
) -> None:
    """One row per warp, one column per logical block; a cell names the turn in which this warp reads that block."""
    warps = int(trace["warp"].max()) + 1
    _, ax = plt.subplots(figsize=(0.95 * len(block_table) + 2.2, 0.5 * warps + 1.5))
    for logical, physical in enumerate(block_table):
        of_block = trace[trace["element"] // block_elements == physical]
        for warp in np.unique(of_block["warp"]).tolist():
            order = [b for b in block_table if _reads(trace, warp, b, block_elements)]
            box(ax, logical, warp, 1, 1, f"turn {order.index(physical) + 1}", fill=WARPS[warp % 4])
    ax.set(title=title, xlim=(-0.1, len(block_table) + 0.1), ylim=(warps + 0.1, -0.1))
    ax.set_xticks([i + 0.5 for i in range(len(block_table))], [f"{i}\n({p})" for i, p in enumerate(block_table)])
    ax.set_yticks([w + 0.5 for w in range(warps)], [f"warp {w}" for w in range(warps)])
    ax.set_xlabel("block of the sequence (block of the cache)")
    _bare(ax)
    show(alt)


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
    ax.set_xticks([])
    ax.set(xlabel=columns, ylabel=rows)
    _bare(ax)
    show(alt)


def rows_of_block(
    trace: np.ndarray, shape: tuple[int, int], first_element: int, *, title: str, turns: str, alt: str | None = None
) -> None:
    """A block whose rows are short, each row a column of cells: who reads which vec, and in which turn."""
    per_vec = _elements_per_access(trace)
    inside = trace[(trace["element"] >= first_element) & (trace["element"] < first_element + shape[0] * shape[1])]
    vecs, earliest = shape[1] // per_vec, int(inside["execution"].min())
    _, ax = plt.subplots(figsize=(9.6, 0.3 * vecs + 1.6))
    for access in inside:
        row, vec = divmod((int(access["element"]) - first_element) // per_vec, vecs)
        turn = int(access["execution"]) - earliest
        box(ax, row, vec, 1, 1, str(access["thread"]), fill=LIGHT[1 + turn % 3])
        if vec == 0 and access["thread"] % 32 == 0:
            ax.text(row, -0.15, f"{turns} = {turn}", va="bottom", fontsize=9)
    ax.set(title=title, xlim=(-0.1, shape[0] + 0.1), ylim=(vecs + 0.05, -0.8))
    ax.set_xticks([row + 0.5 for row in range(0, shape[0], 4)], [str(row) for row in range(0, shape[0], 4)])
    names = [f"tokens {v * per_vec} to {(v + 1) * per_vec - 1}" for v in range(vecs)]
    ax.set_yticks([v + 0.5 for v in range(vecs)], names)
    ax.set_xlabel("element of the head (a row of V)")
    _bare(ax)
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
    """The 32-byte sectors that one request of a warp touches, a row per layout; dark is what the lanes asked for."""
    figure, axes = plt.subplots(len(requests), 1, figsize=(9.4, 1.25 * len(requests) + 0.5), squeeze=False)
    spans = {}
    for name, request in requests.items():
        starts = request["element"].astype(np.int64) * itemsize
        spans[name] = (starts - starts.min() // SECTOR * SECTOR, request["bytes"].astype(int))
    sectors = cdiv(max(int((start + size).max()) for start, size in spans.values()), SECTOR)
    for ax, (name, (starts, sizes)) in zip(axes[:, 0], spans.items(), strict=True):
        touched = {b // SECTOR for start, size in zip(starts, sizes, strict=True) for b in range(start, start + size)}
        for sector in range(sectors):
            ax.add_patch(Rectangle((sector, 0), 1, 1, fc="#d9d9e3" if sector in touched else "white", ec=INK, lw=0.6))
        for start, size in zip(starts, sizes, strict=True):
            ax.add_patch(Rectangle((start / SECTOR, 0.15), size / SECTOR, 0.7, fc=BLUE, ec="white", lw=0.5))
        used = int(sizes.sum()) / (len(touched) * SECTOR)
        ax.set_title(f"{name}: {len(touched)} sectors moved, {used:.0%} of them asked for", fontsize=10)
        ax.set(xlim=(-0.1, sectors + 0.1), ylim=(-0.05, 1.05), yticks=[], xticks=[])
        _bare(ax)
    axes[-1][0].set_xlabel("sectors of 32 bytes, in the order of memory")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def banks_of_request(requests: Mapping[str, np.ndarray], *, title: str, alt: str | None = None) -> None:
    """Which bank each lane of one request reads, for arrays of shared memory; two words in a bank are a conflict."""
    figure, axes = plt.subplots(1, len(requests), figsize=(4.9 * len(requests), 3.2), squeeze=False)
    for ax, (name, request) in zip(axes[0], requests.items(), strict=True):
        words = sorted({int(w) for a in request for w in range(a["element"], a["element"] + a["bytes"] // BANK)})
        for access in request:
            for word in range(access["element"], access["element"] + access["bytes"] // BANK):
                shade = PALETTE[sorted(w for w in words if w % 32 == word % 32).index(word) % 5]
                ax.add_patch(Rectangle((word % 32, access["lane"]), 1, 1, fc=shade, ec="white", lw=0.3))
        fullest = max(sum(w % 32 == bank for w in words) for bank in range(32))
        ax.set_title(f"{name}: {fullest} word{'s' * (fullest > 1)} per bank", fontsize=10)
        ax.set(xlim=(0, 32), ylim=(len(request), 0), xlabel="bank (4 bytes)", ylabel="lane")
        ax.grid(visible=False)
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
    _, ax = plt.subplots(figsize=(6.4, 0.8 * len(rounds) + 0.9))
    for i, (access, warps) in enumerate(rounds):
        for warp in range(int(trace["warp"].max()) + 1):
            fill = (ORANGE if access == "write" else TEAL) if warp in warps else "#ffffff"
            box(ax, warp * 1.5, -i, 1.2, 0.6, f"warp {warp}", fill=fill)
        text = "hand over their sums" if access == "write" else "add them to their own"
        ax.text(6.1, 0.3 - i, text, va="center", fontsize=9.5)
    ax.set(title=title, xlim=(-0.1, 9.0), ylim=(0.4 - len(rounds), 0.8))
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


def _reads(trace: np.ndarray, warp: int, block: int, block_elements: int) -> bool:
    return bool(((trace["warp"] == warp) & (trace["element"] // block_elements == block)).any())


def _bare(ax: Axes) -> None:
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
