"""Exercises of lesson 6: the inner loop, the tiles that a mask leaves, the backward of softmax."""

import math

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers


def flash_tile_loop(Q_i: Tensor, k: Tensor, v: Tensor, Bc: int) -> tuple[Tensor, Tensor]:
    """(O_i, L_i) of the queries Q_i [Br, D] over all keys and values [S, D], Bc of them at a time: FlashAttention-2.

    No mask; scores are q·k / √D. O_i [Br, D] is divided once, after the last tile; L_i [Br] is the log-sum-exp.
    """
    m = torch.full(Q_i.shape[:1], -torch.inf)
    l, O_i = torch.zeros_like(m), torch.zeros_like(Q_i)
    for start in range(0, len(k), Bc):
        K_j, V_j = k[start : start + Bc], v[start : start + Bc]
        S_ij = Q_i @ K_j.T / Q_i.shape[1] ** 0.5
        m_new = torch.maximum(m, S_ij.amax(dim=1))
        P_ij, shrink = torch.exp(S_ij - m_new[:, None]), torch.exp(m - m_new)
        l = shrink * l + P_ij.sum(dim=1)
        O_i = shrink[:, None] * O_i + P_ij @ V_j
        m = m_new
    return O_i / l[:, None], m + torch.log(l)


def _column(*numbers: float) -> Tensor:
    return torch.tensor(numbers)[:, None]


FLASH_TILE_LOOP = python_exercise(
    flash_tile_loop,
    [
        call(_column(1.0), _column(2.0), _column(5.0), 1),
        call(_column(1.0), _column(1.0, 0.0), _column(4.0, 1.0), 1),
        call(_column(1.0), _column(0.0, 1.0), _column(1.0, 4.0), 1),
        call(_column(1.0), _column(200.0, 0.0), _column(1.0, 4.0), 1),
        call(_column(1.0), _column(0.0, 1.0, 2.0, 2.0), _column(1.0, 4.0, 0.0, 3.0), 2),
        call(_column(1.0, 2.0), _column(0.0, 2.0, 1.0), _column(1.0, 4.0, 0.0), 2),
        call(_column(1.0, 200.0), _column(1.0, 0.0), _column(4.0, 1.0), 2),
        call(small_numbers(3, 4), small_numbers(5, 4) / 4, small_numbers(5, 4), 2),
    ],
    [
        "O does not shrink: The maximum rose with a later tile, l shrank and O_i did not: both are relative to m, and "
        "shrink by exp(m − m_new).",
        ("shrink[:, None] * O_i", "O_i"),
        "l does not shrink: The maximum rose with a later tile, O_i shrank and l did not: both are relative to m, and "
        "shrink by exp(m − m_new).",
        ("shrink * l", "l"),
        "divided at every step: O_i is divided by l after every tile, and the next one adds to it as if it were not. "
        "Version 1 multiplies by the old l again; version 2 divides once, after the loop.",
        ("        m = m_new\n", "        O_i, m = O_i / l[:, None], m_new\n"),
        ("return O_i / l[:, None]", "return O_i"),
        "the tile's own maximum: exp overflows: m has to be the largest score so far, m_new = max(m, the tile's), and "
        "is subtracted from all.",
        ("torch.maximum(m, S_ij.amax(dim=1))", "S_ij.amax(dim=1)"),
        "one maximum for all: Each query has its own m, the maximum over dim=1: far below another's maximum all its "
        "weights are 0.",
        ("S_ij.amax(dim=1)", "S_ij.amax().expand(len(Q_i))"),
        "m never rises: m is still −∞ after the loop: it becomes m_new at the end of every turn.",
        ("        m = m_new\n", ""),
        "shrinks the wrong way: Before the first tile m_new − m is +∞: l and O_i shrink by exp(m − m_new).",
        ("torch.exp(m - m_new)", "torch.exp(m_new - m)"),
        "never divided: O_i is still the sum of weighted values: after the last tile it is divided by l.",
        ("O_i / l[:, None]", "O_i"),
        "lse without m: log l is relative to m: the log-sum-exp of the scores is m + log l.",
        ("m + torch.log(l)", "torch.log(l)"),
        "whole tiles only: The last tile is shorter when Bc does not divide S, and must not be left out.",
        ("range(0, len(k), Bc)", "range(0, len(k) - len(k) % Bc, Bc)"),
        "no scale: The scores are q·k / √D: with D = 1 nobody sees the difference.",
        (" / Q_i.shape[1] ** 0.5", ""),
    ],
    "each score was used once and forgotten, O_i was divided once, and one number per query is left for the backward.",
    imports="import torch\nfrom torch import Tensor",
)


def tile_range(i: int, Br: int, Bc: int, T: int, S: int) -> tuple[int, int]:
    """(full, stop): what row tile i has to do under a causal mask, where query t sees key s iff s ≤ t + S − T.

    Its queries are i · Br … min((i + 1) · Br, T) − 1. Column tiles 0 … full − 1 need no mask: every query sees all
    Bc keys. Column tiles full … stop − 1 need one. The others hold no key that any of its queries sees.
    """
    first, last = i * Br + S - T, min((i + 1) * Br, T) - 1 + S - T  # the last keys that its first and last query see
    return max(0, first + 1) // Bc, -(-max(0, last + 1) // Bc)


TILE_RANGE = python_exercise(
    tile_range,
    [
        call(0, 2, 2, 8, 8),
        call(1, 2, 2, 8, 8),
        call(3, 3, 2, 12, 12),
        call(1, 4, 4, 16, 16),
        call(0, 2, 2, 4, 8),
        call(1, 4, 3, 6, 6),
        call(0, 3, 2, 9, 4),
        call(0, 1, 16, 1, 100),
    ],
    [
        "top left: That is right when T = S. Otherwise the last query sees the last key: add S − T to a query's index.",
        (" + S - T", ""),
        "a tile too few: The last query sees a part of one tile more: keys 0 … last are last + 1 keys, and their "
        "tiles are rounded up.",
        ("-(-max(0, last + 1) // Bc)", "max(0, last + 1) // Bc"),
        "mask-free for the last query: `full` counts the tiles that the tile's *last* query sees whole: its first "
        "query sees fewer keys.",
        ("max(0, first + 1)", "max(0, last + 1)"),
        "mask-free a tile too far: Tile `full − 1` is not seen whole by the first query: the number of keys it sees "
        "is rounded down.",
        ("first + 1", "first + Bc"),
        "the own key left out: A query sees its own key too: the first one sees first + 1 keys, not first.",
        ("first + 1", "first"),
        "negative: The first queries see no key at all when T > S: no tile is left then, not fewer.",
        ("max(0, first + 1)", "(first + 1)"),
        ("max(0, last + 1)", "(last + 1)"),
        "past the last query: The last row tile has fewer than Br queries: the last of them is T − 1, and no key lies "
        "behind S − 1.",
        ("min((i + 1) * Br, T)", "(i + 1) * Br"),
    ],
    "about half of the tiles are never touched, and of the rest only those on the diagonal pay for a mask.",
)


def softmax_backward(P: Tensor, dP: Tensor, O: Tensor, dO: Tensor, scale: float) -> Tensor:
    """The gradient of the products Q Kᵀ [T, S], where P = softmax(scale · Q Kᵀ) and O = P V.

    Given the gradients dP [T, S] of P and dO [T, D] of O. Use D = rowsum(dO ∘ O), so that a tile of P and dP is enough.
    """
    D = (dO * O).sum(dim=1, keepdim=True)
    return P * (dP - D) * scale


def _softmax_and_back(scores: list[list[float]], scale: float = 1.0, D: int = 2) -> Case:
    products = torch.tensor(scores)
    P = torch.softmax(scale * products, dim=1)
    V, dO = small_numbers(products.shape[1], D), small_numbers(products.shape[0], D) + 1
    return call(P, dO @ V.T, P @ V, dO, scale)


_D = "(dO * O).sum(dim=1, keepdim=True)"

SOFTMAX_BACKWARD = python_exercise(
    softmax_backward,
    [
        _softmax_and_back([[3.0]]),
        _softmax_and_back([[0.0, math.log(3.0)]]),
        _softmax_and_back([[0.0, math.log(3.0)], [1.0, 1.0]]),
        _softmax_and_back([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]], scale=0.5),
        _softmax_and_back([[0.0, 1.0], [1.0, 3.0], [2.0, 2.0]], scale=0.5, D=3),
    ],
    [
        "D forgotten: D is missing: to raise one weight of a row is to lower the others, since their sum stays 1. A "
        "single key has weight 1 whatever its score is: gradient 0.",
        ("(dP - D)", "dP"),
        "summed over the queries: You summed over the queries: the weights of a *row* are tied together, so D sums "
        "along a row of P ∘ dP, which is a row of dO ∘ O.",
        (_D, "(P * dP).sum(dim=0, keepdim=True)"),
        "a number per dimension: D is one number per query, the sum over the dimensions of the head: dim=1, not dim=0.",
        (_D, "(dO * O).sum(dim=0)"),
        "its own weight only: P (1 − P) is what a score does to its own weight. It lowers all others of the row too, "
        "by P_ij P_ik: together that makes D.",
        ("(dP - D)", "(1 - P) * dP"),
        "one number for all: You summed over everything: D is one number per query, the sum over dim=1 only.",
        (_D, "(dO * O).sum()"),
        "D along the keys: D [T] against dP [T, S]: torch lines it up with the keys. Keep the dimension: keepdim=True.",
        (", keepdim=True", ""),
        "scale forgotten: That is the gradient of the scores: the products Q Kᵀ were multiplied by the scale, so is "
        "their gradient.",
        (" * scale", ""),
        "the other way round: The sign is turned round: a weight whose dP is above D, the row's mean of dP, should "
        "grow.",
        ("dP - D", "D - dP"),
        "P forgotten: The factor P is missing: a key with a small weight has a small gradient.",
        ("P * (dP", "(dP"),
    ],
    "the backward needs P, dP and one number per query, so it goes tile by tile as the forward did.",
    imports="from torch import Tensor",
)

EXERCISES = [FLASH_TILE_LOOP, TILE_RANGE, SOFTMAX_BACKWARD]
