"""Exercises of lesson 3: merge, streaming attention, online softmax as a Triton kernel."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pagewise.exercises.code import Gap, device_code, with_gaps
from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.triton import TritonExercise, launching
from pagewise.exercises.values import text
from pagewise.tools.launch import launch

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
    """Return (m, l, acc) of one row of scores. Its values are [value, 2], [value + 1, 2], …"""
    s = torch.tensor([scores])
    values = torch.tensor([[value + i, 2.0] for i in range(len(scores))]).reshape(-1, 2)
    m = s.amax(-1) if scores else torch.tensor([-INF])
    weights = torch.exp(s - m.masked_fill(m == -INF, 0.0))
    return m, weights.sum(-1), weights @ values


def _rows(*pieces: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


_L, _ACC = "of_a * a[1] + of_b * b[1]", "of_a[:, None] * a[2] + of_b[:, None] * b[2]"

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
    [
        "nothing shrinks: l and acc were summed relative to their own maxima: before they are added, each shrinks by "
        "exp(its old m − the new m).",
        (_L, "a[1] + b[1]"),
        (_ACC, "a[2] + b[2]"),
        "acc does not shrink: l shrank, acc did not: both were summed relative to the old maximum.",
        (_ACC, "a[2] + b[2]"),
        "only the first shrinks: You take it that the second has the larger maximum: it may be the first, then the "
        "second shrinks.",
        ("torch.exp(b[0] - m_safe)", "torch.ones_like(m)"),
        "the other way round: It grew instead of shrinking: the factor is exp(old m − new m), never above 1.",
        ("torch.exp(a[0] - m_safe), torch.exp(b[0] - m_safe)", "torch.exp(m - a[0]), torch.exp(m - b[0])"),
        "NaN where nothing was seen: Neither piece saw a key: m is −inf, and (−inf) − (−inf) is NaN. Subtract 0 there "
        "instead.",
        ("m_safe = m.masked_fill(m == -torch.inf, 0.0)", "m_safe = m"),
        "normalised: acc is divided by l already: then the next merge counts it as if l were 1. Divide once, at the "
        "end.",
        (_ACC, f"({_ACC}) / ({_L})[:, None]"),
    ],
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
    [
        "acc does not shrink: The maximum rose, l shrank and acc did not: both are relative to m.",
        ("acc * shrink", "acc"),
        "l does not shrink: The maximum rose, acc shrank and l did not: both are relative to m.",
        ("l * shrink", "l"),
        "m from 0: All scores may be far below 0: with m = 0 at first every exp(s − m) vanishes. Begin with −inf.",
        ("m, l, acc = -math.inf", "m, l, acc = 0.0"),
        "no maximum: exp(−1000) is 0 and exp(1000) overflows: only exp(s − m) is safe.",
        ("max(m, score)", "0.0"),
        "a masked first key: The first key is masked, m is still −inf, and (−inf) − (−inf) is NaN: such a key changes "
        "nothing.",
        ("        if m_new == -math.inf:\n            continue\n", ""),
        "divided by nothing: No key was visible, l is 0: the answer is 0 then.",
        (" if l else 0.0", ""),
        "two passes: The pairs come only once: your first loop took them all, the second found none.",
        ("m, l, acc = -math.inf", "m, l, acc = max((score for score, _ in pairs), default=0.0)"),
    ],
    "one pass, three numbers, no score too large.",
    imports="import math\nfrom collections.abc import Iterable",
)


def _softmax_rows(what: str, rows: list[list[float]], tile: int = 4) -> Case:
    """Other numbers follow the rows in memory. A kernel may neither read nor overwrite them."""

    def run(kernel: object, device: torch.device) -> object:
        x = torch.tensor(rows, device=device)
        read = torch.cat([x.flatten(), x.new_full((16,), 3.0)])
        written = torch.full_like(read, -7.0)
        launch(kernel, (len(rows),), read, written, x.shape[1], outputs=(written,), TILE=tile)
        return {"out": written[: x.numel()].view_as(x), "behind out": written[x.numel() :][:4]}

    return launching(f"x = {text(rows)}, TILE = {tile}{what}", run)


_KERNEL = device_code("online_softmax_kernel.py")

ONLINE_SOFTMAX_KERNEL = TritonExercise(
    "online_softmax_kernel",
    _KERNEL,
    with_gaps(
        _KERNEL,
        Gap(
            "inside = start",
            "m = m_new",
            "load the tile (what stands past the row's end must weigh nothing), then bring m and l up to date",
        ),
        Gap("inside = start", "tl.store(", "store exp(x − m_safe) / l_safe, and nothing past the row's end"),
    ),
    [
        _softmax_rows("", [[1.0, 2.0, 3.0, 4.0]]),
        _softmax_rows("", [[1.0, 2.0, 3.0]]),
        _softmax_rows("", [[5.0, 1.0, 1.0, 1.0, 2.0, 3.0]]),
        _softmax_rows("", [[1.0, 1.0, 1.0, 1.0, 5.0, 6.0]]),
        _softmax_rows("", [[1.0, 2.0, 3.0], [1000.0, 1001.0, 0.0]]),
        _softmax_rows(" (the first tile is all masked)", [[-INF] * 4 + [1.0, 2.0]]),
        _softmax_rows("", [[-INF, -INF]]),
    ],
    [
        "mask before the offset: Keys past the end got weight: your mask compares before the offset `start` is added.",
        ("inside = start + cols < num_cols", "inside = cols < num_cols"),
        "padding of 0: What stands past the row's end was loaded as 0, a score like any other: `other` must be −inf.",
        ('mask=inside, other=float("-inf")', "mask=inside, other=0.0"),
        "no mask on loading: The tile goes past the row's end, and what lies there was counted in: load with `mask` "
        "and `other`.",
        (', mask=inside, other=float("-inf")', ""),
        "no mask on storing: Numbers behind the end were overwritten: store with the mask, too.",
        ("/ l_safe, mask=inside", "/ l_safe"),
        "l does not shrink: The maximum rose with a later tile, and l kept what was summed relative to the old one: "
        "it shrinks by exp(m − m_new).",
        ("l = l * tl.exp(m - m_safe) + ", "l = l + "),
        "only the last tile: l forgets the tiles before: the sum of this one is added to what l was, shrunk.",
        ("l = l * tl.exp(m - m_safe) + ", "l = "),
        "the other way round: exp(m_new − m) is infinite while m is −inf, and 0 · inf is NaN: l shrinks by exp(m − "
        "m_new).",
        ("l * tl.exp(m - m_safe)", "l * tl.exp(m_safe - m)"),
        "NaN in a masked tile: No key was visible so far: m_new is −inf, and (−inf) − (−inf) is NaN. Subtract 0 there.",
        ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = m_new"),
    ],
    "two passes over the row, any length, and nothing behind its end was read or written.",
)

EXERCISES = [MERGE, STREAMING_ATTENTION, ONLINE_SOFTMAX_KERNEL]
