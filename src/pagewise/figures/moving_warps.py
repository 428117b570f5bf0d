"""The walk of warps over K and V, drawn from the trace of a kernel that ran: load after load, who reads what where."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pagewise.figures.drawing import diagram, rectangle
from pagewise.figures.embed import Embedded
from pagewise.figures.palette import BLUE, ORANGE, SAND, TEAL
from pagewise.figures.steps import stepper

WARPS = (SAND, TEAL, ORANGE, BLUE)


class _Reads(NamedTuple):
    """What has been read of one tensor, block by block in the order of the sequence."""

    name: str
    table: Sequence[int]
    readers: list[np.ndarray]  # [rows, elements of a row]: the warp that has read an element, −1: none yet
    now: list[np.ndarray]  # the same shape: whether it is read in this step


def warp_steps(
    k_trace: np.ndarray,
    v_trace: np.ndarray,
    block_table: Sequence[int],
    k_shape: tuple[int, int],
    v_shape: tuple[int, int],
    *,
    title: str,
    alt: str,
) -> Embedded:
    """One thread block reads the K and V of one KV head: step i is the i-th load of every warp, side by side.

    Warps need not keep step on a GPU; each one's order is that of the trace.

    Args:
        k_trace, v_trace: `Launch.accesses` of the two caches.
        block_table: physical blocks in the order of the sequence.
        k_shape, v_shape: (rows, elements of a row) of one block in the order of memory.
    """
    k_steps = _steps("K", k_trace, block_table, k_shape)
    v_steps = _steps("V", v_trace, block_table, v_shape)
    frames = [("Nothing is read yet: two passes lie ahead, over K, then over V.", (k_steps[0], v_steps[0]))]
    for i, reads in enumerate(k_steps[1:]):
        frames.append((f"Pass over K, load {i}: {_said(reads)}", (reads, v_steps[0])))
    between = "Barriers: the whole row of scores is in shared memory; all warps agree on its maximum and its sum."
    frames.append((between, (_rest(k_steps[-1]), v_steps[0])))
    for i, reads in enumerate(v_steps[1:]):
        frames.append((f"Pass over V, load {i}: {_said(reads)}", (_rest(k_steps[-1]), reads)))
    loads = [len(trace) / len(np.unique(trace["element"])) for trace in (k_trace, v_trace)]
    done = f"All is read: each vec of K {loads[0]:g}×, of V {loads[1]:g}×. Now the warps add up their sums."
    frames.append((done, (_rest(k_steps[-1]), _rest(v_steps[-1]))))
    return stepper(frames, _draw, title=title, alt=alt, height=3.4)


def _steps(name: str, trace: np.ndarray, table: Sequence[int], shape: tuple[int, int]) -> list[_Reads]:
    """Before the first load, and after each."""
    size = shape[0] * shape[1]
    itemsize = int(trace["bytes"][0]) // int(np.diff(np.unique(trace["element"])).min())
    readers = np.full((len(table), size), -1)
    steps = [_Reads(name, table, [r.reshape(shape) for r in readers.copy()], [np.zeros(shape, bool)] * len(table))]
    for execution in range(int(trace["execution"].max()) + 1):
        now = np.zeros_like(readers, bool)
        for access in trace[trace["execution"] == execution]:
            block, first = divmod(int(access["element"]), size)
            span = slice(first, first + int(access["bytes"]) // itemsize)
            readers[table.index(block), span] = access["warp"]
            now[table.index(block), span] = True
        of_blocks = ([x.reshape(shape) for x in array.copy()] for array in (readers, now))
        steps.append(_Reads(name, table, *of_blocks))
    return steps


def _rest(reads: _Reads) -> _Reads:
    return reads._replace(now=[np.zeros_like(now) for now in reads.now])


def _said(reads: _Reads) -> str:
    found = {
        int(readers[now][0]): block
        for block, readers, now in zip(reads.table, reads.readers, reads.now, strict=True)
        if now.any()
    }
    said = ", ".join(f"warp {warp} in block {block}" for warp, block in sorted(found.items()))
    idle = len({int(w) for readers in reads.readers for w in np.unique(readers) if w >= 0} - set(found))
    return f"{said} of the cache" + (f"; {idle} warps have no block left." if idle else ".")


def _draw(figure: Figure, both: tuple[_Reads, _Reads]) -> None:
    for ax, reads in zip(figure.subplots(2, 1), both, strict=True):
        for i, (block, readers, now) in enumerate(zip(reads.table, reads.readers, reads.now, strict=True)):
            pixels = np.ones((*readers.shape, 3))
            for warp in range(int(readers.max()) + 1):
                strong, read = np.array(to_rgb(WARPS[warp % 4])), readers == warp
                pixels[read] = 0.35 * strong + 0.65  # read before
                pixels[read & now] = strong
            ax.imshow(pixels, extent=(i, i + 0.9, 1, 0), aspect="auto", interpolation="nearest")
            rectangle(ax, i, 0, 0.9, 1, "none")
            label = f"warp {int(readers[now][0])}" if now.any() else ""
            ax.text(i + 0.45, -0.06, label, ha="center", va="bottom", fontsize=10, fontweight="bold")
            ax.text(i + 0.45, 1.05, f"{i} ({block})", ha="center", va="top", fontsize=10)
        ax.set_title(f"{reads.name}: block of the sequence (of the cache)", fontsize=10, fontweight="normal")
        diagram(ax, (-0.05, len(reads.table)), (1.3, -0.3))
