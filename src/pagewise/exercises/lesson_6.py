"""Exercises of lesson 6: the numbers that both loops move, the tiles of a causal mask, and the loops in torch."""

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers


def numbers_moved(T: int, S: int, D: int, Br: int, Bc: int) -> tuple[int, int]:
    """Return how many numbers versions 1 and 2 load and store for T queries and S keys of one head.

    Br and Bc are the queries and keys of a tile. The last tile may be smaller. Every query sees every key.
    Version 1 stores its first O, m and l before the loops. Inside the loops it loads and stores all three.
    Version 2 stores O, and one number L for each query.
    """
    row_tiles, col_tiles = -(-T // Br), -(-S // Bc)
    state = T * D + 2 * T  # O, m and l
    version_1 = state + 2 * S * D + col_tiles * (T * D + 2 * state)
    version_2 = T * D + row_tiles * 2 * S * D + T * D + T
    return version_1, version_2


NUMBERS_MOVED = python_exercise(
    numbers_moved,
    [
        call(1, 1, 1, 1, 1),
        call(2, 1, 1, 2, 1),
        call(1, 2, 1, 1, 1),
        call(2, 2, 1, 1, 2),
        call(3, 5, 2, 2, 2),
        call(1024, 1024, 64, 64, 384),
    ],
    [
        "each number once: These are the numbers of Q, K, V and O, each counted once. The loops load or store some "
        "of them again, and also m, l and L. Look at each line with `load` or `store`, and at the loop that it is in.",
        (
            "state + 2 * S * D + col_tiles * (T * D + 2 * state)",
            "2 * T * D + 2 * S * D",
        ),
        ("T * D + row_tiles * 2 * S * D + T * D + T", "2 * T * D + 2 * S * D"),
        "the first O is missing: Version 1 stores zeros in O and l, and −∞ in m, before its loops.",
        ("version_1 = state + 2", "version_1 = 2"),
        "m and l are missing: Version 1 also moves m and l: two numbers for each query, wherever it moves O.",
        ("state = T * D + 2 * T", "state = T * D"),
        "L is missing: Version 2 also stores L, one number for each query.",
        (" + T * D + T\n", " + T * D\n"),
        "O is only stored: Version 1 loads O, m and l of a tile before it stores them: both directions count.",
        ("T * D + 2 * state", "T * D + state"),
        "O in every iteration of version 2: Version 2 keeps O on the chip until the row is done: it stores O once.",
        ("+ T * D + T\n", "+ col_tiles * T * D + T\n"),
        "K and V once: Version 2 loads all of K and V for each tile of queries.",
        ("row_tiles * 2 * S * D", "2 * S * D"),
        "K and V for each query: The queries of a tile share the K and V that are loaded: count tiles of queries, not "
        "queries.",
        ("row_tiles * 2", "T * 2"),
        "Q, O for each key: The keys of a tile share the Q and O that are loaded: count tiles of keys, not keys.",
        ("col_tiles * (", "S * ("),
        "whole tiles only: The last tile may be smaller, and it needs its own iteration: round the number of tiles up.",
        ("-(-T // Br), -(-S // Bc)", "T // Br, S // Bc"),
        "tiles exchanged: Version 1 repeats its inner loop once per tile of keys, version 2 once per tile of queries.",
        ("-(-T // Br), -(-S // Bc)", "-(-S // Bc), -(-T // Br)"),
    ],
    "the same count as `count_work` finds in the package's loops.",
    start="""\
once = T * D + 2 * S * D + T * D  # Q, K and V, O
return once, once""",
)


def tile_range(i: int, Br: int, Bc: int, T: int, S: int) -> tuple[int, int]:
    """Return (full, stop) for row tile i under a causal mask: query t sees key s if s ≤ t + S − T.

    The queries of the tile are i · Br … min((i + 1) · Br, T) − 1.
    Column tiles 0 … full − 1 need no mask: every query sees all Bc keys. Column tiles full … stop − 1 need a mask.
    The other column tiles hold no key that a query of the tile sees.
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
        "every tile: You visit every tile and mask each of them. A causal mask hides the keys after the last query of "
        "the tile: which key does that query see last?",
        (
            "max(0, first + 1) // Bc, -(-max(0, last + 1) // Bc)",
            "0, -(-S // Bc)",
        ),
        "top left: This is right if T = S. Otherwise the last query sees the last key: add S − T to a query's index.",
        (" + S - T", ""),
        "a tile too few: The last query also sees a part of the next tile. It sees keys 0 … last, which are last + 1 "
        "keys: round their number of tiles up.",
        ("-(-max(0, last + 1) // Bc)", "max(0, last + 1) // Bc"),
        "mask-free for the last query: `full` counts the tiles that the *last* query sees whole. The first query sees "
        "fewer keys, and it needs a mask there.",
        ("max(0, first + 1)", "max(0, last + 1)"),
        "mask-free a tile too far: The first query does not see tile `full − 1` whole: round the number of its tiles "
        "down.",
        ("first + 1", "first + Bc"),
        "the own key left out: A query sees its own key too: the first query sees first + 1 keys, not first.",
        ("first + 1", "first"),
        "negative: If T > S, the first queries see no key. The number of tiles is then 0, not negative.",
        ("max(0, first + 1)", "(first + 1)"),
        ("max(0, last + 1)", "(last + 1)"),
        "past the last query: The last row tile may have fewer than Br queries. Its last query is T − 1.",
        ("min((i + 1) * Br, T)", "(i + 1) * Br"),
    ],
    "the loop skips about half of the tiles, and only tiles on the diagonal pay for a mask.",
    start="return 0, -(-S // Bc)",
)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, Br: int, Bc: int) -> tuple[Tensor, Tensor, int]:
    """Return (O, L, tiles) of causal attention of one head by FlashAttention-2: q [T, D], k and v [S, D].

    O [T, D] is the output. L [T] = m + log l is the log-sum-exp of each row of scores. Query t sees key s if
    s ≤ t + S − T, and a query without a key gets 0 and −∞. `tiles` says how many tiles of scores were computed: only
    those of which some query sees a key.
    """
    (T, D), S = q.shape, len(k)
    O, L, tiles = torch.zeros_like(q), torch.zeros(T), 0
    for i in range(-(-T // Br)):
        rows = torch.arange(i * Br, min((i + 1) * Br, T))
        stop = -(-max(0, int(rows[-1]) + S - T + 1) // Bc)  # the last query of the tile sees the most keys
        m, l, O_i = torch.full((len(rows),), -torch.inf), torch.zeros(len(rows)), torch.zeros(len(rows), D)
        for j in range(stop):
            cols = torch.arange(j * Bc, min((j + 1) * Bc, S))
            S_ij = q[rows] @ k[cols].T / D**0.5
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
        "no mask: A query sees a key that comes after it. Tiles on the diagonal need the causal mask: query t sees "
        "key s if s ≤ t + S − T.",
        ("cols > rows[:, None] + S - T", "cols >= S"),
        "every tile: Your loop computes tiles that no query of the tile sees. Stop the loop over keys at the last key "
        "that the tile's last query sees.",
        ("range(stop)", "range(-(-S // Bc))"),
        "neither mask nor skip: Your code reads every key and masks none. Stop the loop over keys at the last key that "
        "the tile's last query sees, and mask the scores of later keys.",
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
        "nothing shrinks: A later tile raised the maximum, and l and O_i kept their old scale: multiply both by "
        "exp(m − m_new).",
        ("alpha * l", "l"),
        ("alpha[:, None] * O_i", "O_i"),
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
    imports="import math\n\nimport torch\nfrom torch import Tensor",
    start="""\
(T, D), S = q.shape, len(k)
O, L, tiles = torch.zeros_like(q), torch.zeros(T), 0
for i in range(math.ceil(T / Br)):
    rows = slice(i * Br, (i + 1) * Br)
    S_i = q[rows] @ k.T / D**0.5  # yours: a tile at a time, with m, l and O_i
    O[rows], L[rows] = torch.softmax(S_i, dim=1) @ v, torch.logsumexp(S_i, dim=1)
    tiles += math.ceil(S / Bc)
return O, L, tiles""",
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
    start="""\
scale = q.shape[1] ** -0.5
dQ, dK, dV = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
for j in range(0, len(k), Bc):
    for i in range(0, len(q), Br):
        rows, cols = slice(i, i + Br), slice(j, j + Bc)
        S_ij = scale * q[rows] @ k[cols].T  # yours, from here: P, dV, dP, dS, dK and dQ
return dQ, dK, dV""",
)

EXERCISES = [NUMBERS_MOVED, TILE_RANGE, FLASH_FORWARD, FLASH_BACKWARD]
