"""Exercises of lesson 9: the numbers that describe a batch, and the distribution that the sampler draws from."""

from itertools import accumulate

import torch
from torch import Tensor

from pagewise.exercises.python import call, python_exercise


def step_inputs(chunks: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> dict[str, list[int]]:
    """Return the numbers of one step. Sequence i computes its tokens start … stop − 1, where (start, stop) = chunks[i].

    "positions" and "slots" have a number for each of these tokens, sequence after sequence: its place in its text, and
    the slot for its K and V. "seq_lens" has the number of keys of each sequence after the step has written its K and V.
    "cu_seqlens_q" has the index of each sequence's first token in the flat row, and the length of the row at the end.
    """
    P, places = block_size, [(i, t) for i, (start, stop) in enumerate(chunks) for t in range(start, stop)]
    return {
        "positions": [t for _, t in places],
        "slots": [tables[i][t // P] * P + t % P for i, t in places],
        "seq_lens": [stop for _, stop in chunks],
        "cu_seqlens_q": [0, *accumulate(stop - start for start, stop in chunks)],
    }


_SLOTS = "tables[i][t // P] * P + t % P for i, t in places"

STEP_INPUTS = python_exercise(
    step_inputs,
    [
        call([(0, 3)], [[0]], 4),
        call([(0, 3)], [[2]], 4),
        call([(3, 4)], [[2]], 4),
        call([(5, 6)], [[2, 0]], 4),
        call([(0, 2), (0, 1)], [[1], [3]], 4),
        call([(5, 6), (0, 3), (2, 7)], [[4, 1], [0], [6, 2]], 4),
        call([(3, 5), (0, 1)], [[3, 0, 4], [1]], 2),
        call([(8, 9), (2, 3)], [[5, 0, 3], [1]], 4),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with a list of (sequence, position) for all tokens of "
        "the step.",
        ("    P, places", "    return None\n    P, places"),
        "positions from 0: The positions are wrong. Look at a chunk that begins in the middle: positions count from "
        "the first token of the text.",
        ("[t for _, t in places]", "[t - chunks[i][0] for i, t in places]"),
        "slots from the chunk: Your slots overwrite older keys. Look at a chunk that begins in the middle: its slots "
        "go by position.",
        (_SLOTS, _SLOTS.replace("places", "[(i, t - chunks[i][0]) for i, t in places]")),
        "places in the text: Your slots are positions. Look at the table: token t has the slot table[t // P] · P + t % "
        "P.",
        (_SLOTS, "t for _, t in places"),
        "the block's first slot: All tokens of a block have the same slot. Add the offset t % P.",
        (" + t % P", ""),
        "tables cut off: Your newest tokens are in a wrong block. Look at the length of the tables: each table keeps "
        "its own.",
        ("t // P", "min(t // P, min(map(len, tables)) - 1)"),
        "keys of the past only: `seq_lens` misses the keys of this step. Look at the order: a step writes K and V "
        "before it reads.",
        ("[stop for _, stop in chunks]", "[start for start, _ in chunks]"),
        "queries for keys: `seq_lens` counts the queries of the step. Look at a chunk that begins in the middle: its "
        "queries see the older keys too.",
        ("[stop for _, stop in chunks]", "[stop - start for start, stop in chunks]"),
        "no end: `cu_seqlens_q` is too short. Look at its end: the last number is the length of the flat row.",
        ("start, stop in chunks)", "start, stop in chunks[:-1])"),
        "no beginning: `cu_seqlens_q` is too short. Look at its beginning: the first sequence begins at 0.",
        ("[0, *", "[*"),
        "lengths, not sums: `cu_seqlens_q` holds lengths. “cu” is short for cumulative: add them up.",
        ("*accumulate(", "*("),
    ],
    "the model and its attention need only these numbers to compute a step.",
    imports="from itertools import accumulate",
)


def token_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return the probabilities [V] from which the next token is drawn. No two logits [V] are equal.

    Take softmax(logits / temperature). Keep the `top_k` likeliest tokens (0: all), and scale them to sum to 1. Then
    keep the fewest likeliest tokens whose probabilities sum to at least `top_p`, and scale them again. All other
    tokens get 0. At temperature 0, the likeliest token gets 1.
    """
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    p, order = torch.softmax(logits / temperature, dim=0).sort(descending=True)
    if top_k:
        p[top_k:] = 0
    p = p / p.sum()
    p[p.cumsum(0) - p >= top_p] = 0
    return torch.zeros_like(p).scatter(0, order, p / p.sum())


def _logits(*weights: float) -> Tensor:
    """Return logits whose softmax is proportional to the weights."""
    return torch.tensor(weights).log()


_BY_TOP_P = "p[p.cumsum(0) - p >= top_p]"
_IN_ORDER = "torch.zeros_like(p).scatter(0, order, p / p.sum())"
_AS_THEY_COME = """\
    in_order = torch.zeros_like(p).scatter(0, order, p)
    p[(in_order.cumsum(0) - in_order)[order] >= top_p]"""
_BEFORE_TEMPERATURE = """\
    shares = torch.softmax(logits, dim=0)[order] * (p > 0)
    shares = shares / shares.sum()
    p[shares.cumsum(0) - shares >= top_p]"""

TOKEN_PROBABILITIES = python_exercise(
    token_probabilities,
    [
        call(_logits(10.0, 5.0, 3.0, 2.0), 1.0, 0, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 0, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 0.5, 0, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 2, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 0, 0.6),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 2, 0.6),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 0, 0.1),
        call(_logits(3.0, 10.0, 2.0, 5.0), 0.5, 0, 0.6),
        call(_logits(3.0, 10.0, 2.0, 5.0), 0.0, 2, 0.6),
        call(_logits(8.0, 9.0, 7.0, 6.0, 30.0), 2.0, 4, 0.9),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with torch.softmax(logits / temperature, dim=0).",
        ("    if temperature == 0:", "    return None\n    if temperature == 0:"),
        "multiplied: Your temperature works the wrong way. Divide the logits by it: a low temperature makes the "
        "likeliest token likelier.",
        ("logits / temperature", "logits * temperature"),
        "nobody for 0: No token is left. Look at top_k = 0: it means no limit.",
        ("    if top_k:\n        p[top_k:] = 0\n", "    p[top_k:] = 0\n"),
        "not scaled: The sum of the probabilities is below 1. Scale the tokens that you kept.",
        ("    p = p / p.sum()\n", "    shares = p / p.sum()\n"),
        (_BY_TOP_P, "p[shares.cumsum(0) - shares >= top_p]"),
        ("order, p / p.sum()", "order, p"),
        "logits of 0: Dropped tokens still have a probability. Look at a logit of 0: its weight is e⁰ = 1, so a "
        "dropped token needs −∞.",
        (_IN_ORDER, f"torch.softmax(torch.where({_IN_ORDER} > 0, logits / temperature, 0.0), dim=0)"),
        "sorted: Your probabilities are in falling order. Look at the end: put them back in the order of the tokens.",
        (_IN_ORDER, "p / p.sum()"),
        "the one that crosses: Your top_p drops one token too many. Look at the token with which the sum reaches "
        "top_p: it stays.",
        (_BY_TOP_P, "p[p.cumsum(0) > top_p]"),
        "as they come: Your top_p keeps the first tokens, not the likeliest ones. Sort before you add up.",
        (f"    {_BY_TOP_P}", _AS_THEY_COME),
        "top_p of all tokens: Your top_p ignores top_k. Look between the two: the kept tokens are scaled to sum to 1.",
        ("    p = p / p.sum()\n", ""),
        "the temperature last: Your top_p ignores the temperature. Divide by the temperature before all other steps.",
        (f"    {_BY_TOP_P}", _BEFORE_TEMPERATURE),
        "divided by 0: Your function divides by a temperature of 0. Look at this case first: the likeliest token gets "
        "1.",
        ("temperature == 0", "False"),
    ],
    "with these three numbers, a request says how much its text may vary.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [STEP_INPUTS, TOKEN_PROBABILITIES]
