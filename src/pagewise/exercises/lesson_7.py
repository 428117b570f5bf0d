"""Exercises of lesson 7: where splits begin, and their merge."""

import math

import torch
from torch import Tensor

from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers

# ------------------------------------------------------------------------------------------------ split_bounds


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

# ------------------------------------------------------------------------------------------------ merge_splits


def merge_splits(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """(out [D], lse) over all keys, from what n splits found alone: outs [n, D], each normalised, and lses [n].

    A split that saw no key has lse −inf, and its `out` is not to be read: it may hold NaN. If no split saw a key, out
    is 0 and lse is −inf. Scores may be large: lse = 200 is nothing special.
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

EXERCISES = [SPLIT_BOUNDS, MERGE_SPLITS]
