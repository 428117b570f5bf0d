"""Exercises of lesson 8, softmax: who must be recomputed, sums that share φ, a lazy maximum."""

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


def _rows_with(mistake: str) -> Callable:
    def rows_to_recompute(scores, phi, low, high):
        if mistake == "elements":
            inside = (low < scores - phi) & (scores - phi < high)
            return (~inside & (scores != -INF)).any(dim=1)
        if mistake == "all together":
            return rows_of_one(scores.amax().expand(len(scores)), phi, low, high)
        m = scores.amax(dim=1)
        if mistake == "NaN":
            return ((m - phi <= low) | (m - phi >= high)) & (m != -INF)
        if mistake == "edges":
            return ~((low <= m - phi) & (m - phi <= high)) & (m != -INF)
        if mistake == "upper edge":
            return ~(m - phi < high)
        if mistake == "no key":
            return ~((low < m - phi) & (m - phi < high))
        if mistake == "phi":
            return rows_of_one(m, 0.0, low, high)
        return ~rows_of_one(m, phi, low, high)

    def rows_of_one(m, phi, low, high):
        return ~((low < m - phi) & (m - phi < high)) & (m != -INF)

    return rows_to_recompute


ROWS_TO_RECOMPUTE = python_exercise(
    rows_to_recompute,
    [
        call(torch.tensor([[0.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[4.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[6.0], [9.0]]), 6.0, -3.0, 3.0),
        call(torch.tensor([[-4.0], [2.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[-9.0, 1.0], [5.0, 1.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[-INF, 1.0], [-INF, -INF]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[7.0, 6.0], [NAN, 6.0]]), 6.0, -3.0, 3.0),
    ],
    {
        "every score must stay": Mistake(
            _rows_with("elements"),
            "A score far below the row's largest has a weight that nobody sees, whatever φ is: the largest counts.",
        ),
        "one verdict for all rows": Mistake(
            _rows_with("all together"), "Each row has its own largest score: the maximum over dim=1, not over all."
        ),
        "NaN passes": Mistake(
            _rows_with("NaN"),
            "NaN is neither ≤ low nor ≥ high: ask whether the row is inside and turn the answer round, then it counts "
            "as outside.",
        ),
        "the edges pass": Mistake(_rows_with("edges"), "The band's edges are outside: low < m − φ < high, strictly."),
        "only the upper edge": Mistake(
            _rows_with("upper edge"),
            "A row whose every score lies far below φ has weights that underflow: the lower edge counts, too.",
        ),
        "a row without keys": Mistake(
            _rows_with("no key"),
            "A row that sees nothing has m = −∞ and is 0 either way: there is nothing to recompute.",
        ),
        "φ forgotten": Mistake(_rows_with("phi"), "The band is one of m − φ, not of m."),
        "the other way round": Mistake(_rows_with(""), "Those are the rows that φ suits, or see nothing."),
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
        return acc if mistake == "sum" or (mistake != "no key" and not l > 0) else acc / l

    return unified_output


_UNIFIED_CASES = [
    ([([1.0], [3.0])], 1.0),
    ([([1.0], [3.0])], 0.0),
    ([([0.0, 0.0], [3.0, 1.0])], 2.0),
    ([([0.0], [3.0]), ([1.0, 0.0], [1.0, 5.0])], 0.5),
    ([([200.0], [3.0]), ([201.0], [1.0])], 200.0),
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

# ------------------------------------------------------------------------------------------------ lazy_fold


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
        if mistake != "masked" and largest == -INF:
            return m, l, acc
        room = {"natural": threshold, "always": 0.0}.get(mistake, threshold * math.log(2))
        rises = largest >= m + room if mistake == "at" else largest > m + room
        if mistake == "first" and m == -INF:
            m = torch.zeros_like(m)
            rises = largest > m + room
        if mistake == "masked" and m == -INF:
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
        call(*_state(-INF, 0.0, 0.0), *_tile(-20.0, -21.0), 8.0),
        call(*_state(2.0, 1.0, 3.0), *_tile(-INF, -INF), 8.0),
        call(*_state(-INF, 0.0, 0.0), *_tile(-INF), 8.0),
        call(*_state(0.0, 2.0, 3.0), *_tile(0.5, -INF), 0.0),
    ],
    {
        "always raised": Mistake(
            _lazy_with("always"), "m followed at once: it stays where the tile's largest score is within the threshold."
        ),
        "a natural threshold": Mistake(
            _lazy_with("natural"), "The threshold is in units of log 2: 8 lets weights grow to 2⁸, not to e⁸."
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

EXERCISES = [ROWS_TO_RECOMPUTE, UNIFIED_OUTPUT, LAZY_FOLD]
