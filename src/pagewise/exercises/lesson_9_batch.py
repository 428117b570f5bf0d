"""Exercises of lesson 9, a step as one value and what follows from its logits: a batch's numbers, and the sampler."""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from pagewise.exercises.exercise import Mistake
from pagewise.exercises.python import call, python_exercise

# ------------------------------------------------------------------------------------------------ step_inputs


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


def _inputs_with(mistake: str) -> Callable:
    def step_inputs(chunks, tables, block_size):
        P = block_size
        places = [(i, t) for i, (start, stop) in enumerate(chunks) for t in range(start, stop)]
        lengths = [stop - start for start, stop in chunks]
        starts = [start for start, _ in chunks]
        slots = [tables[i][t // P] * P + t % P for i, t in places]
        if mistake == "from the chunk":
            slots = [tables[i][(t - starts[i]) // P] * P + (t - starts[i]) % P for i, t in places]
        if mistake == "logical":
            slots = [t for _, t in places]
        if mistake == "no offset":
            slots = [tables[i][t // P] * P for i, t in places]
        if mistake == "cut off":
            width = min(map(len, tables))
            slots = [tables[i][:width][min(t // P, width - 1)] * P + t % P for i, t in places]
        running = list(accumulate(lengths))
        return {
            "positions": [t - starts[i] * (mistake == "from 0") for i, t in places],
            "slots": slots,
            "seq_lens": {"context": starts, "queries": lengths}.get(mistake, [stop for _, stop in chunks]),
            "cu_seqlens_q": {"no end": [0, *running[:-1]], "no 0": running, "lengths": [0, *lengths]}.get(
                mistake, [0, *running]
            ),
        }

    return step_inputs


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
    {
        "positions from 0": Mistake(
            _inputs_with("from 0"), "Positions count from the text's first token, not from the chunk's."
        ),
        "slots from the chunk": Mistake(
            _inputs_with("from the chunk"),
            "The chunk begins in the middle of the text: its K and V overwrite the first ones. Slots go by position.",
        ),
        "places in the text": Mistake(
            _inputs_with("logical"), "That is where a token stands in its text: its slot is table[t // P] · P + t % P."
        ),
        "the block's first slot": Mistake(
            _inputs_with("no offset"), "All tokens of a block get its first slot: add t % P."
        ),
        "tables cut off": Mistake(
            _inputs_with("cut off"),
            "A table was cut to the length of another: the newest tokens are in its last blocks, and are lost.",
        ),
        "keys of the past only": Mistake(
            _inputs_with("context"), "K and V of the chunk are written before they are read: seq_lens counts them, too."
        ),
        "queries for keys": Mistake(
            _inputs_with("queries"), "A chunk's queries see the tokens before it as well: keys, not queries, are meant."
        ),
        "no end": Mistake(_inputs_with("no end"), "One number more than sequences: where the last one's tokens end."),
        "no beginning": Mistake(_inputs_with("no 0"), "The first sequence begins at 0."),
        "lengths, not sums": Mistake(
            _inputs_with("lengths"), "These are lengths: “cu” is for cumulative, each begins where the one before ends."
        ),
    },
    "these few numbers are all that the model and its attention are told of a step.",
    imports="from itertools import accumulate",
)

# ------------------------------------------------------------------------------------------------ token_probabilities


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


def _probabilities_with(mistake: str) -> Callable:
    def token_probabilities(logits, temperature, top_k, top_p):
        if temperature == 0 and mistake != "0 / 0":
            return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
        scaled = logits * temperature if mistake == "times" else logits / temperature
        p, order = torch.softmax(scaled, dim=0).sort(descending=True)
        k = top_k if mistake == "0 keeps none" else top_k or len(p)
        kept = torch.arange(len(p)) < k
        shares = p if mistake == "of all" else p * kept / (p * kept).sum()
        before = shares.cumsum(0) - shares
        if mistake == "temperature last":
            cold = torch.softmax(logits, dim=0)[order]
            shares = cold * kept / (cold * kept).sum()
            before = shares.cumsum(0) - shares
        if mistake == "as they come":
            in_order = torch.zeros_like(p).scatter(0, order, shares)
            before = (in_order.cumsum(0) - in_order)[order]
        kept = kept & (before + shares <= top_p if mistake == "crossing" else before < top_p)
        if mistake == "logit 0":
            p = torch.softmax(torch.where(kept, scaled.sort(descending=True)[0], 0.0), dim=0)
        else:
            p = p * kept if mistake == "not scaled" else p * kept / (p * kept).sum()
        return p if mistake == "sorted" else torch.zeros_like(p).scatter(0, order, p)

    return token_probabilities


def _logits(*weights: float) -> Tensor:
    """Logits whose softmax is in proportion to the weights."""
    return torch.tensor(weights).log()


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
    {
        "multiplied": Mistake(
            _probabilities_with("times"),
            "Divide by the temperature: a low one makes the likeliest likelier.",
        ),
        "nobody for 0": Mistake(_probabilities_with("0 keeps none"), "top_k = 0 means no limit: all stay."),
        "not scaled": Mistake(_probabilities_with("not scaled"), "What stays must sum to 1 again."),
        "logits of 0": Mistake(
            _probabilities_with("logit 0"), "A logit of 0 still has a weight, e⁰ = 1: what is left out needs −inf."
        ),
        "sorted": Mistake(
            _probabilities_with("sorted"), "These are in the order of their size: put them back in the order of tokens."
        ),
        "the one that crosses": Mistake(
            _probabilities_with("crossing"),
            "The token with which the sum reaches top_p stays, too, and so one at least.",
        ),
        "as they come": Mistake(
            _probabilities_with("as they come"), "The likeliest first: sort before you add up for top_p."
        ),
        "top_p of all tokens": Mistake(
            _probabilities_with("of all"), "top_p is a share of what top_k has left: scale to sum to 1 in between."
        ),
        "the temperature last": Mistake(
            _probabilities_with("temperature last"),
            "top_p is a share of the probabilities that the temperature gives: divide by it first.",
        ),
        "divided by 0": Mistake(
            _probabilities_with("0 / 0"), "A temperature of 0 cannot be divided by: the likeliest token has it all."
        ),
    },
    "these three numbers are how a request says how daring its text may be.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [STEP_INPUTS, TOKEN_PROBABILITIES]
