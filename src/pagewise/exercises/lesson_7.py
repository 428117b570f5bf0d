"""Exercises of lesson 7: where splits begin, and their merge."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Mistake
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


def _bounds_with(mistake: str) -> Callable:
    def split_bounds(num_keys, tile, num_splits):
        t = num_keys // tile if mistake == "whole tiles" else -(-num_keys // tile)
        n = num_splits if mistake == "empty" else max(1, min(num_splits, t)) if mistake == "one" else min(num_splits, t)
        if mistake == "keys":
            return [(num_keys * i // n, num_keys * (i + 1) // n) for i in range(n)]
        if mistake == "rounded up":
            per = -(-t // n) if n else 0
            return [(min(per * i, t) * tile, min(per * (i + 1) * tile, num_keys)) for i in range(n)]
        if mistake == "rounded down":
            per = t // n if n else 0
            return [(per * i * tile, min(per * (i + 1) * tile, num_keys)) for i in range(n)]
        if mistake == "tiles":
            return [(t * i // n, t * (i + 1) // n) for i in range(n)]
        if mistake == "too far":
            return [(t * i // n * tile, t * (i + 1) // n * tile) for i in range(n)]
        return [(t * i // n * tile, min(t * (i + 1) // n * tile, num_keys)) for i in range(n)]

    return split_bounds


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
    {
        "keys, not tiles": Mistake(
            _bounds_with("keys"), "You shared out single keys, and cut a tile in two: share out tiles, then multiply."
        ),
        "rounded up": Mistake(
            _bounds_with("rounded up"),
            "With ⌈t / n⌉ tiles for each, the last splits have little or nothing left: t · i // n shares evenly.",
        ),
        "rounded down": Mistake(
            _bounds_with("rounded down"), "With ⌊t / n⌋ tiles for each, the remaining tiles belong to nobody."
        ),
        "counted in tiles": Mistake(_bounds_with("tiles"), "These are numbers of tiles: a tile has `tile` keys."),
        "past the end": Mistake(
            _bounds_with("too far"), "The last tile is shorter: no split ends behind key `num_keys`."
        ),
        "the last tile left out": Mistake(
            _bounds_with("whole tiles"), "The last tile is shorter, and a tile all the same: round their number up."
        ),
        "empty splits": Mistake(
            _bounds_with("empty"), "There are more splits than tiles, so some are empty: no more than one per tile."
        ),
        "a split of nothing": Mistake(_bounds_with("one"), "Without keys there is no tile, and no split."),
    },
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


def _merge_with(mistake: str) -> Callable:
    def merge_splits(outs, lses):
        m = torch.zeros(()) if mistake == "no maximum" else lses.max()
        safe = m if mistake == "guard" else torch.where(m == -torch.inf, 0.0, m)
        weights = torch.exp(lses - safe)
        if mistake == "mean":
            weights = (lses > -torch.inf).float()
        if mistake == "proportional":
            weights = torch.where(lses > -torch.inf, lses, 0.0)
        l = weights.sum()
        seen = outs if mistake == "NaN" else torch.where(weights[:, None] > 0, outs, 0.0)
        summed = weights @ seen
        out = summed / (l if mistake in ("guard", "0 / 0") else torch.where(l == 0, 1.0, l))
        lse = {"log l": torch.log(l), "sum": lses.sum(), "largest": m}.get(mistake, m + torch.log(l))
        if mistake in ("mean", "proportional"):
            lse = torch.logsumexp(lses, 0)
        return summed if mistake == "not divided" else out, lse

    return merge_splits


def _lses(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


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
    {
        "the mean": Mistake(
            _merge_with("mean"), "That is the mean of the splits: a split counts by its weight, exp(lse of the split)."
        ),
        "lse as a weight": Mistake(
            _merge_with("proportional"), "lse is a logarithm: the weight of a split is exp(lse), not lse."
        ),
        "not divided": Mistake(
            _merge_with("not divided"), "The weighted sum is not divided by the sum of weights yet."
        ),
        "no maximum": Mistake(
            _merge_with("no maximum"), "exp(200) overflows: subtract the largest lse of all first, as softmax does."
        ),
        "the lse without m": Mistake(
            _merge_with("log l"), "log of the sum of weights is relative to m: the lse of all keys is m + log l."
        ),
        "the largest lse": Mistake(
            _merge_with("largest"), "lse is that of the heaviest split alone: together they weigh more, m + log l."
        ),
        "the sum of the lses": Mistake(
            _merge_with("sum"), "Logarithms of sums do not add up: add exp(lse), then take the logarithm."
        ),
        "NaN times 0": Mistake(
            _merge_with("NaN"), "The empty split's weight is 0, and 0 · NaN is NaN: do not read its output."
        ),
        "NaN without keys": Mistake(
            _merge_with("guard"), "No split saw a key: m is −inf, (−inf) − (−inf) is NaN. Subtract 0 there."
        ),
        "0 / 0": Mistake(_merge_with("0 / 0"), "No split saw a key: 0 / 0 is NaN, and the output is 0."),
    },
    "two small rows per split are all that splits have to tell each other.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [SPLIT_BOUNDS, MERGE_SPLITS]
