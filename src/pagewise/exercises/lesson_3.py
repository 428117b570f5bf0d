"""Exercises of lesson 3: merge, streaming attention."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case, Mistake
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import text

INF = math.inf


def merge(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The (m, l, acc) of the keys of a and of b together, from theirs: m and l [rows], acc [rows, D].

    m is the largest score, l = Σ exp(s − m), acc = Σ exp(s − m) · v. No key seen: m = −inf, l = 0, acc = 0.
    """
    m = torch.maximum(a[0], b[0])
    m_safe = m.masked_fill(m == -torch.inf, 0.0)
    of_a, of_b = torch.exp(a[0] - m_safe), torch.exp(b[0] - m_safe)
    return m, of_a * a[1] + of_b * b[1], of_a[:, None] * a[2] + of_b[:, None] * b[2]


def _piece(*scores: float, value: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, acc) of one row of scores, whose values are [value, 2], [value + 1, 2], …"""
    s = torch.tensor([scores])
    values = torch.tensor([[value + i, 2.0] for i in range(len(scores))]).reshape(-1, 2)
    m = s.amax(-1) if scores else torch.tensor([-INF])
    weights = torch.exp(s - m.masked_fill(m == -INF, 0.0))
    return m, weights.sum(-1), weights @ values


def _rows(*pieces: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def _merge_by(combine: Callable) -> Callable:
    """A merge where `combine(m, (m, l, acc), (m, l, acc))` gives l and acc."""
    return lambda a, b: (torch.maximum(a[0], b[0]), *combine(torch.maximum(a[0], b[0]), a, b))


def _shrink(old: Tensor, new: Tensor) -> Tensor:
    return torch.exp(old - new.masked_fill(new == -INF, 0.0))


MERGE = python_exercise(
    merge,
    [
        call(_piece(0.0), _piece(0.0, value=3.0)),
        call(_piece(1.0, 2.0), _piece(3.0, 4.0, value=3.0)),
        call(_piece(3.0, 4.0), _piece(1.0, 2.0, value=3.0)),
        call(_piece(1.0, 2.0), _piece()),
        call(_piece(), _piece()),
        call(_rows(_piece(0.0), _piece(5.0)), _rows(_piece(1.0, value=3.0), _piece(2.0, value=4.0))),
    ],
    {
        "nothing shrinks": Mistake(
            _merge_by(lambda m, a, b: (a[1] + b[1], a[2] + b[2])),
            "l and acc were summed relative to their own maxima: before they are added, each shrinks by "
            "exp(its old m − the new m).",
        ),
        "acc does not shrink": Mistake(
            _merge_by(lambda m, a, b: (_shrink(a[0], m) * a[1] + _shrink(b[0], m) * b[1], a[2] + b[2])),
            "l shrank, acc did not: both were summed relative to the old maximum.",
        ),
        "only the first shrinks": Mistake(
            _merge_by(
                lambda m, a, b: (_shrink(a[0], m) * a[1] + b[1], _shrink(a[0], m)[:, None] * a[2] + b[2]),
            ),
            "You take it that the second has the larger maximum: it may be the first, then the second shrinks.",
        ),
        "the other way round": Mistake(
            _merge_by(
                lambda m, a, b: (
                    _shrink(m, a[0]) * a[1] + _shrink(m, b[0]) * b[1],
                    _shrink(m, a[0])[:, None] * a[2] + _shrink(m, b[0])[:, None] * b[2],
                )
            ),
            "It grew instead of shrinking: the factor is exp(old m − new m), never above 1.",
        ),
        "NaN where nothing was seen": Mistake(
            _merge_by(
                lambda m, a, b: (
                    (a[0] - m).exp() * a[1] + (b[0] - m).exp() * b[1],
                    (a[0] - m).exp()[:, None] * a[2] + (b[0] - m).exp()[:, None] * b[2],
                )
            ),
            "Neither piece saw a key: m is −inf, and (−inf) − (−inf) is NaN. Subtract 0 there instead.",
        ),
        "normalised": Mistake(
            lambda a, b: (merge(a, b)[0], merge(a, b)[1], merge(a, b)[2] / merge(a, b)[1][:, None]),
            "acc is divided by l already: then the next merge counts it as if l were 1. Divide once, at the end.",
        ),
    },
    "in any order and any grouping, and nothing seen merges without a change.",
    imports="import torch\nfrom torch import Tensor",
)


def streaming_attention(pairs: Iterable[tuple[float, float]]) -> float:
    """Σ softmax(s) · v over (score, value) pairs that come one at a time and only once; any score may be −inf.

    Plain Python: keep m, l and acc (`math.exp`, `math.inf`). No visible key at all: 0.0.
    """
    m, l, acc = -math.inf, 0.0, 0.0
    for score, value in pairs:
        m_new = max(m, score)
        if m_new == -math.inf:
            continue
        shrink, weight = math.exp(m - m_new), math.exp(score - m_new)
        l, acc, m = l * shrink + weight, acc * shrink + weight * value, m_new
    return acc / l if l else 0.0


def _stream(*pairs: tuple[float, float]) -> Case:
    return Case(f"iter({text(list(pairs))})", lambda theirs: theirs(iter(pairs)))


def _stream_with(mistake: str) -> Callable:
    def streaming_attention(pairs):
        m, l, acc = 0.0 if mistake == "m from 0" else -math.inf, 0.0, 0.0
        for score, value in pairs:
            m_new = max(m, score)
            if m_new == -math.inf and mistake != "masked":
                continue
            shrink, weight = math.exp(m - m_new), math.exp(score - m_new)
            if math.isnan(m - m_new):
                shrink = weight = math.nan
            l = (l if mistake == "l" else l * shrink) + weight
            acc = (acc if mistake == "acc" else acc * shrink) + weight * value
            m = m_new
        return acc / l if l or mistake == "empty" else 0.0

    return streaming_attention


def _no_maximum(pairs):
    l = acc = 0.0
    for score, value in pairs:
        l, acc = l + math.exp(score), acc + math.exp(score) * value
    return acc / l if l else 0.0


def _two_passes(pairs):
    m = max((score for score, _ in pairs), default=0.0)
    l = acc = 0.0
    for score, value in pairs:
        l, acc = l + math.exp(score - m), acc + math.exp(score - m) * value
    return acc / l if l else 0.0


STREAMING_ATTENTION = python_exercise(
    streaming_attention,
    [
        _stream((0.0, 5.0)),
        _stream((2.0, 1.0), (1.0, 4.0)),
        _stream((1.0, 1.0), (2.0, 4.0)),
        _stream((-1000.0, 1.0), (-1001.0, 4.0)),
        _stream((1000.0, 1.0), (1001.0, 4.0)),
        _stream((-INF, 7.0), (0.0, 1.0)),
        _stream((-INF, 7.0)),
        _stream(),
    ],
    {
        "acc does not shrink": Mistake(
            _stream_with("acc"), "The maximum rose, l shrank and acc did not: both are relative to m."
        ),
        "l does not shrink": Mistake(
            _stream_with("l"), "The maximum rose, acc shrank and l did not: both are relative to m."
        ),
        "m from 0": Mistake(
            _stream_with("m from 0"),
            "All scores may be far below 0: with m = 0 at first every exp(s − m) vanishes. Begin with −inf.",
        ),
        "no maximum": Mistake(_no_maximum, "exp(−1000) is 0 and exp(1000) overflows: only exp(s − m) is safe."),
        "a masked first key": Mistake(
            _stream_with("masked"),
            "The first key is masked, m is still −inf, and (−inf) − (−inf) is NaN: such a key changes nothing.",
        ),
        "divided by nothing": Mistake(_stream_with("empty"), "No key was visible, l is 0: the answer is 0 then."),
        "two passes": Mistake(
            _two_passes, "The pairs come only once: your first loop took them all, the second found none."
        ),
    },
    "one pass, three numbers, no score too large.",
    imports="import math\nfrom collections.abc import Iterable",
)

EXERCISES = [MERGE, STREAMING_ATTENTION]
