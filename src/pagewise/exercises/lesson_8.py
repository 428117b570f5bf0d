"""Exercises of lesson 8, a maximum for all: who must be recomputed, and sums that share φ."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Mistake
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers

INF, NAN = math.inf, math.nan

# ------------------------------------------------------------------------------------------------ rows_to_recompute


def rows_to_recompute(scores: Tensor, phi: float, low: float, high: float) -> Tensor:
    """Which rows of scores [rows, S] a unified maximum φ does not suit: [rows] of bool.

    A row's largest score m decides: it must keep low < m − φ < high. A smaller score below it is harmless. −inf is a
    masked key; a row that sees no key need not be recomputed. A row with NaN must.
    """
    m = scores.amax(dim=1)
    inside = (low < m - phi) & (m - phi < high)
    return ~inside & (m != -torch.inf)


def _rows_outside(inside: Callable, sees_none: Callable | None = None) -> Callable:
    """An answer whose rows stay if `inside`(scores − φ, low, high), or if they see no key."""

    def rows_to_recompute(scores, phi, low, high):
        stay = inside(scores - phi, low, high)
        return ~(stay | ((scores == -INF).all(dim=1) if sees_none is None else sees_none(scores)))

    return rows_to_recompute


def _within(m: Tensor, low: float, high: float) -> Tensor:
    return (low < m) & (m < high)


ROWS_TO_RECOMPUTE = python_exercise(
    rows_to_recompute,
    [
        call(torch.tensor([[0.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[4.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[6.0], [9.0]]), 6.0, -3.0, 3.0),
        call(torch.tensor([[-4.0], [2.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[-4.0], [2.5]]), 0.0, -5.0, 2.0),
        call(torch.tensor([[-9.0, 1.0], [5.0, 1.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[-INF, 1.0], [-INF, 9.0], [-INF, -INF]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[7.0, 6.0], [NAN, 6.0]]), 6.0, -3.0, 3.0),
    ],
    {
        "every score must stay": Mistake(
            _rows_outside(lambda x, low, high: ((x == -INF) | _within(x, low, high)).all(dim=1)),
            "A score far below the row's largest has a weight that nobody sees, whatever φ is: the largest counts.",
        ),
        "one verdict for all rows": Mistake(
            _rows_outside(lambda x, low, high: _within(x.amax().expand(len(x)), low, high)),
            "Each row has its own largest score: the maximum over dim=1, not over all.",
        ),
        "NaN passes": Mistake(
            _rows_outside(lambda x, low, high: ~((x.amax(dim=1) <= low) | (x.amax(dim=1) >= high))),
            "NaN is neither ≤ low nor ≥ high: ask whether the row is inside and turn the answer round, then it counts "
            "as outside.",
        ),
        "the edges pass": Mistake(
            _rows_outside(lambda x, low, high: (low <= x.amax(dim=1)) & (x.amax(dim=1) <= high)),
            "The band's edges are outside: low < m − φ < high, strictly.",
        ),
        "only the upper edge": Mistake(
            _rows_outside(lambda x, low, high: x.amax(dim=1) < high),
            "A row whose every score lies far below φ has weights that underflow: the lower edge counts, too.",
        ),
        "a band like a radius": Mistake(
            _rows_outside(lambda x, low, high: x.amax(dim=1).abs() < high),
            "The band has two ends, low and high, which need not lie equally far from φ.",
        ),
        "a row without keys": Mistake(
            _rows_outside(lambda x, low, high: _within(x.amax(dim=1), low, high), lambda scores: False),
            "A row that sees nothing has m = −∞ and is 0 either way: there is nothing to recompute.",
        ),
        "rows with a masked key": Mistake(
            _rows_outside(
                lambda x, low, high: _within(x.amax(dim=1), low, high), lambda scores: (scores == -INF).any(dim=1)
            ),
            "A masked key says nothing of the row's others: only a row that sees none is left out.",
        ),
        "φ forgotten": Mistake(
            lambda scores, phi, low, high: rows_to_recompute(scores, 0.0, low, high),
            "The band is one of m − φ, not of m.",
        ),
        "the other way round": Mistake(
            lambda *arguments: ~rows_to_recompute(*arguments), "Those are the rows that φ suits, or see nothing."
        ),
    },
    "one number per row decides, and nobody compares every score.",
    imports="import torch\nfrom torch import Tensor",
)

# ------------------------------------------------------------------------------------------------ unified_output


def unified_output(pieces: list[tuple[Tensor, Tensor]], phi: float) -> Tensor:
    """softmax(s) @ v, where the pieces hold (scores [n], values [n, D]) and φ serves all of them as maximum.

    Sums in float32. −inf is a masked key; if no piece has another, the result is 0.
    """
    weights = [torch.exp(scores.float() - phi) for scores, _ in pieces]
    l = sum(w.sum() for w in weights)
    acc = sum(w @ values.float() for w, (_, values) in zip(weights, pieces, strict=True))
    return acc / l if l > 0 else acc


def _unified_with(mistake: str) -> Callable:
    def unified_output(pieces, phi):
        l, acc, outs = 0.0, 0.0, []
        for scores, values in pieces:
            scores = scores if mistake == "float16" else scores.float()
            centre = scores.amax() if mistake == "own maximum" else 0.0 if mistake == "phi" else phi
            weights = torch.exp(scores - centre)
            l = l + weights.float().sum()
            acc = acc + weights.float() @ values.float()
            outs.append(weights.float() @ values.float() / weights.float().sum())
        if mistake == "mean":
            return sum(outs) / len(outs)
        if mistake == "times":
            return acc / l * math.exp(phi)
        l = l + (1e-6 if mistake == "epsilon" else 0.0)
        return acc if mistake == "sum" or (mistake != "no key" and not l > 0) else acc / l

    return unified_output


_UNIFIED_CASES = [
    ([([1.0], [3.0])], 1.0),
    ([([1.0], [3.0])], 0.0),
    ([([0.0, 0.0], [3.0, 1.0])], 2.0),
    ([([0.0], [3.0]), ([1.0, 0.0], [1.0, 5.0])], 0.5),
    ([([200.0], [3.0]), ([201.0], [1.0])], 200.0),
    ([([0.0], [3.0]), ([1.0], [1.0])], 30.0),
    ([([-INF, 0.0], [3.0, 1.0]), ([-INF], [4.0])], 0.0),
    ([([-INF], [3.0])], 0.0),
]

UNIFIED_OUTPUT = python_exercise(
    unified_output,
    [
        *(
            call([(torch.tensor(s), torch.tensor(v)[:, None]) for s, v in pieces], phi)
            for pieces, phi in _UNIFIED_CASES
        ),
        call([(torch.tensor([12.0, 11.0]).half(), small_numbers(2, 2).half())], 0.0),
    ],
    {
        "each piece's own maximum": Mistake(
            _unified_with("own maximum"),
            "Each piece subtracted its own maximum: their sums are relative to different numbers. φ is one for all.",
        ),
        "φ forgotten": Mistake(_unified_with("phi"), "exp overflows: φ must be subtracted from every score."),
        "the mean of the pieces": Mistake(
            _unified_with("mean"), "That is the mean of the pieces' outputs: add up l and acc, and divide once."
        ),
        "multiplied by e^φ": Mistake(
            _unified_with("times"), "φ cancels: acc and l both carry the factor exp(−φ), their quotient does not."
        ),
        "not divided": Mistake(_unified_with("sum"), "acc is not divided by l yet."),
        "an epsilon": Mistake(
            _unified_with("epsilon"),
            "With φ far above the scores l is small, and right: what is added to it, or put in its place, is not small "
            "beside it. Only l = 0 is special.",
        ),
        "NaN without keys": Mistake(
            _unified_with("no key"), "No piece has a visible key: l is 0, and 0 / 0 is NaN. The result is 0 then."
        ),
        "weights in float16": Mistake(
            _unified_with("float16"),
            "A float16 ends at 65504, which is exp(11.09): with φ for a maximum weights are larger than 1, so they "
            "belong in float32.",
        ),
    },
    "the pieces may come in any order, and none knows the others' maximum.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [ROWS_TO_RECOMPUTE, UNIFIED_OUTPUT]
