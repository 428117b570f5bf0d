"""Exercises of lesson 6: the whole forward of FlashAttention-2 in torch, and its backward."""

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.lesson_6 import tile_range
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers


def flash_forward(q: Tensor, k: Tensor, v: Tensor, Br: int, Bc: int) -> tuple[Tensor, Tensor, int]:
    """Return (O, L, tiles) of causal attention of one head by FlashAttention-2: q [T, D], k and v [S, D].

    O [T, D] is the output. L [T] is the log-sum-exp of each row of scores. A query without a key gets 0 and −∞.
    `tiles` says how many tiles of scores were computed: none that tile_range leaves out.
    """
    (T, D), S = q.shape, len(k)
    O, L, tiles = torch.zeros_like(q), torch.zeros(T), 0
    for i in range(-(-T // Br)):
        full, stop = tile_range(i, Br, Bc, T, S)
        rows = torch.arange(i * Br, min((i + 1) * Br, T))
        m, l, O_i = torch.full((len(rows),), -torch.inf), torch.zeros(len(rows)), torch.zeros(len(rows), D)
        for j in range(stop):
            cols = torch.arange(j * Bc, min((j + 1) * Bc, S))
            S_ij = q[rows] @ k[cols].T / D**0.5
            if j >= full:
                S_ij = S_ij.masked_fill(cols > rows[:, None] + S - T, -torch.inf)
            m_new = torch.maximum(m, S_ij.amax(dim=1))
            m_finite = m_new.masked_fill(m_new == -torch.inf, 0.0)
            P_ij, alpha = torch.exp(S_ij - m_finite[:, None]), torch.exp(m - m_finite)
            l = alpha * l + P_ij.sum(dim=1)
            O_i = alpha[:, None] * O_i + P_ij @ v[cols]
            m, tiles = m_new, tiles + 1
        O[rows] = O_i / l.masked_fill(l == 0, 1.0)[:, None]
        L[rows] = m + torch.log(l)
    return O, L, tiles


_STATE = "        m, l, O_i = torch.full((len(rows),), -torch.inf), torch.zeros(len(rows)), torch.zeros(len(rows), D)\n"


def _column(*numbers: float) -> Tensor:
    return torch.tensor(numbers)[:, None]


FLASH_FORWARD = python_exercise(
    flash_forward,
    [
        call(_column(1.0), _column(2.0), _column(5.0), 1, 1),
        call(_column(1.0), _column(1.0, 0.0), _column(4.0, 1.0), 1, 1),
        call(_column(1.0), _column(0.0, 1.0), _column(1.0, 4.0), 1, 1),
        call(_column(1.0), _column(200.0, 0.0), _column(1.0, 4.0), 1, 1),
        call(_column(1.0), _column(0.0, 1.0, 2.0, 2.0), _column(1.0, 4.0, 0.0, 3.0), 1, 2),
        call(_column(1.0, 2.0), _column(0.0, 2.0), _column(1.0, 4.0), 2, 2),
        call(_column(1.0, 2.0), _column(0.0, 2.0), _column(1.0, 4.0), 1, 1),
        call(_column(1.0, 2.0), _column(0.0, 2.0, 1.0), _column(1.0, 4.0, 0.0), 2, 2),
        call(_column(1.0, 2.0), _column(0.0), _column(1.0), 2, 1),
        call(_column(1.0, 200.0), _column(1.0, 0.0), _column(4.0, 1.0), 2, 2),
        call(small_numbers(5, 4), small_numbers(7, 4) / 4, small_numbers(7, 4), 2, 3),
    ],
    [
        "no mask: A query sees a key that comes after it. Tiles full … stop − 1 need the causal mask: query t sees "
        "key s if s ≤ t + S − T.",
        ("cols > rows[:, None] + S - T", "cols >= S"),
        "every tile: Your loop computes tiles that no query of the tile sees: stop the loop over keys at `stop`.",
        ("range(stop)", "range(-(-S // Bc))"),
        "neither mask nor skip: Your code reads every key and masks none. Loop over the column tiles 0 … stop − 1, and "
        "mask tiles full … stop − 1.",
        ("range(stop)", "range(-(-S // Bc))"),
        ("cols > rows[:, None] + S - T", "cols >= S"),
        "top left: The mask is right only if T = S. The last query sees the last key: query t sees keys up to t + S − "
        "T.",
        ("rows[:, None] + S - T", "rows[:, None]"),
        "O does not shrink: A later tile raised the maximum. l shrank and O_i did not: multiply both by exp(m − "
        "m_new).",
        ("alpha[:, None] * O_i", "O_i"),
        "l does not shrink: A later tile raised the maximum. O_i shrank and l did not: multiply both by exp(m − "
        "m_new).",
        ("alpha * l", "l"),
        "divided at every step: You divide O_i by l after every tile. Version 1 multiplies by the old l again. "
        "Version 2 divides once, after the loop over keys.",
        (
            "            m, tiles = m_new",
            "            O_i = O_i / l.masked_fill(l == 0, 1.0)[:, None]\n            m, tiles = m_new",
        ),
        ("O_i / l.masked_fill(l == 0, 1.0)[:, None]\n        L", "O_i\n        L"),
        "the tile's own maximum: exp overflows: m must be the largest score of all tiles so far, not of the last tile.",
        ("torch.maximum(m, S_ij.amax(dim=1))", "S_ij.amax(dim=1)"),
        "one maximum for all: Each query has its own m: take the maximum over dim=1. Far below another query's maximum "
        "all weights of a query are 0.",
        ("S_ij.amax(dim=1)", "S_ij.amax().expand(len(rows))"),
        "m never rises: m is still −∞ after the loop: set m to m_new at the end of every iteration.",
        ("m, tiles = m_new, tiles + 1", "tiles = tiles + 1"),
        "never divided: O_i is still a sum of weighted values: divide it by l after the last tile.",
        ("O_i / l.masked_fill(l == 0, 1.0)[:, None]", "O_i"),
        "lse without m: log l is relative to m: the log-sum-exp of the scores is m + log l.",
        ("m + torch.log(l)", "torch.log(l)"),
        "the state of the tile before: Each tile of queries starts from m = −∞, l = 0 and O_i = 0. Yours starts from "
        "the state of the tile before it: set the three inside the loop over i.",
        (_STATE, "        if i == 0:\n    " + _STATE),
        "NaN where nothing is seen: The first queries see no key, so m_new is −∞, and (−∞) − (−∞) is NaN. Subtract 0 "
        "there, and divide by 1 where l is 0.",
        ("m_new.masked_fill(m_new == -torch.inf, 0.0)", "m_new"),
        "divided by 0: A query that sees no key has l = 0, and 0 / 0 is NaN. Its output is 0: divide by 1 there.",
        ("l.masked_fill(l == 0, 1.0)", "l"),
        "no scale: The scores are q · k / √D. With D = 1 the factor is 1, so only larger heads show the mistake.",
        (" / D**0.5", ""),
    ],
    "this is the forward pass of FlashAttention-2: no score left the loop, and no hidden tile was computed.",
    imports="import torch\nfrom torch import Tensor\n\nfrom pagewise.exercises.lesson_6 import tile_range",
)


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, O: Tensor, L: Tensor, dO: Tensor, Br: int, Bc: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dQ, dK, dV) of one head, in tiles of Br queries and Bc keys.

    Every query sees every key. The scale is 1 / √D.
    Given: q, O and dO [T, D], k and v [S, D], and L [T], the log-sum-exp of each row of scores.
    """
    scale, D_i = q.shape[1] ** -0.5, (dO * O).sum(dim=1, keepdim=True)
    dQ, dK, dV = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for j in range(0, len(k), Bc):
        for i in range(0, len(q), Br):
            rows, cols = slice(i, i + Br), slice(j, j + Bc)
            P_ij = torch.exp(scale * q[rows] @ k[cols].T - L[rows, None])
            dP_ij = dO[rows] @ v[cols].T
            dS_ij = P_ij * (dP_ij - D_i[rows])
            dV[cols] += P_ij.T @ dO[rows]
            dK[cols] += scale * dS_ij.T @ q[rows]
            dQ[rows] += scale * dS_ij @ k[cols]
    return dQ, dK, dV


def _back(T: int, S: int, D: int, Br: int, Bc: int) -> Case:
    q, k = small_numbers(T, D) / 4, small_numbers(S, D).flip(0) / 4
    v, dO = small_numbers(S, D), small_numbers(T, D).flip(1) + 1
    scores = q @ k.T / D**0.5
    return call(q, k, v, scores.softmax(dim=1) @ v, scores.logsumexp(dim=1), dO, Br, Bc)


FLASH_BACKWARD = python_exercise(
    flash_backward,
    [
        _back(1, 1, 1, 1, 1),
        _back(1, 2, 1, 1, 2),
        _back(1, 2, 2, 1, 1),
        _back(2, 1, 2, 1, 1),
        _back(2, 2, 1, 1, 1),
        _back(2, 3, 4, 2, 3),
        _back(5, 4, 4, 2, 3),
    ],
    [
        "each tile normalised alone: The weights of a row sum to 1 over *all* keys, and the softmax of a tile makes "
        "them sum to 1 in each tile. L has the whole row: P = exp(S − L).",
        (
            "torch.exp(scale * q[rows] @ k[cols].T - L[rows, None])",
            "torch.softmax(scale * q[rows] @ k[cols].T, dim=1)",
        ),
        "each tile normalised alone, D forgotten: Two things are missing. The weights of a row sum to 1 over *all* "
        "keys: P = exp(S − L). And a larger score lowers all other weights of its row: subtract D_i from dP.",
        (
            "torch.exp(scale * q[rows] @ k[cols].T - L[rows, None])",
            "torch.softmax(scale * q[rows] @ k[cols].T, dim=1)",
        ),
        ("(dP_ij - D_i[rows])", "dP_ij"),
        "not normalised: P is not divided by the sum of its row: subtract L before you take exp.",
        (" - L[rows, None]", ""),
        "D forgotten: D_i is missing. A larger score lowers all other weights of its row, because their sum stays 1: "
        "subtract D_i from dP.",
        ("(dP_ij - D_i[rows])", "dP_ij"),
        "its own weight only: P (1 − P) is the effect of a score on its own weight. A score also lowers all other "
        "weights of its row: both effects together give dP − D_i.",
        ("(dP_ij - D_i[rows])", "(1 - P_ij) * dP_ij"),
        "D of the tile: D_i sums over *all* keys of the row, and a tile holds only some of them: take rowsum(dO ∘ O).",
        ("dP_ij - D_i[rows]", "dP_ij - (P_ij * dP_ij).sum(dim=1, keepdim=True)"),
        "one number for all: D_i is one number per query: sum dO ∘ O over dim=1 only.",
        ("(dO * O).sum(dim=1, keepdim=True)", "(dO * O).sum().expand(len(q), 1)"),
        "dK and dV of the last tile: dK and dV are sums over all tiles of queries: add to them, do not overwrite them.",
        ("dV[cols] +=", "dV[cols] ="),
        ("dK[cols] +=", "dK[cols] ="),
        "dQ of the last tile: dQ is a sum over all tiles of keys: add to it, do not overwrite it.",
        ("dQ[rows] +=", "dQ[rows] ="),
        "no scale in the gradients: dS is the gradient of the scores. The products q · k were multiplied by the "
        "scale, so dQ and dK are multiplied by the scale too.",
        ("scale * dS_ij", "dS_ij"),
        "no scale in the scores: The weights are made again from q · k / √D: the scale is missing.",
        ("scale * q[rows] @ k", "q[rows] @ k"),
        "dV from dS: dV comes from O = P V: the weights multiply dO, not dS.",
        ("P_ij.T @ dO", "dS_ij.T @ dO"),
        "the other way round: The sign of dS is wrong: a weight whose dP is above the row's mean D_i should grow.",
        ("dP_ij - D_i[rows]", "D_i[rows] - dP_ij"),
        "P forgotten: The factor P is missing: a key with a small weight has a small gradient.",
        ("P_ij * (dP_ij", "(dP_ij"),
    ],
    "this is FlashAttention-2's backward pass: no matrix of T × S numbers was kept.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [FLASH_FORWARD, FLASH_BACKWARD]
