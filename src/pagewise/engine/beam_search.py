"""Beam search on forked blocks (lesson 9).

A step continues each of k beams of the same length by every token. Each branch has a score:

    score(beam + token) = score(beam) + log p(token | beam)

If one of the k best branches ends, it becomes a hypothesis with score / length. The k best branches that do not end
are the next beams. The search ends at max_tokens, or when k hypotheses are better than the best beam would be if it
ended now. This is transformers' rule for length_penalty=1, early_stopping=False. As in transformers, penalties
act on log p.

Beams share the blocks of their common tokens. A beam with several successors is forked, and a beam without a successor
is freed. The first of the forks that writes into the last block copies it (copy-on-write).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.engine.memory import Memory
from pagewise.engine.request import NOT_FINITE, Choice, Request, Sequence
from pagewise.engine.sampling import Row, adjusted
from pagewise.engine.text import Text


class Branch(NamedTuple):
    """A beam and a token after it."""

    beam: int
    token: int
    score: float  # Σ log p


class Selection(NamedTuple):
    """A search after a step."""

    live: list[Branch]  # the next beams, best first; empty if the search has ended
    found: list[Choice]  # the best hypotheses so far, best first, without texts
    error: str | None = None  # why the search ended with the beams that there were


def select(request: Request, logits: Float[Tensor, "beams vocab"]) -> Selection:
    """Return the next beams and hypotheses, given the logits of each live beam. The request does not change.

    If the logits of a beam hold NaN or +inf, or nothing above -inf, the search ends. Its live beams then become
    choices with finish_reason "error".
    """
    width, length = request.width, len(request.live[0].tokens) + 1 - len(request.prompt)
    logits = logits.float()
    sums = logits.logsumexp(dim=-1, keepdim=True)
    if not sums.isfinite().all():
        return Selection([], [_unfinished(request, beam, length - 1) for beam in request.live], NOT_FINITE)
    rows = [
        Row(i, request.sampling, beam.tokens, 0, 0, length - 1, counts=beam.counts, ends=request.ends)
        for i, beam in enumerate(request.live)
    ]
    logprobs = adjusted(logits - sums, rows)
    scores = torch.tensor([beam.score for beam in request.live], device=logits.device)
    live, ended = branches(scores[:, None] + logprobs, width, request.ends)
    if length == request.sampling.max_tokens:
        live, ended = [], sorted([*live, *ended], key=lambda branch: -branch.score)[:width]
    found = request.beams + [_hypothesis(request, branch, length) for branch in ended]
    found = sorted(found, key=lambda choice: -choice.score)[:width]
    if len(found) == width and live and live[0].score / length <= found[-1].score:
        live = []
    return Selection(live, found)


def branches(
    scores: Float[Tensor, "beams vocab"], width: int, ends: frozenset[int]
) -> tuple[list[Branch], list[Branch]]:
    """Return the `width` best branches that do not end, and the ending ones among the `width` best of all."""
    vocab, enough = scores.shape[1], width * (1 + len(ends))  # at most width · len(ends) branches end
    best = scores.flatten().topk(min(enough, scores.numel()))
    branches = [Branch(*divmod(at, vocab), score) for score, at in zip(*map(Tensor.tolist, best), strict=True)]
    live = [branch for branch in branches if branch.token not in ends]
    return live[:width], [branch for branch in branches[:width] if branch.token in ends]


def apply(request: Request, selection: Selection, memory: Memory) -> bool:
    """Let the search go on as selected, in memory too. Return whether it has ended; `request.beams` are its choices.

    Beams without a successor are freed before any beam is forked, so at most beam_width beams hold memory. The best
    successor of a beam keeps the beam's memory. The other successors get forks of it.
    """
    parents, live, forks = request.live, [], []
    in_place = {branch.beam: parents[branch.beam] for branch in selection.live}
    for index, parent in enumerate(parents):
        if index not in in_place:
            memory.free(parent)
    try:
        for branch in selection.live:
            if (beam := in_place.pop(branch.beam, None)) is None:
                parent = parents[branch.beam]
                beam = Sequence(parent.tokens.copy())
                beam.counts = parent.counts and parent.counts.copy(beam.tokens)
                forks.append(beam)
                memory.fork(parent, beam)
            live.append(beam)
    except BaseException:  # a copy may not fit; the request is unchanged, and its beams can be computed again
        for beam in forks:
            memory.free(beam)
        raise
    request.beams, request.live, request.error = selection.found, live, selection.error
    for beam, branch in zip(request.live, selection.live, strict=True):
        beam.tokens.append(branch.token)
        beam.score = branch.score
    return not request.live


def _hypothesis(request: Request, branch: Branch, length: int) -> Choice:
    token_ids = [*request.live[branch.beam].tokens[len(request.prompt) :], branch.token]
    return Choice(token_ids, None, "stop" if branch.token in request.ends else "length", branch.score / length)


def _unfinished(request: Request, beam: Sequence, length: int) -> Choice:
    return Choice(beam.tokens[len(request.prompt) :], None, "error", beam.score / max(1, length))


def with_texts(request: Request) -> list[Choice]:
    """Return the choices with their texts, which leave out end tokens. Without a tokenizer they have none."""
    if request.tokenizer is None:
        return request.beams
    text = Text(request.tokenizer, (), request.prompt)
    return [
        choice._replace(text=text.following(choice.token_ids[: -1 if choice.finish_reason == "stop" else None]))
        for choice in request.beams
    ]
