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
    width, start, beams = request.width, len(request.prompt), request.live
    length, logits = len(beams[0].tokens) + 1 - start, logits.float()
    sums = logits.logsumexp(dim=-1, keepdim=True)
    if not sums.isfinite().all():
        ended = [Choice(beam.tokens[start:], None, "error", beam.score / max(1, length - 1)) for beam in beams]
        return Selection([], ended, NOT_FINITE)
    logprobs = adjusted(logits - sums, [Row(i, request, beam) for i, beam in enumerate(beams)])
    scores = torch.tensor([beam.score for beam in beams], device=logits.device)
    live, ended = branches(scores[:, None] + logprobs, width, request.ends)
    if length == request.sampling.max_tokens:
        live, ended = [], sorted([*live, *ended], key=lambda branch: -branch.score)[:width]
    found = request.beams.copy()
    for beam, token, score in ended:
        reason = "stop" if token in request.ends else "length"
        found.append(Choice([*beams[beam].tokens[start:], token], None, reason, score / length))
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
