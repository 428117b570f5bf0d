"""How the keys of a decode step are cut into pieces that run side by side (lesson 7; the paged kernels since lesson 5).

A decode step has few queries and many keys. An *item* is what one program would do alone: the query rows that share a
KV head (or a chunk of them) over all keys of a sequence, a tile of keys at a time. Programs are what a GPU runs side by
side; there are three ways to give them pieces of items, and all leave one `Partial` (m, l, acc) per piece to merge:

    num      every item by itself, into so many pieces            a row's bits do not depend on the batch around it
    size     every item by itself, into pieces of so many keys    likewise
    share    the work of all items end to end, in equal ranges    no program waits for a long sequence

Dao et al. 2023 (Flash-Decoding); equal ranges: Osama et al. 2023 (Stream-K).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from pagewise.tools.checks import check_count
from pagewise.tools.sizes import cdiv

MAX_SPLITS = 128
MIN_KEYS = 128  # of a program that shares, at least on average: fewer cost more to merge than to compute


class Splits(NamedTuple):
    """One of the three ways, and its number: pieces per item, keys per piece, or programs that share all work."""

    way: Literal["num", "size", "share"]
    count: int

    def bounds(self, first: int, stop: int) -> list[tuple[int, int]]:
        """The pieces [start, stop) of a sequence's keys first … stop − 1 that is cut by itself; at least one."""
        keys = stop - first
        if self.way == "size":
            edges = [*range(first, stop, self.count)]
        else:
            pieces = min(self.count, keys)
            edges = [first + keys * i // pieces for i in range(pieces)]
        return list(pairwise([*(edges or [first]), stop]))


def checked_splits(num_splits: int | None, split_size: int | None) -> Splits | None:
    """What the caller wants; None: whatever fills the GPU.

    Raises:
        ValueError, TypeError: one is no count, or both are given.
    """
    if num_splits is not None and split_size is not None:
        raise ValueError(f"num_splits = {num_splits} and split_size = {split_size} exclude each other: give one")
    for name, count, way in (("num_splits", num_splits, "num"), ("split_size", split_size, "size")):
        if count is not None:
            check_count(name, count)
            return Splits(way, int(count))
    return None


def num_splits_heuristic(num_tiles: int, num_sms: int, num_key_tiles: int, max_splits: int) -> int:
    """How many pieces each of `num_tiles` equal thread blocks is cut into so that they fill the GPU's last wave.

        waves(s) = num_tiles · s / num_sms        efficiency(s) = waves(s) / ⌈waves(s)⌉

    1 if that is at least 0.8 efficient: a merge costs, too. Else the smallest s that reaches 0.85 of the best
    efficiency; an s that leaves the longest piece, ⌈num_key_tiles / s⌉ tiles, as it was gains nothing and is left out.

    Args:
        num_tiles: thread blocks without splitting.
        num_sms: thread blocks that run at once.
        num_key_tiles: tiles of keys in each thread block.

    Returns:
        1 <= splits <= min(max_splits, num_key_tiles), 1 where there are no tiles.

    The 0.85, and the measure, are FlashAttention-2's. It takes 1 from 0.8 · num_sms thread blocks on, whatever is left
    for the last wave.
    """
    for name, count in (("num_tiles", num_tiles), ("num_key_tiles", num_key_tiles)):
        check_count(name, count, minimum=0)
    for name, count in (("num_sms", num_sms), ("max_splits", max_splits)):
        check_count(name, count)

    def efficiency(s: int) -> float:
        return num_tiles * s / num_sms / max(1, cdiv(num_tiles * s, num_sms))

    limit = max(1, min(max_splits, num_key_tiles))
    if limit == 1 or num_tiles == 0 or efficiency(1) >= 0.8:
        return 1
    shorter = [s for s in range(1, limit + 1) if s == 1 or cdiv(num_key_tiles, s) < cdiv(num_key_tiles, s - 1)]
    best = max(map(efficiency, shorter))
    return next(s for s in shorter if efficiency(s) >= 0.85 * best)


class Piece(NamedTuple):
    """Tiles start … stop − 1 of an item, and where its `Partial` lies among all of them."""

    item: int
    start: int
    stop: int
    slot: int


def equal_ranges(tiles: Sequence[int], num_programs: int, *, min_tiles: int = 1, start: int = 1) -> list[list[Piece]]:
    """The pieces of each program when all share the work of all items: what the kernel works out for itself.

    An item's work is its tiles, and before them `start` for what a program does until it reads the first: it loads the
    queries and fills its pipeline, about as long as a tile takes. With W = Σ work, program p takes the work from
    W · p // G on, G = min(num_programs, max(1, W // min_tiles)). Piece (p, item) lies in slot p + item: an item's
    pieces lie side by side, in the order of its keys.
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
