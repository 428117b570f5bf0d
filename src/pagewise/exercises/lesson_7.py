"""Exercises of lesson 7: where splits begin, their merge, their number, and equal shares of a ragged batch."""

import math

import torch
from torch import Tensor

from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers


def split_bounds(num_keys: int, tile: int, num_splits: int) -> list[tuple[int, int]]:
    """(first key, one behind the last) of each split of `num_keys` keys.

    A split is whole tiles of `tile` keys, only the last tile may be shorter. With n splits and t tiles, split i has
    tiles t · i // n … t · (i + 1) // n − 1. No split is empty: there are at most t of them, and none without keys.
    """
    t = -(-num_keys // tile)
    n = min(num_splits, t)
    return [(t * i // n * tile, min(t * (i + 1) // n * tile, num_keys)) for i in range(n)]


_BOUNDS = "t * i // n * tile, min(t * (i + 1) // n * tile, num_keys)"

SPLIT_BOUNDS = python_exercise(
    split_bounds,
    [
        call(8, 2, 2),
        call(10, 2, 2),
        call(14, 2, 3),
        call(18, 2, 4),
        call(7, 4, 2),
        call(5, 4, 1),
        call(6, 4, 5),
        call(0, 4, 3),
    ],
    [
        "keys, not tiles: You shared out single keys, and cut a tile in two: share out tiles, then multiply.",
        (_BOUNDS, "num_keys * i // n, num_keys * (i + 1) // n"),
        "rounded up: With ⌈t / n⌉ tiles for each, the last splits have little or nothing left: t · i // n shares "
        "evenly.",
        ("t * i // n", "min(-(-t // n) * i, t)"),
        ("t * (i + 1) // n", "-(-t // n) * (i + 1)"),
        "rounded down: With ⌊t / n⌋ tiles for each, the remaining tiles belong to nobody.",
        ("t * i // n", "t // n * i"),
        ("t * (i + 1) // n", "t // n * (i + 1)"),
        "counted in tiles: These are numbers of tiles: a tile has `tile` keys.",
        (_BOUNDS, "t * i // n, t * (i + 1) // n"),
        "past the end: The last tile is shorter: no split ends behind key `num_keys`.",
        ("min(t * (i + 1) // n * tile, num_keys)", "t * (i + 1) // n * tile"),
        "the last tile left out: The last tile is shorter, and a tile all the same: round their number up.",
        ("-(-num_keys // tile)", "num_keys // tile"),
        "empty splits: There are more splits than tiles, so some are empty: no more than one per tile.",
        ("min(num_splits, t)", "num_splits"),
        "a split of nothing: Without keys there is no tile, and no split.",
        ("min(num_splits, t)", "max(1, min(num_splits, t))"),
    ],
    "whole tiles, even shares, nothing empty: what the kernel does with `num_splits`.",
)


def merge_splits(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [D], lse) over all keys from the results of n splits: outs [n, D], each normalised, and lses [n].

    A split that saw no key has lse −inf. Do not read its `out`: it may hold NaN. If no split saw a key, out is 0 and
    lse is −inf. Scores may be large: lse = 200 is an ordinary number.
    """
    m = lses.max()
    weights = torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))  # (−inf) − (−inf) would be NaN
    l = weights.sum()
    seen = torch.where(weights[:, None] > 0, outs, 0.0)
    return weights @ seen / torch.where(l == 0, 1.0, l), m + torch.log(l)


def _lses(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


_WEIGHTS = "torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))"

MERGE_SPLITS = python_exercise(
    merge_splits,
    [
        call(torch.tensor([[5.0]]), _lses(2.0)),
        call(torch.tensor([[4.0], [8.0]]), _lses(0.0, math.log(3.0))),
        call(torch.tensor([[4.0, 1.0], [8.0, 3.0]]), _lses(1.0, 1.0 + math.log(3.0))),
        call(small_numbers(3, 2), _lses(2.0, 1.0, 0.5)),
        call(torch.tensor([[4.0], [0.0]]), _lses(1.0, -math.inf)),
        call(torch.tensor([[4.0], [8.0]]), _lses(200.0, 199.0)),
        call(torch.tensor([[4.0], [math.nan]]), _lses(1.0, -math.inf)),
        call(torch.zeros(2, 1), _lses(-math.inf, -math.inf)),
    ],
    [
        "the mean: That is the mean of the splits: a split counts by its weight, exp(lse of the split).",
        (_WEIGHTS, "(lses > -torch.inf).float()"),
        ("m + torch.log(l)", "torch.logsumexp(lses, 0)"),
        "lse as a weight: lse is a logarithm: the weight of a split is exp(lse), not lse.",
        (_WEIGHTS, "torch.where(lses > -torch.inf, lses, 0.0)"),
        ("m + torch.log(l)", "torch.logsumexp(lses, 0)"),
        "not divided: The weighted sum is not divided by the sum of weights yet.",
        (" / torch.where(l == 0, 1.0, l)", ""),
        "no maximum: exp(200) overflows: subtract the largest lse of all first, as softmax does.",
        ("lses.max()", "torch.zeros(())"),
        "the lse without m: log of the sum of weights is relative to m: the lse of all keys is m + log l.",
        ("m + torch.log(l)", "torch.log(l)"),
        "the largest lse: lse is that of the heaviest split alone: together they weigh more, m + log l.",
        ("m + torch.log(l)", "m"),
        "the sum of the lses: Logarithms of sums do not add up: add exp(lse), then take the logarithm.",
        ("m + torch.log(l)", "lses.sum()"),
        "NaN times 0: The empty split's weight is 0, and 0 · NaN is NaN: do not read its output.",
        ("torch.where(weights[:, None] > 0, outs, 0.0)", "outs"),
        "NaN without keys: No split saw a key: m is −inf, (−inf) − (−inf) is NaN. Subtract 0 there.",
        ("torch.where(m == -torch.inf, 0.0, m)", "m"),
        ("torch.where(l == 0, 1.0, l)", "l"),
        "0 / 0: No split saw a key: 0 / 0 is NaN, and the output is 0.",
        ("torch.where(l == 0, 1.0, l)", "l"),
    ],
    "two small rows per split are all that splits have to tell each other.",
    imports="import torch\nfrom torch import Tensor",
)


def smallest_good_split(num_programs: int, num_slots: int, max_splits: int) -> int:
    """The smallest s ≤ max_splits whose last turn is nearly as full as the best one's.

    `num_programs` programs, each cut in s, run on `num_slots` slots. They take turns(s) = num_programs · s / num_slots
    turns. A turn that is not full takes as long as a full one, so efficiency(s) = turns(s) / ⌈turns(s)⌉. Return the
    smallest s with at least 0.85 of the best efficiency.
    """
    turns = [num_programs * s / num_slots for s in range(1, max_splits + 1)]
    efficiency = [t / math.ceil(t) for t in turns]
    return 1 + next(i for i, e in enumerate(efficiency) if e >= 0.85 * max(efficiency))


_FIRST_GOOD = "next(i for i, e in enumerate(efficiency) if e >= 0.85 * max(efficiency))"

SMALLEST_GOOD_SPLIT = python_exercise(
    smallest_good_split,
    [
        call(8, 8, 4),
        call(1, 4, 8),
        call(1, 10, 16),
        call(3, 8, 8),
        call(10, 8, 4),
        call(8, 132, 16),
        call(8, 264, 3),
        call(48, 132, 16),
        call(5, 6, 8),
    ],
    [
        "the best one: That is the best one: the smallest with 0.85 of it has fewer partial results to merge.",
        (_FIRST_GOOD, "efficiency.index(max(efficiency))"),
        "the largest good one: Of those that are good enough the smallest is wanted: each split has to be merged.",
        ("next(i for", "max(i for"),
        "until all slots are taken: The first s that fills all slots may begin a second turn with hardly anything in "
        "it.",
        (f"1 + {_FIRST_GOOD}", "next((s for s, t in enumerate(turns, 1) if t >= 1), max_splits)"),
        "85 % of everything: 0.85 of the best efficiency, not of 1: with few splits allowed none may reach that.",
        (_FIRST_GOOD, "next((i for i, e in enumerate(efficiency) if e >= 0.85), max_splits - 1)"),
        "turns for efficiency: More turns are not better: efficiency is turns(s) / ⌈turns(s)⌉, 1 at most.",
        ("[t / math.ceil(t) for t in turns]", "turns"),
        "a full turn too many: ⌊turns⌋ + 1 counts one turn too many where they come out even: round up, ⌈turns⌉.",
        ("math.ceil(t)", "(math.floor(t) + 1)"),
        "fewer programs: Cut in s, there are s times as many programs, not a share of them.",
        ("num_programs * s / num_slots", "num_programs / (s * num_slots)"),
        "max_splits left out: s may be max_splits itself: range ends before its end.",
        ("range(1, max_splits + 1)", "range(1, max(max_splits, 2))"),
        "counted from 0: That is one too small: the first s is 1.",
        ("1 + next", "next"),
    ],
    "the rule by which kernels choose their splits, but for its limits.",
    imports="import math",
)


def pieces_of_program(p: int, num_programs: int, tiles: list[int]) -> list[tuple[int, int, int]]:
    """Return the work of program p of a ragged batch: a list of (item, first tile, one past the last tile).

    Item i has tiles[i] tiles, and tiles count from 0 in each item. All items laid end to end have W tiles. Program p
    takes the tiles from W · p // num_programs up to W · (p + 1) // num_programs, from one item or several. No piece is
    empty.
    """
    W, begin, pieces = sum(tiles), 0, []
    start, stop = W * p // num_programs, W * (p + 1) // num_programs
    for item, count in enumerate(tiles):
        first, last = max(start, begin), min(stop, begin + count)
        if first < last:
            pieces.append((item, first - begin, last - begin))
        begin += count
    return pieces


_RANGE = "max(start, begin), min(stop, begin + count)"

PIECES_OF_PROGRAM = python_exercise(
    pieces_of_program,
    [
        call(0, 1, [4]),
        call(1, 2, [4]),
        call(1, 2, [2, 2]),
        call(0, 3, [8]),
        call(1, 3, [8]),
        call(0, 2, [1, 5]),
        call(1, 4, [3, 1, 8]),
        call(0, 2, [2, 0, 4]),
        call(3, 8, [2, 1]),
        call(0, 1, [1, 2, 1]),
    ],
    [
        "each item by itself: That cuts every item into as many pieces as there are programs: cut the batch as a "
        "whole, end to end.",
        (_RANGE, "begin + count * p // num_programs, begin + count * (p + 1) // num_programs"),
        "one item only: A range goes on behind the end of an item, into the next one and those after it.",
        ("return pieces", "return pieces[:1]"),
        "tiles of the batch: These tiles count from the batch's first: a piece counts from its item's first.",
        ("first - begin, last - begin", "first, last"),
        "rounded up: With ⌈W / n⌉ tiles for each, the last programs have less or nothing: W · p // n shares evenly.",
        ("W * p // num_programs", "-(-W // num_programs) * p"),
        ("W * (p + 1) // num_programs", "-(-W // num_programs) * (p + 1)"),
        "rounded down: With ⌊W / n⌋ tiles for each, the batch's last tiles belong to nobody.",
        ("W * p // num_programs", "W // num_programs * p"),
        ("W * (p + 1) // num_programs", "W // num_programs * (p + 1)"),
        "empty pieces: An item without tiles is no piece: nobody has to merge it.",
        ("if first < last", "if first < last or count == 0 and start <= begin < stop"),
        "the last tile, not one behind: The third number is one behind the last tile, as in a range.",
        ("last - begin)", "last - begin - 1)"),
    ],
    "every program has the same work, give or take a tile, however ragged the batch.",
)

EXERCISES = [SPLIT_BOUNDS, MERGE_SPLITS, SMALLEST_GOOD_SPLIT, PIECES_OF_PROGRAM]
