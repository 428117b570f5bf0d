"""The loads of K and V by the warps of a kernel, one after the other, drawn from the trace of a launch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pagewise.figures.drawing import diagram, rectangle
from pagewise.figures.palette import WARPS
from pagewise.figures.steps import Embedded, stepper


class _Reads(NamedTuple):
    """The elements of one tensor that have been read, in the order of the sequence."""

    readers: np.ndarray  # [blocks, rows, elements of a row]: the warp that has read an element, −1: none yet
    now: np.ndarray  # the same shape: whether it is read in this step

    def rest(self) -> "_Reads":
        """The same state between two reads."""
        return self._replace(now=np.zeros_like(self.now))


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
    """Return a stepper over one thread block that reads K and V of one KV head. Step i is the i-th load of every warp.

    On a GPU, warps do not run in lockstep. The order of each warp is that of the trace.

    Args:
        k_trace, v_trace: `Launch.accesses` of the two caches.
        block_table: physical blocks in the order of the sequence.
        k_shape, v_shape: (rows, elements of a row) of one block in the order of memory.
    """
    k_steps, v_steps = _steps(k_trace, block_table, k_shape), _steps(v_trace, block_table, v_shape)
    k_done, v_done = k_steps[-1].rest(), v_steps[-1].rest()
    frames = [("Nothing is read yet: two passes lie ahead, over K, then over V.", (k_steps[0], v_steps[0]))]
    for i, reads in enumerate(k_steps[1:]):
        frames.append((f"Pass over K, load {i}: {_said(reads, block_table)}", (reads, v_steps[0])))
    between = "Barriers: the whole row of scores is in shared memory; all warps agree on its maximum and its sum."
    frames.append((between, (k_done, v_steps[0])))
    for i, reads in enumerate(v_steps[1:]):
        frames.append((f"Pass over V, load {i}: {_said(reads, block_table)}", (k_done, reads)))
    loads = [len(trace) / len(np.unique(trace["element"])) for trace in (k_trace, v_trace)]
    done = f"All is read: each vec of K {loads[0]:g}×, of V {loads[1]:g}×. Now the warps add up their sums."
    frames.append((done, (k_done, v_done)))
    return stepper(frames, lambda figure, both: _draw(figure, both, block_table), title=title, alt=alt, height=3.4)


def _steps(trace: np.ndarray, table: Sequence[int], shape: tuple[int, int]) -> list[_Reads]:
    """Return the state before the first load, and after each load."""
    size = shape[0] * shape[1]
    itemsize = int(trace["bytes"][0]) // int(np.diff(np.unique(trace["element"])).min())
    readers = np.full((len(table), *shape), -1)
    steps = [_Reads(readers.copy(), np.zeros_like(readers, bool))]
    for execution in range(int(trace["execution"].max()) + 1):
        now = np.zeros_like(readers, bool)
        for access in trace[trace["execution"] == execution]:
            block, first = divmod(int(access["element"]), size)
            span = table.index(block), slice(first, first + int(access["bytes"]) // itemsize)
            readers.reshape(len(table), size)[span] = access["warp"]
            now.reshape(len(table), size)[span] = True
        steps.append(_Reads(readers.copy(), now))
    return steps


def _said(reads: _Reads, table: Sequence[int]) -> str:
    found = {int(reads.readers[i][reads.now[i]][0]): block for i, block in enumerate(table) if reads.now[i].any()}
    said = ", ".join(f"warp {warp} in block {block}" for warp, block in sorted(found.items()))
    idle = len(set(reads.readers.flat) - {-1} - set(found))
    return f"{said} of the cache" + (f"; {idle} warps have no block left." if idle else ".")


def _draw(figure: Figure, both: tuple[_Reads, _Reads], table: Sequence[int]) -> None:
    for ax, name, reads in zip(figure.subplots(2, 1), "KV", both, strict=True):
        for i, (block, readers, now) in enumerate(zip(table, *reads, strict=True)):
            pixels = np.ones((*readers.shape, 3))
            for warp in range(int(readers.max()) + 1):
                strong, read = np.array(to_rgb(WARPS[warp % 4])), readers == warp
                pixels[read] = 0.35 * strong + 0.65  # read earlier
                pixels[read & now] = strong
            ax.imshow(pixels, extent=(i, i + 0.9, 1, 0), aspect="auto", interpolation="nearest")
            rectangle(ax, i, 0, 0.9, 1, "none")
            if now.any():
                warp = f"warp {int(readers[now][0])}"
                ax.text(i + 0.45, -0.06, warp, ha="center", va="bottom", fontsize=10, fontweight="bold")
            ax.text(i + 0.45, 1.05, f"{i} ({block})", ha="center", va="top", fontsize=10)
        ax.set_title(f"{name}: block of the sequence (of the cache)", fontsize=10, fontweight="normal")
        diagram(ax, (-0.05, len(table)), (1.3, -0.3))
