"""Figures of a CUDA kernel, drawn from the trace of an observed launch (cudascope.observe).

Each function takes a part of the trace, as `Launch.accesses` returns it. A cell has the number of a thread if this
thread touched the address of the cell.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from pagewise.figures.drawing import arrow, bare, box, chart, diagram, rectangle, subplots
from pagewise.figures.palette import BLUE, INK, ORANGE, PALETTE, SAND, TEAL, WARPS, readable_on
from pagewise.figures.stages import draw_strips

SECTOR, BANK = 32, 4  # bytes
GAP = 0.25  # between sectors that are apart, of a sector's width
LANES = 32  # of a warp
LIGHT = ("#ffffff", SAND, "#bfe3e6")  # of thread groups side by side


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
    alt: str = "",
) -> None:
    """Draw one block in memory order, `shape` = (rows, elements in a row): the reader of each vec, and its turn.

    The number in a cell is the thread. Neighbouring groups of `group_size` threads differ in shade. The number at
    the right of a row is the turn: how many times these threads have executed the load before.
    """
    inside, per_vec = _reads_of_block(trace, shape, first_element)
    height, width = shape[0], shape[1] // per_vec
    step = max(1, height // 8)
    with chart(min(10.0, 0.34 * width + 2.4), 0.3 * height + 1.5, title, alt) as ax:
        for thread, turn, vec in inside:
            row, column = divmod(vec, width)
            box(ax, column, row, 1, 1, str(thread), fill=LIGHT[thread // group_size % 2])
            if column == width - 1:
                ax.text(width + 0.3, row + 0.5, f"{turns} = {turn}", va="center", fontsize=9)
        ax.set(xlim=(-0.1, width + 3), ylim=(height + 0.1, -0.1), xlabel=columns, ylabel=rows)
        ax.set_yticks([row + 0.5 for row in range(0, height, step)], range(0, height, step))
        ax.set_xticks([i + group_size / 2 for i in range(0, width, group_size)], range(width // group_size))
        bare(ax)


def rows_of_block(
    trace: np.ndarray, shape: tuple[int, int], first_element: int, *, title: str, turns: str, alt: str = ""
) -> None:
    """Draw a block with short rows, `shape` = (rows, elements in a row): the reader of each vec, a panel per turn."""
    inside, per_vec = _reads_of_block(trace, shape, first_element)
    vecs, num_turns = shape[1] // per_vec, 1 + max(turn for _, turn, _ in inside)
    height = shape[0] // num_turns
    tokens = [f"{v * per_vec} – {(v + 1) * per_vec - 1}" for v in range(vecs)]
    with subplots(1, num_turns, size=(6.6, 0.24 * height + 1.4), title=title, alt=alt) as (_, axes):
        for thread, turn, of_block in inside:
            row, vec = divmod(of_block, vecs)
            box(axes[turn], vec, row, 1, 1, str(thread), fill=LIGHT[1 + row % 2])
        for turn, ax in enumerate(axes):
            rows = range(turn * height, (turn + 1) * height)
            ax.set(xlim=(-0.02, vecs + 0.02), ylim=(rows.stop + 0.1, rows.start - 0.1))
            ax.set_title(f"turn {turns} = {turn}", fontsize=10)
            ax.set_yticks([row + 0.5 for row in rows], rows, fontsize=8)
            ax.set_xticks([v + 0.5 for v in range(vecs)], tokens)
            ax.set_xlabel("tokens, in the order of memory")
            bare(ax)
        axes[0].set_ylabel("row: element of the head")


def _reads_of_block(
    trace: np.ndarray, shape: tuple[int, int], first_element: int
) -> tuple[list[tuple[int, int, int]], int]:
    """Return the reads of a block as (thread, turn, number of the vec in the block), and the elements of a vec.

    A vec is as long as the step between neighbouring addresses of the trace.
    """
    per_vec = int(np.diff(np.unique(trace["element"])).min())
    inside = trace[(trace["element"] >= first_element) & (trace["element"] < first_element + shape[0] * shape[1])]
    threads, turns = inside["thread"].tolist(), (inside["execution"] - inside["execution"].min()).tolist()
    vecs = ((inside["element"] - first_element) // per_vec).tolist()
    return list(zip(threads, turns, vecs, strict=True)), per_vec


def address_strips(levels: Sequence[tuple[str, int, int, int]], *, title: str, alt: str = "") -> None:
    """Draw an address as strips of memory. Each strip is the enlarged marked cell of the strip above.

    `levels` are (name, cells, marked cell, elements in a cell), from the whole tensor to the element.
    """
    with chart(7.2, 0.95 * len(levels) + 0.6, title, alt) as ax:
        draw_strips(ax, [(cells, marked) for _, cells, marked, _ in levels], 1.5)
        for depth, (name, _, marked, size) in enumerate(levels):
            ax.text(10.25, 0.35 - 1.5 * depth, f"{name} {marked} · {size} = {marked * size}", va="center", fontsize=9.5)
        together = f"together {sum(marked * size for _, _, marked, size in levels):,} elements"
        ax.text(10.25, -1.5 * len(levels) + 0.75, together, va="center", fontsize=9.5, weight="bold")
        diagram(ax, (-0.05, 14.2), (-1.5 * len(levels) + 0.4, 0.8))


def sectors_of_request(requests: Mapping[str, np.ndarray], itemsize: int, *, title: str, alt: str = "") -> None:
    """Draw the 32-byte sectors that one request of a warp touches, a row per kernel. The requested bytes are dark.

    The sectors are in the order of memory. A gap stands for all sectors between them that the request does not touch.
    """
    touched = {}  # name → for each sector, its number and which of its bytes are requested
    for name, request in requests.items():
        asked = {int(a["element"]) * itemsize + i for a in request for i in range(int(a["bytes"]))}
        sectors = groupby(sorted(asked), key=lambda byte: byte // SECTOR)
        touched[name] = [(number, [byte % SECTOR for byte in of_sector]) for number, of_sector in sectors]
    most = max(map(len, touched.values()))
    with subplots(len(requests), size=(6.6, 0.95 * len(requests) + 0.6), title=title, alt=alt) as (_, axes):
        for ax, (name, sectors) in zip(axes, touched.items(), strict=True):
            numbers = [number for number, _ in sectors]
            for place, (number, asked) in enumerate(sectors):
                width = 1 if number + 1 in numbers else 1 - GAP
                rectangle(ax, place, 0, width, 1, "#d9d9e3", lw=0.6)
                for run in np.split(asked, np.flatnonzero(np.diff(asked) > 1) + 1):  # at least a visible sliver
                    dark = max(width * len(run) / SECTOR, 0.12)
                    rectangle(ax, place + width * run[0] / SECTOR, 0.15, dark, 0.7, BLUE, lw=0)
            used = sum(len(asked) for _, asked in sectors) / (len(sectors) * SECTOR)
            ax.set_title(f"{name}: {len(sectors)} sectors moved, {used:.0%} of their bytes used", fontsize=10)
            ax.set(xlim=(-0.1, most + 0.1), ylim=(-0.05, 1.05), yticks=[], xticks=[])
            bare(ax)
        axes[-1].set_xlabel("touched sectors of 32 bytes; a gap: sectors that are not touched")


def four_reads_of_keys() -> None:
    """Draw one load of K by a warp, in four kernels: a head of 128 float16, blocks of 16 tokens."""
    lane = np.arange(LANES)
    pairs = lane // 2 * 128  # the first element of the key that two lanes share
    reads = {
        "A thread per key, 2 bytes each": (lane * 128, 2),
        "Two threads per key, 8 bytes each": (pairs + lane % 2 * 4, 8),
        "The same in vLLM's layout of K": (lane * 4, 8),
        "Two threads per key, 16 bytes each": (pairs + lane % 2 * 8, 16),
    }
    requests = {}
    for name, (elements, size) in reads.items():
        requests[name] = np.zeros(LANES, dtype=[("element", "i8"), ("bytes", "i8")])
        requests[name]["element"], requests[name]["bytes"] = elements, size
    sectors_of_request(
        requests,
        2,
        title="Full sectors: through vLLM's layout of K, or through wider loads",
        alt="One load of a warp: 32 sectors, 6 % used; 16 sectors, half used; in vLLM's layout 8 sectors, all used; "
        "with 16 bytes per thread and no special layout 16 sectors, all used.",
    )


def lanes_in_block(traces: Mapping[str, np.ndarray], first_element: int, *, itemsize: int = 2) -> None:
    """Draw one block of K in the order of memory, a panel per kernel, and which lane reads which bytes of it.

    `traces`: name → the reads of K. `first_element` is where the block begins: 16 rows of 256 bytes, a row is a key
    where the elements of a key are neighbours. The first request that touches the block has the colours and numbers of
    its lanes. The other requests are light and dark grey in turn.
    """
    title = "One block of K in memory: which lane reads which bytes?"
    alt = "In the first panel, the coloured request fills one row of 256 bytes. In the second it is a column: 32 bytes "
    alt += "of each of the 16 keys. Every request uses whole sectors."
    size = 16 * 256
    with subplots(len(traces), size=(7.2, 2.5 * len(traces) + 0.6), title=title, alt=alt) as (_, axes):
        for ax, (name, trace) in zip(axes, traces.items(), strict=True):
            start = trace["element"] * itemsize - first_element * itemsize
            inside = (start >= 0) & (start < size)
            turns = trace["execution"][inside] - trace["execution"][inside].min()
            first_lane = int(trace["lane"][inside].min())
            for read, byte, turn in zip(trace[inside], start[inside].tolist(), turns.tolist(), strict=True):
                row, column = divmod(byte, 256)
                lane, width = int(read["lane"]) - first_lane, int(read["bytes"])
                fill = WARPS[lane // 8] if turn == 0 else ("#ffffff", "#e4e4ec")[turn % 2]
                rectangle(ax, column, row, width, 1, fill, lw=0.3)
                if turn == 0:
                    colour = readable_on(fill)
                    ax.text(
                        column + width / 2, row + 0.55, str(lane), ha="center", va="center", fontsize=6.5, color=colour
                    )
            for sector in range(0, 257, SECTOR):
                ax.plot([sector, sector], [0, 16], color=INK, lw=0.9)
            ax.set_title(name, fontsize=10)
            ax.set(xlim=(-1, 257), ylim=(16.1, -0.1), xticks=range(0, 257, SECTOR), yticks=(0.5, 15.5))
            ax.set_yticklabels(["bytes 0 to 255", "3,840 to 4,095"], fontsize=8)
            bare(ax)
        axes[-1].set_xlabel("byte in its row of 256; a vertical line: the edge of a sector")


def banks_of_request(requests: Mapping[str, np.ndarray], *, title: str, alt: str = "") -> None:
    """Draw the words of a shared array that one request reads, each above its bank. Two words in one bank conflict."""
    of_bank = {}
    for name, request in requests.items():
        words = {int(w) for a in request for w in range(a["element"], a["element"] + a["bytes"] // BANK)}
        of_bank[name] = [sorted(w for w in words if w % 32 == bank) for bank in range(32)]
    most = max(len(words) for banks in of_bank.values() for words in banks)
    with subplots(len(requests), size=(6.6, 1.3 * len(requests) + 0.6), title=title, alt=alt) as (_, axes):
        for ax, (name, banks) in zip(axes, of_bank.items(), strict=True):
            for bank, words in enumerate(banks):
                rectangle(ax, bank, 0, 1, most, ec="#d9d9e3", lw=0.6)
                for place, word in enumerate(words):
                    box(ax, bank, place, 1, 1, fill=(TEAL, ORANGE, BLUE)[place % 3])
                    ax.text(bank + 0.5, place + 0.5, str(word), ha="center", va="center", fontsize=7)
            fullest = max(map(len, banks))
            ax.set_title(f"{name}: {fullest} word{'s' * (fullest > 1)} per bank", fontsize=10)
            ax.set(xlim=(-0.1, 32.1), ylim=(-0.05, most + 0.05), yticks=[])
            ax.set_xticks([bank + 0.5 for bank in range(0, 32, 4)], range(0, 32, 4))
            bare(ax)
        axes[-1].set_xlabel("bank (4 bytes); the number in a cell is the word of the array")


def accesses_of_vec(traces: Mapping[str, np.ndarray], array: str, element: int) -> None:
    """Draw who writes and who reads one vec of a shared array, in the order of a run: a panel per launch.

    `traces`: name → the accesses of the array. `element` is the first 4-byte word of the vec. Reads before the write
    are marked: they find what an earlier launch left in shared memory. A row is a warp.
    """
    title = f"Who writes and who reads {array}, bytes {element * BANK} to {element * BANK + 7}?"
    early = {}
    with subplots(len(traces), size=(7.0, 1.9 * len(traces) + 0.6), title=title) as (figure, axes):
        for ax, (name, accesses) in zip(axes, traces.items(), strict=True):
            trace = np.sort(accesses, order="order")
            trace = trace[trace["element"] == element]
            is_write = trace["access"] == "write"
            written = int(np.flatnonzero(is_write)[0])
            place = np.arange(len(trace))
            before = ~is_write & (place < written)
            early[name] = int(before.sum())
            looks = {
                "a read before the write: old bytes": (before, "x", ORANGE, 34),
                "a read after the write": (~is_write & ~before, "o", TEAL, 14),
                f"the write, by thread {int(trace['thread'][written])}": (is_write, "D", BLUE, 60),
            }
            for label, (chosen, marker, colour, size) in looks.items():
                ax.scatter(place[chosen], trace["warp"][chosen], size, colour, marker=marker, label=label, zorder=3)
            ax.set_title(f"{name}: {early[name]} of {int((~is_write).sum())} reads come too early", fontsize=10)
            ax.set(ylim=(3.6, -0.6), yticks=range(4))
            ax.set_yticklabels([f"warp {i}" for i in range(4)])
            ax.grid(axis="y")
        figure.legend(*axes[-1].get_legend_handles_labels(), fontsize=8.5, loc="outside lower center", ncols=3)
        axes[-1].set_xlabel("accesses of these bytes, in the order of the run")


def handovers(trace: np.ndarray, *, title: str, alt: str = "") -> None:
    """Draw the warps that write and read a shared array in the order of time: the rounds of a tree."""
    rounds: list[tuple[str, list[int]]] = []
    for access in np.sort(trace, order="order"):
        warp = int(access["warp"])
        if not rounds or rounds[-1][0] != access["access"]:
            rounds.append((str(access["access"]), []))
        if warp not in rounds[-1][1]:
            rounds[-1][1].append(warp)
    with chart(6.4, 0.85 * len(rounds) + 0.6, title, alt) as ax:
        for i, (access, warps) in enumerate(rounds):
            for warp in range(int(trace["warp"].max()) + 1):
                fill = (ORANGE if access == "write" else TEAL) if warp in warps else "white"
                box(ax, warp * 1.5, -i, 1.2, 0.5, f"warp {warp}", fill=fill)
            if access == "read":  # from the writers in the row above, in their order
                for giver, taker in zip(rounds[i - 1][1], warps, strict=False):
                    arrow(ax, (giver * 1.5 + 0.6, 0.98 - i), (taker * 1.5 + 0.6, 0.52 - i), lw=1.4, gap=2)
            text = "hand over their sums" if access == "write" else "add them to their own"
            ax.text(6.1, 0.25 - i, text, va="center", fontsize=9.5)
        diagram(ax, (-0.1, 9.0), (0.9 - len(rounds), 0.7))


def butterfly(stages: Sequence[tuple[str, Sequence[int]]], *, title: str, alt: str = "") -> None:
    """Draw shuffles between lanes that are `distance` apart, and how many lanes agree after each of them."""
    distances = [(name, distance) for name, steps in stages for distance in steps]
    groups = {lane: {lane} for lane in range(LANES)}
    with chart(7.2, 0.62 * len(distances) + 1.2, title, alt) as ax:
        for i, (name, distance) in enumerate(distances):
            for lane in range(LANES):
                ax.plot([lane, lane ^ distance], [-i, -i - 1], color=PALETTE[i % 3], lw=0.8)
                ax.plot([lane, lane], [-i, -i - 1], color="#c8c8d4", lw=0.6)
            groups = {lane: groups[lane] | groups[lane ^ distance] for lane in groups}
            text = f"{name}: lane ^ {distance}, then {len(groups[0])} lanes agree"
            ax.text(LANES + 0.2, -i - 0.5, text, va="center", fontsize=9)
        for i in range(len(distances) + 1):
            ax.plot(range(LANES), [-i] * LANES, "o", color=INK, ms=2.5)
        ax.set(xlim=(-0.5, LANES + 15), ylim=(-len(distances) - 0.2, 0.4), yticks=[], xticks=range(0, LANES, 4))
        ax.set_xlabel("lane", loc="left")
        bare(ax)
