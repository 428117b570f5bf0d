"""A decode step over sequences of different lengths, its keys cut in five ways: how fast is the GPU? (lesson 7)

Simulated, not measured. A GPU runs AT_ONCE programs at a time. When one ends, the next program of the grid takes its
place. A program reads the tiles of its pieces one after the other. A piece costs as much as

    its tiles + START        (START: load the query, fill the pipeline, write the partial result)

Memory limits the speed in two ways. A program alone reads IN_FLIGHT bytes per LATENCY. All programs together read at
most the bandwidth of the memory, and SATURATING programs are enough for that. Time is therefore counted in units in
which a program reads one tile when AT_ONCE read: with n programs, each reads AT_ONCE / max(n, SATURATING) tiles.

The merge, a small kernel afterwards, is left out. The ideal is the time to read all tiles at full bandwidth.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pagewise.experiments.decode_inputs import mixed
from pagewise.flash_decoding import equal_ranges
from pagewise.tools.roofline import H200, Gpu
from pagewise.tools.schedule import Run, schedule
from pagewise.tools.sizes import cdiv
from pagewise.tools.tuning import MIN_KEYS, num_splits_heuristic, splits_that_fill

AT_ONCE = 2 * H200.num_sms  # two programs at a time on each SM of an H100 or H200
KV_HEADS = 8
TILE = 64  # keys
TILE_BYTES = 2 * TILE * 128 * 2  # K and V, head size 128, 16 bits
START = 1
MAX_SPLITS = 128

LATENCY = 0.8e-6  # seconds from a request to its data, assumed for all GPUs
LAUNCH = 4e-6  # seconds per kernel, assumed
IN_FLIGHT = 2 * TILE_BYTES  # a program requests two tiles before it waits
SATURATING = math.ceil(H200.bandwidth * LATENCY / IN_FLIGHT)  # programs that keep an H200's memory busy: 59


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
    return split_by(512, lengths)


def split_by(keys: int, lengths: Sequence[int]) -> list[Program]:
    """Pieces of this number of keys, however many that are. `keys` is a multiple of TILE."""
    return _cut(lengths, lambda _: keys // TILE)


def flash_attention_2(lengths: Sequence[int]) -> list[Program]:
    """Use one number of splits for the batch, and one size, as if all sequences were as long as the longest.

    From 0.8 · AT_ONCE programs on, nothing is split. Otherwise `num_splits_heuristic` chooses the number.
    """
    programs, longest = len(lengths) * KV_HEADS, cdiv(max(lengths), TILE)
    splits = 1 if programs >= 0.8 * AT_ONCE else num_splits_heuristic(programs, AT_ONCE, longest, MAX_SPLITS)
    return _cut(lengths, lambda _: cdiv(longest, splits))


def flash_attention_3(lengths: Sequence[int]) -> list[Program]:
    """Split sequences into shares of 1.1 · the work per place, at most MAX_SPLITS each; the largest come first."""
    share = math.ceil(1.1 * KV_HEADS * sum(cdiv(n, TILE) for n in lengths) / AT_ONCE)
    programs = _cut(lengths, lambda tiles: cdiv(tiles, min(cdiv(tiles, share), MAX_SPLITS)))
    return sorted(programs, key=lambda program: -program[0].tiles)


def equal_shares(lengths: Sequence[int], start: int = START) -> list[Program]:
    """A program for each place, as the package's kernel has it, and all work of the batch in equal ranges.

    An item's work is its tiles and `start`; 0: tiles alone are shared.
    """
    tiles = [cdiv(n, TILE) for n in lengths for _ in range(KV_HEADS)]
    programs = equal_ranges(tiles, AT_ONCE, min_tiles=MIN_KEYS // TILE, start=start)
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


def simulate(programs: Sequence[Program], at_once: int = AT_ONCE, saturating: int = SATURATING) -> list[Run]:
    """Return where and when each piece runs. The time START is part of it.

    All programs read at the same rate. The order of events is therefore that of programs with a constant rate. Only the
    clock differs: one unit of their time takes max(programs, saturating) / at_once.
    """
    grid = [(p, sum(START + share.tiles for share in program)) for p, program in enumerate(programs)]
    planned = schedule(grid, at_once)
    pieces = []
    for place, now, _, p in planned:
        for sequence, tiles in programs[p]:
            pieces.append(Run(place, now, now + START + tiles, sequence))
            now = pieces[-1].stop
    starts, stops = (np.interp(times, *_clock(planned, at_once, saturating)) for times in _spans(pieces))
    return [
        piece._replace(start=start, stop=stop)
        for piece, start, stop in zip(pieces, starts.tolist(), stops.tolist(), strict=True)
    ]


def _spans(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    return [run.start for run in runs], [run.stop for run in runs]


def _clock(planned: Sequence[Run], at_once: int, saturating: int) -> tuple[list[float], list[float]]:
    """Return moments of programs with a constant rate, and their times when the programs share a memory."""
    starts, stops = _spans(planned)
    events = sorted([(start, 1) for start in starts] + [(stop, -1) for stop in stops])
    moments, times, busy = [0], [0.0], 0
    for moment, change in events:
        pace = max(busy, saturating) / at_once
        times.append(times[-1] + (moment - moments[-1]) * pace)
        moments.append(moment)
        busy += change
    return moments, times


def ideal(lengths: Sequence[int], at_once: int = AT_ONCE) -> float:
    """Return the time to read all tiles at full bandwidth: evenly over all places, and nothing else takes time."""
    return KV_HEADS * sum(cdiv(n, TILE) for n in lengths) / at_once


def of_ideal(
    lengths: Sequence[int], programs: Sequence[Program], at_once: int = AT_ONCE, saturating: int = SATURATING
) -> float:
    """Return the ideal time as a fraction of the simulated time: the share of the bandwidth that is used."""
    return ideal(lengths, at_once) / max(run.stop for run in simulate(programs, at_once, saturating))


def decode_seconds(S: int, kv_heads: int, gpu: Gpu, *, split: bool) -> float:
    """Return the modelled time of attention in a decode step: one sequence of S keys, head size 128, 16 bits.

    split: cut the keys as `flash_decoding` does on a GPU, and launch a merge. False: one program per KV head.
    """
    tiles = cdiv(S, TILE)
    splits = splits_that_fill(kv_heads, S, TILE, gpu.num_sms) if split else 1
    rate = min(kv_heads * splits * IN_FLIGHT / LATENCY, gpu.bandwidth)  # of all programs together
    reading = kv_heads * splits * cdiv(tiles, splits) * TILE_BYTES / rate
    return (2 if splits > 1 else 1) * LAUNCH + reading
