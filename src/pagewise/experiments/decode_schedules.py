"""A decode step over sequences of different lengths, its keys cut in five ways: how full is the GPU? (lesson 7)

Simulated, not measured. A slot runs one program at a time and takes the next of the grid when it is free; a program
reads the tiles of its pieces one after the other. In units of the time for a tile of keys, at full load, a piece takes

    its tiles + START        (START: load the query, fill the pipeline, write the partial result)

and the merge, a small kernel afterwards, is left out. The ideal is all tiles spread over all slots, and nothing else.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagewise.experiments.decode_inputs import mixed
from pagewise.flash_decoding import equal_ranges
from pagewise.tools.schedule import Run, schedule
from pagewise.tools.sizes import cdiv
from pagewise.tools.tuning import MIN_KEYS, num_splits_heuristic

SLOTS = 2 * 132  # two programs at a time on each SM of an H100 or H200
KV_HEADS = 8
TILE = 64  # keys
START = 1
MAX_SPLITS = 128


class Share(NamedTuple):
    """A number of tiles of a sequence's keys, for one KV head."""

    sequence: int
    tiles: int


Program = list[Share]  # what one program does, in this order

BATCHES = {
    "16 of 4 k": [4096] * 16,
    "16 of 0.5–64 k": mixed(16, 512, 65536),
    "128 k + 31 of 1 k": [131072] + [1024] * 31,
    "64 of 0.5–32 k": mixed(64, 512, 32768),
}

# ------------------------------------------------------------------------------------------------ ways to cut


def not_split(lengths: Sequence[int]) -> list[Program]:
    """A program for each sequence and KV head."""
    return _cut(lengths, lambda _: math.inf)


def split_by_512(lengths: Sequence[int]) -> list[Program]:
    """Pieces of 512 keys, however many that are."""
    return _cut(lengths, lambda _: 512 // TILE)


def flash_attention_2(lengths: Sequence[int]) -> list[Program]:
    """Use one number of splits for the batch, and one size, as if all sequences were as long as the longest.

    From 0.8 · SLOTS programs on, nothing is split. Otherwise `num_splits_heuristic` chooses the number.
    """
    programs, longest = len(lengths) * KV_HEADS, cdiv(max(lengths), TILE)
    splits = 1 if programs >= 0.8 * SLOTS else num_splits_heuristic(programs, SLOTS, longest, MAX_SPLITS)
    return _cut(lengths, lambda _: cdiv(longest, splits))


def flash_attention_3(lengths: Sequence[int]) -> list[Program]:
    """Split sequences into shares of 1.1 · the mean work of a slot, at most MAX_SPLITS each; the largest come first."""
    share = math.ceil(1.1 * KV_HEADS * sum(cdiv(n, TILE) for n in lengths) / SLOTS)
    programs = _cut(lengths, lambda tiles: cdiv(tiles, min(cdiv(tiles, share), MAX_SPLITS)))
    return sorted(programs, key=lambda program: -program[0].tiles)


def equal_shares(lengths: Sequence[int], start: int = START) -> list[Program]:
    """A program for each slot, as the package's kernel has it, and all work of the batch in equal ranges.

    An item's work is its tiles and `start`; 0: tiles alone are shared.
    """
    tiles = [cdiv(n, TILE) for n in lengths for _ in range(KV_HEADS)]
    programs = equal_ranges(tiles, SLOTS, min_tiles=MIN_KEYS // TILE, start=start)
    return [[Share(piece.item // KV_HEADS, piece.stop - piece.start) for piece in pieces] for pieces in programs]


SCHEDULES: dict[str, Callable[[Sequence[int]], list[Program]]] = {
    "not split": not_split,
    "FlashAttention-2's heuristic": flash_attention_2,
    "splits of 512 keys": split_by_512,
    "FlashAttention-3's rule": flash_attention_3,
    "equal ranges": equal_shares,
}


def _cut(lengths: Sequence[int], size: Callable[[int], float]) -> list[Program]:
    """Each sequence in pieces of size(its tiles), a program for each and each KV head."""
    programs = []
    for sequence, tiles in enumerate(cdiv(n, TILE) for n in lengths):
        step = int(min(size(tiles), tiles)) or 1
        pieces = [[Share(sequence, min(step, tiles - start))] for start in range(0, tiles, step)]
        programs += [piece for _ in range(KV_HEADS) for piece in pieces]
    return programs


# ------------------------------------------------------------------------------------------------ time


def simulate(programs: Sequence[Program], num_slots: int = SLOTS) -> list[Run]:
    """Where and when each piece runs; the time START is part of it."""
    grid = [(p, sum(START + share.tiles for share in program)) for p, program in enumerate(programs)]
    runs = []
    for slot, now, _, p in schedule(grid, num_slots):
        for sequence, tiles in programs[p]:
            runs.append(Run(slot, now, now + START + tiles, sequence))
            now = runs[-1].stop
    return runs


def ideal(lengths: Sequence[int], num_slots: int = SLOTS) -> float:
    """The time if all tiles were spread evenly over all slots, and nothing else took any."""
    return KV_HEADS * sum(cdiv(n, TILE) for n in lengths) / num_slots


def of_ideal(lengths: Sequence[int], programs: Sequence[Program], num_slots: int = SLOTS) -> float:
    """The ideal time as a fraction of the simulated one: 1 is a GPU that does nothing but read, everywhere, always."""
    return ideal(lengths, num_slots) / max(run.stop for run in simulate(programs, num_slots))
