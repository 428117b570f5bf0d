"""Work plans as lists: which program computes which tiles of which item, and where the result goes (lesson 7).

`kernels/work_plan.py` says what items and splits are, and makes such a plan on the device. Items have equal numbers of
splits, or splits of equal size, or all programs share the work of all items. Sharing leaves no program waiting for a
long sequence, but the bits of a row depend on the rest of the batch, and in the other two ways they do not.

Dao et al. 2023 (Flash-Decoding); equal ranges: Osama et al. 2023 (Stream-K).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from jaxtyping import Int32
from torch import Tensor


class Piece(NamedTuple):
    """Tiles start … stop − 1 of an item, and the slot of their (m, l, acc)."""

    item: int
    start: int
    stop: int
    slot: int


def equal_ranges(tiles: Sequence[int], num_programs: int, *, min_tiles: int = 1, start: int = 1) -> list[list[Piece]]:
    """Return the pieces of each program when all programs share the work of all items: a plan on the host, in loops.

    An item's work is its tiles and, before them, `start` units. In this time a program loads the queries and fills its
    pipeline, which takes about as long as a tile. With W = Σ work and G = min(num_programs, max(1, W // min_tiles)),
    program p begins at W · p // G. Piece (p, item) has slot p + item, so that an item's pieces are neighbours, in the
    order of its keys.
    """
    ends = list(accumulate((n + start for n in tiles), initial=0))
    sharing = min(num_programs, max(1, ends[-1] // min_tiles))
    begins = [ends[-1] * min(p, sharing) // sharing for p in range(num_programs + 1)]
    return _pieces(ends, begins, start)


def pieces_of(plan: Int32[Tensor, "5 columns"], tiles: Sequence[int], num_programs: int) -> list[list[Piece]]:
    """Return the pieces of each program of a device's plan for items of these tiles, as `equal_ranges` gives them.

    plan: from `paged_attention.in_triton.shared_plan`. On a GPU the host waits for it.
    """
    return _pieces(plan[0, : len(tiles) + 1].tolist(), plan[1, : num_programs + 1].tolist(), 1)


def _pieces(ends: Sequence[int], begins: Sequence[int], start: int) -> list[list[Piece]]:
    """Return the pieces of each program, from the work before each item and the work before each program."""
    return [
        [
            Piece(item, max(low - begin - start, 0), min(high, end) - begin - start, p + item)
            for item, (begin, end) in enumerate(pairwise(ends))
            if max(low, begin + start) < min(high, end)
        ]
        for p, (low, high) in enumerate(pairwise(begins))
    ]
