"""Work plans: which program computes which tiles of which item, and where the result goes (lesson 7).

An *item* is a chunk of query rows that share a KV head, over all keys that they see. A *split* is some of its tiles of
keys. Each split leaves lesson 3's (m, l, acc) for the merge. There are three ways to cut items into splits.

    num      Every item has the same number of splits. The bits of a row do not depend on the rest of the batch.
    size     Every split has the same number of keys. The bits of a row do not depend on the rest of the batch.
    share    Every program gets an equal range of the work of all items. No program waits for a long sequence.

Torch operations make a plan on the device, and its sizes depend on shapes only. The host therefore waits for no length,
and lengths may change between two replays of a CUDA graph.

Dao et al. 2023 (Flash-Decoding); equal ranges: Osama et al. 2023 (Stream-K).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from pagewise.paged_attention.in_torch import equal_splits
from pagewise.tools.checks import check_count
from pagewise.tools.sizes import cdiv


class Splits(NamedTuple):
    """One of the three ways and its count: splits per item, keys per split, or programs that share all work."""

    way: Literal["num", "size", "share"]
    count: int

    def bounds(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the splits [start, end) of one sequence's keys first … end − 1, at least one. Not for "share"."""
        if self.way == "share":
            raise ValueError("the splits of programs that share all work depend on all sequences, not on one")
        if self.way == "num":
            return equal_splits(self.count)(first, end)
        return list(pairwise([*(range(first, end, self.count) or [first]), end]))


def checked_splits(num_splits: int | None, split_size: int | None) -> Splits | None:
    """Return the splits that a caller asks for, or None for a choice that fills the GPU.

    Raises:
        ValueError, TypeError: an argument is not a positive int, or both are given.
    """
    if num_splits is not None and split_size is not None:
        raise ValueError(f"num_splits = {num_splits} and split_size = {split_size} exclude each other: give one")
    for name, count, way in (("num_splits", num_splits, "num"), ("split_size", split_size, "size")):
        if count is not None:
            check_count(name, count)
            return Splits(way, int(count))
    return None


class Items(NamedTuple):
    """The work that a plan distributes, on the device. Every tensor has one entry per item."""

    first_tile: Int[Tensor, " items"]  # the first tile of keys that the item sees
    num_tiles: Int[Tensor, " items"]
    is_possible: Bool[Tensor, " items"]  # False: the length of its sequence is impossible, and its result is NaN
    rows: Int[Tensor, "items 4"]  # where results go: first row of lse, KV head, first query row, number of query rows


class WorkPlan(NamedTuple):
    """A plan as the kernels read it (kernels/flash_decoding.py)."""

    programs: Int32[Tensor, " programs+1"]  # the first split of each program
    splits: Int32[Tensor, "splits 4"]  # item, first tile, end tile, slot: −1 stores a final result, −2 stores nothing
    items: Int32[Tensor, "items 6"]  # first slot, number of splits, and Items.rows
    num_slots: int  # 0: no item is split, and nothing is merged

    @property
    def num_programs(self) -> int:
        """The grid of the attention kernel."""
        return len(self.programs) - 1


def work_plan(items: Items, splits: Splits, *, tile: int, max_keys: int, min_keys: int) -> WorkPlan:
    """Return the plan for `items`, at least one.

    Args:
        tile: keys per tile.
        max_keys: the most keys that an item can have. It bounds the number of splits.
        min_keys: the least keys of a program when programs share the work.
    """
    most = max(1, cdiv(max_keys, tile))
    if splits.way == "share":
        min_tiles = max(1, min_keys // tile)
        num_programs = min(splits.count, max(1, len(items.num_tiles) * (most + 1) // min_tiles))
        programs, table, first_slot, counts = _in_equal_ranges(items, num_programs, min_tiles)
        num_slots = len(table)
    else:
        size = min(cdiv(splits.count, tile), most) if splits.way == "size" else None
        per_item = min(splits.count, most) if size is None else cdiv(most, size)
        programs, table, first_slot, counts = _each_by_itself(items, per_item, size)
        num_slots = len(table) if per_item > 1 else 0
    slots = torch.stack([first_slot, counts], dim=1)
    return WorkPlan(programs.int(), table.int(), torch.cat([slots, items.rows], dim=1).int(), num_slots)


def _each_by_itself(items: Items, per_item: int, size: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut every item into at most `per_item` splits, equal ones or of `size` tiles. An item without keys has one."""
    n = items.num_tiles[:, None]
    counts = ((n + size - 1) // size if size else n.clamp(max=per_item)).clamp(min=1)
    split, item = (torch.arange(count, device=n.device) for count in (per_item, len(n)))
    start, end = (split * size, (split + 1) * size) if size else (n * split // counts, n * (split + 1) // counts)
    start, end = torch.minimum(start, n), torch.minimum(end, n)
    slot = item[:, None] * per_item + split
    slot = torch.where(split < counts, torch.where(counts > 1, slot, -1), -2)
    first = items.first_tile[:, None]
    table = torch.stack([item[:, None].expand_as(slot), first + start, first + end, slot], dim=2).flatten(0, 1)
    return torch.arange(len(table) + 1, device=n.device), table, item * per_item, counts[:, 0]


def _in_equal_ranges(items: Items, num_programs: int, min_tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay the work of all items end to end and give each program an equal range of it: `equal_ranges` on the device.

    An item's work is its tiles and one unit before them for the start of a program. The work is cut where an item ends
    and where a program begins. Split i lies between cut i and cut i + 1, and its slot is i.
    """
    n, device = items.num_tiles, items.num_tiles.device
    work = torch.where(n > 0, n + 1, 0)
    ends = work.cumsum(0)
    begins, total = ends - work, ends[-1]
    sharing = (total // min_tiles).clamp(1, num_programs)  # programs that get work
    ranges = torch.minimum(total * torch.arange(num_programs, device=device) // sharing, total)
    cuts = torch.cat([ends, ranges]).sort().values

    item = torch.searchsorted(ends, cuts[:-1], right=True).clamp(max=len(n) - 1)
    start, end = ((cut - begins[item] - 1).clamp(min=0) for cut in (cuts[:-1], cuts[1:]))
    slot = torch.arange(len(item), device=device)
    slot = torch.where((start == 0) & (end == n[item]), -1, slot).masked_fill(start >= end, -2)
    table = torch.stack([item, items.first_tile[item] + start, items.first_tile[item] + end, slot], dim=1)

    programs = torch.searchsorted(cuts, torch.cat([ranges, total[None]]), right=True) - 1
    first_slot = torch.searchsorted(cuts, begins + 1, right=True) - 1
    counts = torch.searchsorted(cuts, ends) - first_slot
    counts = torch.where(n > 0, counts, torch.where(items.is_possible, 0, -1))
    return programs, table, first_slot, counts


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
    ends = list(accumulate((n + start if n else 0 for n in tiles), initial=0))
    sharing = min(num_programs, max(1, ends[-1] // min_tiles))
    programs = []
    for p in range(sharing):
        low, high = (ends[-1] * i // sharing for i in (p, p + 1))
        pieces = [
            Piece(item, max(low - begin - start, 0), min(high, end) - begin - start, p + item)
            for item, (begin, end) in enumerate(pairwise(ends))
            if max(low, begin + start) < min(high, end)
        ]
        programs.append(pieces)
    return programs + [[] for _ in range(num_programs - sharing)]
