"""What a step's tokens do to the requests they are for: they grow, they end, their listeners hear of it (lesson 9)."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from pagewise.engine import beam_search
from pagewise.engine.sampling import Pick, Row, sample
from pagewise.engine.scheduler import Scheduler
from pagewise.engine.sequence import Choice, Chunk, Piece, Request, Sequence


class Chosen(NamedTuple):
    """What follows the chunks that gave logits: a token for each sequence, or a selection of beams for a request."""

    picks: list[tuple[Request, Sequence, Pick | None]]  # None: the logits were not finite
    selections: list[tuple[Request, beam_search.Selection]]


def choose(chunks: list[Chunk], logits: Float[Tensor, "n vocab"], ends: frozenset[int]) -> Chosen:
    """The next tokens. It changes nothing."""
    rows, drawn = [], []
    searches: dict[Request, list[int]] = {}
    for at, chunk in enumerate(chunk for chunk in chunks if chunk.gives_logits):
        request = chunk.request
        if request.sampling.beam_width > 1:
            searches.setdefault(request, []).append(at)
            continue
        for sequence in [chunk.sequence] if request.forked else request.live:  # all begin with what was computed now
            rows.append(Row(at, request.sampling, sequence.tokens, request.seed, sequence.index))
            drawn.append((request, sequence))
    picks = [(*one, pick) for one, pick in zip(drawn, sample(logits, rows), strict=True)]
    found = [(r, beam_search.select(r, logits[at], _ends_of(r, ends))) for r, at in searches.items()]
    return Chosen(picks, found)


def advance(
    chunks: list[Chunk],
    chosen: Chosen,
    scheduler: Scheduler,
    ends: frozenset[int],
    end: Callable[[Request, list[Choice], list], None],
    tell: Callable[[tuple[Request, Piece]], None],
) -> None:
    """Give the tokens to their sequences.

    `tell` is called with what each got and `end` for each request that has ended, at once: should a tokenizer raise,
    its sequence has not changed, and nobody else's text is lost.
    """
    scheduler.computed(chunks)
    for request, sequence, pick in chosen.picks:
        tell((request, _grow(request, sequence, pick, ends)))
        if sequence.finish_reason is not None:
            scheduler.memory.free(sequence)
            request.live.remove(sequence)
            request.finished.append(sequence)
            if not request.live:
                end(request, *_results(request))
    for request, selection in chosen.selections:
        if (choices := beam_search.apply(request, selection, scheduler.memory)) is not None:
            end(request, choices, [None] * len(choices))
            for index, (ids, text, reason, _) in enumerate(choices):
                tell((request, Piece(request.id, index, ids, text or "", reason, None)))


def _ends_of(request: Request, ends: frozenset[int]) -> frozenset[int]:
    """The tokens that end its sequences."""
    return (frozenset() if request.sampling.ignore_eos else ends) | frozenset(request.sampling.stop_ids)


def _grow(request: Request, sequence: Sequence, pick: Pick | None, ends: frozenset[int]) -> Piece:
    """One more token for a sequence, and whether it was the last. Without a pick the sequence ends here."""
    text, reason = "", None
    if pick is None:
        text = sequence.text.end() if sequence.text is not None else ""
        sequence.finish_reason = "error"
        return Piece(request.id, sequence.index, [], text, "error", None)
    if pick.token in _ends_of(request, ends):
        reason = "stop"
    elif len(sequence.tokens) + 1 == request.longest:
        reason = "length"
    if sequence.text is not None:
        ended = reason == "stop"
        text = sequence.text.end() if ended else sequence.text.add(pick.token, last=reason is not None)
        reason = "stop" if sequence.text.stopped else reason
    sequence.add(pick, reason)
    logprobs = None if pick.likeliest is None else [pick.likeliest]
    return Piece(request.id, sequence.index, [pick.token], text, reason, logprobs)


def _results(request: Request) -> tuple[list[Choice], list[list[dict[int, float]] | None]]:
    """Return the samples of a request that have all ended, in the order of their index, and their logprobs."""
    samples = sorted(request.finished, key=lambda sequence: sequence.index)
    choices = [
        Choice(s.tokens[len(request.prompt) :], s.text and s.text.text, s.finish_reason, s.score) for s in samples
    ]
    return choices, [None if request.sampling.logprobs is None else s.logprobs for s in samples]
