"""Exercise of lesson 8, the safe cousin: a maximum that is raised only where it must be."""

import math

import torch
from torch import Tensor

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
        "always raised": (
            "m followed at once: it stays where the tile's largest score is within the threshold.",
            (" + threshold * math.log(2)", ""),
        ),
        "a natural threshold": (
            "The threshold is in units of log 2: 8 lets weights grow to 2⁸, not to e⁸.",
            (" * math.log(2)", ""),
        ),
        "m falls": (
            "m fell to that of a tile far below it: it is raised or stays, and small weights are small.",
            ("largest > m + threshold", "abs(largest - m) > threshold"),
        ),
        "not the first tile": (
            "Before the first key m is −∞, and every score is more than a threshold above it: m becomes the first "
            "tile's largest score.",
            ("    if largest > m", "    m = m.masked_fill(m == -math.inf, 0.0)\n    if largest > m"),
        ),
        "only m": (
            "m was raised, l and acc were not brought along: both shrink by exp(m − m′).",
            ("shrink * l, shrink * acc", "l, acc"),
        ),
        "acc does not shrink": (
            "m was raised, l shrank and acc did not: both are relative to m.",
            ("shrink * acc", "acc"),
        ),
        "weights by another maximum": (
            "m stayed, and the weights are relative to the tile's own maximum: all must be relative to the same m, "
            "even if they are larger than 1.",
            ("torch.exp(scores - m)", "torch.exp(scores - torch.maximum(m, largest))"),
        ),
        "NaN for a masked tile": (
            "(−∞) − (−∞) is NaN: a tile that is masked as a whole changes nothing.",
            ("    if largest == -math.inf:\n        return m, l, acc\n", ""),
        ),
    },
    "any finite m is exact, so it need not be the largest.",
    imports="import math\nimport torch\nfrom torch import Tensor",
)

EXERCISES = [LAZY_FOLD]
