"""Figures of a CUDA kernel, drawn from the trace of an observed launch (cudascope.observe).

The functions take parts of a trace, as `Launch.accesses` returns them.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from pagewise.figures.drawing import bare, chart, rectangle, subplots
from pagewise.figures.palette import BLUE, INK, ORANGE, PALETTE, TEAL, WARPS, readable_on

SECTOR, BANK = 32, 4  # bytes
GAP = 0.25  # between sectors that are apart, of a sector's width
LANES = 32  # of a warp


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
            ax.set_title(f"{name}: {len(sectors)} sectors touched, {used:.0%} of their bytes used", fontsize=10)
            ax.set(xlim=(-0.1, most + 0.1), ylim=(-0.05, 1.05), yticks=[], xticks=[])
            bare(ax)
        axes[-1].set_xlabel("touched sectors of 32 bytes; a gap: sectors that are not touched")


def three_reads_of_keys() -> None:
    """Draw one load of K by a warp, in three kernels: a head of 128 float16, blocks of 16 tokens."""
    lane = np.arange(LANES)
    pairs = lane // 2 * 128  # the first element of the key that two lanes share
    reads = {
        "A thread per key, 2 bytes each": (lane * 128, 2),
        "Two threads per key, 8 bytes each": (pairs + lane % 2 * 4, 8),
        "The same in vLLM's layout of K": (lane * 4, 8),
    }
    requests = {}
    for name, (elements, size) in reads.items():
        requests[name] = np.zeros(LANES, dtype=[("element", "i8"), ("bytes", "i8")])
        requests[name]["element"], requests[name]["bytes"] = elements, size
    sectors_of_request(
        requests,
        2,
        title="How much of the sectors that a load touches does it use?",
        alt="One load of a warp: 32 sectors, 6 % used; 16 sectors, half used; in vLLM's layout 8 sectors, all used.",
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


def accesses_of_vec(traces: Mapping[str, np.ndarray], array: str, element: int) -> None:
    """Draw who writes and who reads one vec of a shared array, in the order of a run: a panel per launch.

    `traces`: name → the accesses of the array. `element` is the first 4-byte word of the vec. Reads before the write
    are marked: they find what an earlier launch left in shared memory. A row is a warp. Only the first 20 are drawn.
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
            ax.set(xlim=(-0.8, 19.8), xticks=range(0, 20, 5), ylim=(3.6, -0.6), yticks=range(4))
            ax.set_yticklabels([f"warp {i}" for i in range(4)])
            ax.grid(axis="y")
        figure.legend(*axes[-1].get_legend_handles_labels(), fontsize=8.5, loc="outside lower center", ncols=3)
        axes[-1].set_xlabel("the first 20 accesses of these bytes, in the order of the run")


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
