"""Exercise of lesson 8, the safe cousin: a maximum that is raised only where it must be."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Mistake
from pagewise.exercises.python import call, python_exercise


def lazy_fold(
    m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, values: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, acc) of one row after a tile of scores [n] and values [n, D]; acc is [D], m and l are numbers.

    m is raised to the tile's largest score only if that is larger than m by more than threshold · log 2; else it
    stays, and weights up to 2^threshold are added. Before the first key m is −∞; a tile of −∞ only changes nothing.
    """
    largest = scores.max()
    if largest == -math.inf:
        return m, l, acc
    if largest > m + threshold * math.log(2):
        shrink = torch.exp(m - largest)
        m, l, acc = largest, shrink * l, shrink * acc
    weights = torch.exp(scores - m)
    return m, l + weights.sum(), acc + weights @ values


def _lazy_with(mistake: str) -> Callable:
    def lazy_fold(m, l, acc, scores, values, threshold):
        largest = scores.max()
        if mistake != "masked" and largest == -math.inf:
            return m, l, acc
        room = {"natural": threshold, "always": 0.0}.get(mistake, threshold * math.log(2))
        rises = abs(largest - m) > room if mistake == "falls" else largest > m + room
        if mistake == "first" and m == -math.inf:
            m = torch.zeros_like(m)
            rises = largest > m + room
        if mistake == "masked" and m == -math.inf:
            rises = torch.tensor(True)
        if rises:
            shrink = torch.exp(m - largest)
            m, l = largest, l if mistake == "l" else shrink * l
            acc = acc if mistake in ("acc", "l") else shrink * acc
        elif mistake == "own":
            weights = torch.exp(scores - torch.maximum(m, largest))
            return m, l + weights.sum(), acc + weights @ values
        weights = torch.exp(scores - m)
        return m, l + weights.sum(), acc + weights @ values

    return lazy_fold


def _state(m: float, l: float, acc: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(m), torch.tensor(l), torch.tensor([acc])


def _tile(*scores: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(scores), torch.arange(1.0, len(scores) + 1)[:, None]


LAZY_FOLD = python_exercise(
    lazy_fold,
    [
        call(*_state(0.0, 1.0, 3.0), *_tile(-1.0), 8.0),
        call(*_state(0.0, 1.0, 3.0), *_tile(5.0), 8.0),
        call(*_state(0.0, 1.0, 3.0), *_tile(7.0, 1.0), 8.0),
        call(*_state(0.0, 1.0, 3.0), *_tile(-9.0), 8.0),
        call(*_state(-math.inf, 0.0, 0.0), *_tile(-20.0, -21.0), 8.0),
        call(*_state(2.0, 1.0, 3.0), *_tile(-math.inf, -math.inf), 8.0),
        call(*_state(-math.inf, 0.0, 0.0), *_tile(-math.inf), 8.0),
        call(*_state(0.0, 2.0, 3.0), *_tile(0.5, -math.inf), 0.0),
    ],
    {
        "always raised": Mistake(
            _lazy_with("always"), "m followed at once: it stays where the tile's largest score is within the threshold."
        ),
        "a natural threshold": Mistake(
            _lazy_with("natural"), "The threshold is in units of log 2: 8 lets weights grow to 2⁸, not to e⁸."
        ),
        "m falls": Mistake(
            _lazy_with("falls"),
            "m fell to that of a tile far below it: it is raised or stays, and small weights are small.",
        ),
        "not the first tile": Mistake(
            _lazy_with("first"),
            "Before the first key m is −∞, and every score is more than a threshold above it: m becomes the first "
            "tile's largest score.",
        ),
        "only m": Mistake(
            _lazy_with("l"), "m was raised, l and acc were not brought along: both shrink by exp(m − m′)."
        ),
        "acc does not shrink": Mistake(
            _lazy_with("acc"), "m was raised, l shrank and acc did not: both are relative to m."
        ),
        "weights by another maximum": Mistake(
            _lazy_with("own"),
            "m stayed, and the weights are relative to the tile's own maximum: all must be relative to the same m, "
            "even if they are larger than 1.",
        ),
        "NaN for a masked tile": Mistake(
            _lazy_with("masked"), "(−∞) − (−∞) is NaN: a tile that is masked as a whole changes nothing."
        ),
    },
    "any finite m is exact, so it need not be the largest.",
    imports="import math\nimport torch\nfrom torch import Tensor",
)

EXERCISES = [LAZY_FOLD]
