"""Exercises of lesson 9: the numbers that describe a batch, and the distribution that the sampler draws from."""

from itertools import accumulate

import torch
from torch import Tensor

from pagewise.exercises.python import call, python_exercise


def step_inputs(chunks: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> dict[str, list[int]]:
    """One step's batch in numbers: sequence i computes its tokens start … stop − 1, chunks[i] = (start, stop).

    "positions": of all these tokens in their texts, sequence after sequence. "slots": where their K and V are written.
    "seq_lens": how many keys each sequence has then. "cu_seqlens_q": where each sequence's tokens begin in the batch,
    and at last where they end.
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
        "positions from 0: Positions count from the text's first token, not from the chunk's.",
        ("[t for _, t in places]", "[t - chunks[i][0] for i, t in places]"),
        "slots from the chunk: The chunk begins in the middle of the text: its K and V overwrite the first ones. "
        "Slots go by position.",
        (_SLOTS, _SLOTS.replace("places", "[(i, t - chunks[i][0]) for i, t in places]")),
        "places in the text: That is where a token stands in its text: its slot is table[t // P] · P + t % P.",
        (_SLOTS, "t for _, t in places"),
        "the block's first slot: All tokens of a block get its first slot: add t % P.",
        (" + t % P", ""),
        "tables cut off: A table was cut to the length of another: the newest tokens are in its last blocks, and are "
        "lost.",
        ("t // P", "min(t // P, min(map(len, tables)) - 1)"),
        "keys of the past only: K and V of the chunk are written before they are read: seq_lens counts them, too.",
        ("[stop for _, stop in chunks]", "[start for start, _ in chunks]"),
        "queries for keys: A chunk's queries see the tokens before it as well: keys, not queries, are meant.",
        ("[stop for _, stop in chunks]", "[stop - start for start, stop in chunks]"),
        "no end: One number more than sequences: where the last one's tokens end.",
        ("start, stop in chunks)", "start, stop in chunks[:-1])"),
        "no beginning: The first sequence begins at 0.",
        ("[0, *", "[*"),
        "lengths, not sums: These are lengths: “cu” is for cumulative, each begins where the one before ends.",
        ("*accumulate(", "*("),
    ],
    "these few numbers are all that the model and its attention are told of a step.",
    imports="from itertools import accumulate",
)


def token_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The probabilities [V] from which the next token is drawn, after its logits [V].

    One after the other: softmax(logits / temperature); the `top_k` likeliest stay (0: all), scaled to sum to 1; of
    these the likeliest stay, the fewest that have a share of at least `top_p`, and are scaled again. All others get 0.
    Temperature 0: the likeliest has it all. No two logits are equal.
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
        "multiplied: Divide by the temperature: a low one makes the likeliest likelier.",
        ("logits / temperature", "logits * temperature"),
        "nobody for 0: top_k = 0 means no limit: all stay.",
        ("    if top_k:\n        p[top_k:] = 0\n", "    p[top_k:] = 0\n"),
        "not scaled: What stays must sum to 1 again.",
        ("    p = p / p.sum()\n", "    shares = p / p.sum()\n"),
        (_BY_TOP_P, "p[shares.cumsum(0) - shares >= top_p]"),
        ("order, p / p.sum()", "order, p"),
        "logits of 0: A logit of 0 still has a weight, e⁰ = 1: what is left out needs −inf.",
        (_IN_ORDER, f"torch.softmax(torch.where({_IN_ORDER} > 0, logits / temperature, 0.0), dim=0)"),
        "sorted: These are in the order of their size: put them back in the order of tokens.",
        (_IN_ORDER, "p / p.sum()"),
        "the one that crosses: The token with which the sum reaches top_p stays, too, and so one at least.",
        (_BY_TOP_P, "p[p.cumsum(0) > top_p]"),
        "as they come: The likeliest first: sort before you add up for top_p.",
        (f"    {_BY_TOP_P}", _AS_THEY_COME),
        "top_p of all tokens: top_p is a share of what top_k has left: scale to sum to 1 in between.",
        ("    p = p / p.sum()\n", ""),
        "the temperature last: top_p is a share of the probabilities that the temperature gives: divide by it first.",
        (f"    {_BY_TOP_P}", _BEFORE_TEMPERATURE),
        "divided by 0: A temperature of 0 cannot be divided by: the likeliest token has it all.",
        ("temperature == 0", "False"),
    ],
    "these three numbers are how a request says how daring its text may be.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [STEP_INPUTS, TOKEN_PROBABILITIES]
