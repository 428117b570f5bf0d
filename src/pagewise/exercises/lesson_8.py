"""Exercises of lesson 8: rows to recompute, sums that share one maximum φ, and a maximum that rises only if it must."""

import math

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers

INF, NAN = math.inf, math.nan


def rows_to_recompute(scores: Tensor, phi: float, low: float, high: float) -> Tensor:
    """Return the rows of scores [rows, S] that a unified maximum φ does not suit: [rows] of bool.

    A row's largest score m decides: it must keep low < m − φ < high. A smaller score below it is harmless. −inf is a
    masked key; a row that sees no key need not be recomputed. A row with NaN must.
    """
    m = scores.amax(dim=1)
    inside = (low < m - phi) & (m - phi < high)
    return ~inside & (m != -torch.inf)


_INSIDE = "(low < m - phi) & (m - phi < high)"

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
    [
        "every score must stay: A score far below the row's largest has a weight that nobody sees, whatever φ is: the "
        "largest counts.",
        (_INSIDE, "((scores == -INF) | (low < scores - phi) & (scores - phi < high)).all(dim=1)"),
        "one verdict for all rows: Each row has its own largest score: the maximum over dim=1, not over all.",
        (_INSIDE, "(low < scores.max() - phi) & (scores.max() - phi < high)"),
        "NaN passes: NaN is neither ≤ low nor ≥ high: ask whether the row is inside and turn the answer round, then "
        "it counts as outside.",
        (_INSIDE, "~((m - phi <= low) | (m - phi >= high))"),
        "the edges pass: The band's edges are outside: low < m − φ < high, strictly.",
        (_INSIDE, "(low <= m - phi) & (m - phi <= high)"),
        "only the upper edge: A row whose every score lies far below φ has weights that underflow: the lower edge "
        "counts, too.",
        (_INSIDE, "m - phi < high"),
        "a band like a radius: The band has two ends, low and high, which need not lie equally far from φ.",
        (_INSIDE, "(m - phi).abs() < high"),
        "a row without keys: A row that sees nothing has m = −∞ and is 0 either way: there is nothing to recompute.",
        (" & (m != -torch.inf)", ""),
        "rows with a masked key: A masked key says nothing of the row's others: only a row that sees none is left out.",
        ("(m != -torch.inf)", "(scores != -torch.inf).all(dim=1)"),
        "φ forgotten: The band is one of m − φ, not of m.",
        (" - phi", ""),
        "the other way round: Those are the rows that φ suits, or see nothing.",
        ("~inside & (m != -torch.inf)", "inside | (m == -torch.inf)"),
    ],
    "one number per row decides, and nobody compares every score.",
    imports="import torch\nfrom torch import Tensor",
)


def unified_output(pieces: list[tuple[Tensor, Tensor]], phi: float) -> Tensor:
    """softmax(s) @ v, where the pieces hold (scores [n], values [n, D]) and φ serves all of them as maximum.

    Sums in float32. −inf is a masked key; if no piece has another, the result is 0.
    """
    weights = [torch.exp(scores.float() - phi) for scores, _ in pieces]
    l = sum(w.sum() for w in weights)
    acc = sum(w @ values.float() for w, (_, values) in zip(weights, pieces, strict=True))
    return acc / l if l > 0 else acc


def _pieces(pieces: list[tuple[list[float], list[float]]], phi: float) -> Case:
    return call([(torch.tensor(scores), torch.tensor(values)[:, None]) for scores, values in pieces], phi)


UNIFIED_OUTPUT = python_exercise(
    unified_output,
    [
        _pieces([([1.0], [3.0])], 1.0),
        _pieces([([1.0], [3.0])], 0.0),
        _pieces([([0.0, 0.0], [3.0, 1.0])], 2.0),
        _pieces([([0.0], [3.0]), ([1.0, 0.0], [1.0, 5.0])], 0.5),
        _pieces([([200.0], [3.0]), ([201.0], [1.0])], 200.0),
        _pieces([([0.0], [3.0]), ([1.0], [1.0])], 30.0),
        _pieces([([-INF, 0.0], [3.0, 1.0]), ([-INF], [4.0])], 0.0),
        _pieces([([-INF], [3.0])], 0.0),
        call([(torch.tensor([12.0, 11.0]).half(), small_numbers(2, 2).half())], 0.0),
    ],
    [
        "each piece's own maximum: Each piece subtracted its own maximum: their sums are relative to different "
        "numbers. φ is one for all.",
        (" - phi", " - scores.max()"),
        "φ forgotten: exp overflows: φ must be subtracted from every score.",
        (" - phi", ""),
        "the mean of the pieces: That is the mean of the pieces' outputs: add up l and acc, and divide once.",
        ("l = sum(w.sum() for w in weights)", "weights, l = [w / w.sum() for w in weights], len(weights)"),
        "multiplied by e^φ: φ cancels: acc and l both carry the factor exp(−φ), their quotient does not.",
        ("acc / l", "acc / l * math.exp(phi)"),
        "not divided: acc is not divided by l yet.",
        ("acc / l if l > 0 else acc", "acc"),
        "an epsilon: With φ far above the scores l is small, and right: what is added to it, or put in its place, is "
        "not small beside it. Only l = 0 is special.",
        ("for w in weights)", "for w in weights) + 1e-6"),
        "NaN without keys: No piece has a visible key: l is 0, and 0 / 0 is NaN. The result is 0 then.",
        (" if l > 0 else acc", ""),
        "weights in float16: A float16 ends at 65504, which is exp(11.09): with φ for a maximum weights are larger "
        "than 1, so they belong in float32.",
        ("torch.exp(scores.float() - phi)", "torch.exp(scores - phi).float()"),
    ],
    "the pieces may come in any order, and none knows the others' maximum.",
    imports="import torch\nfrom torch import Tensor",
)


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


def _fold(m: float, l: float, acc: float, scores: list[float], threshold: float) -> Case:
    values = torch.arange(1.0, len(scores) + 1)[:, None]
    return call(torch.tensor(m), torch.tensor(l), torch.tensor([acc]), torch.tensor(scores), values, threshold)


LAZY_FOLD = python_exercise(
    lazy_fold,
    [
        _fold(0.0, 1.0, 3.0, [-1.0], 8.0),
        _fold(0.0, 1.0, 3.0, [5.0], 8.0),
        _fold(0.0, 1.0, 3.0, [7.0, 1.0], 8.0),
        _fold(0.0, 1.0, 3.0, [-9.0], 8.0),
        _fold(-INF, 0.0, 0.0, [-20.0, -21.0], 8.0),
        _fold(2.0, 1.0, 3.0, [-INF, -INF], 8.0),
        _fold(-INF, 0.0, 0.0, [-INF], 8.0),
        _fold(0.0, 2.0, 3.0, [0.5, -INF], 0.0),
    ],
    [
        "always raised: m followed at once: it stays where the tile's largest score is within the threshold.",
        (" + threshold * math.log(2)", ""),
        "a natural threshold: The threshold is in units of log 2: 8 lets weights grow to 2⁸, not to e⁸.",
        (" * math.log(2)", ""),
        "m falls: m fell to that of a tile far below it: it is raised or stays, and small weights are small.",
        ("largest > m + threshold", "abs(largest - m) > threshold"),
        "not the first tile: Before the first key m is −∞, and every score is more than a threshold above it: m "
        "becomes the first tile's largest score.",
        ("    if largest > m", "    m = m.masked_fill(m == -math.inf, 0.0)\n    if largest > m"),
        "only m: m was raised, l and acc were not brought along: both shrink by exp(m − m′).",
        ("shrink * l, shrink * acc", "l, acc"),
        "acc does not shrink: m was raised, l shrank and acc did not: both are relative to m.",
        ("shrink * acc", "acc"),
        "weights by another maximum: m stayed, and the weights are relative to the tile's own maximum: all must be "
        "relative to the same m, even if they are larger than 1.",
        ("torch.exp(scores - m)", "torch.exp(scores - torch.maximum(m, largest))"),
        "NaN for a masked tile: (−∞) − (−∞) is NaN: a tile that is masked as a whole changes nothing.",
        ("    if largest == -math.inf:\n        return m, l, acc\n", ""),
    ],
    "any finite m is exact, so it need not be the largest.",
    imports="import math\nimport torch\nfrom torch import Tensor",
)

EXERCISES = [ROWS_TO_RECOMPUTE, UNIFIED_OUTPUT, LAZY_FOLD]
