"""Choose the requests that compute in the next step, and give them its tokens afterwards (lesson 9).

A step has a budget of tokens. Sequences that decode come first and need one token each. The rest of the budget goes to
prompts, oldest first, and a longer prompt is computed in chunks (chunked prefill). Drafts (see `speculation`) come
last. They take only tokens and blocks that the step leaves over, so they preempt no request and delay no prompt.

When memory runs out, the youngest running request is preempted. Its memory is freed, its tokens are kept, and it will
compute them again (preemption by recomputation). Therefore the oldest request always advances, and all requests end.

    naive       one request at a time
    static      as many as fit; no request joins before all of these have ended
    continuous  a request that fits joins at any step

Yu et al. 2022 (Orca: continuous batching); Kwon et al. 2023 (preemption); Agrawal et al. 2023 (Sarathi: chunked
prefill, decoding first).
"""

from collections import deque
from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from typing import Literal

from pagewise.engine import beam_search
from pagewise.engine.dense_memory import DenseMemory
from pagewise.engine.memory import BlockMemory
from pagewise.engine.model_runner import Chosen
from pagewise.engine.sampling import Pick
from pagewise.engine.sequence import Choice, Chunk, Piece, Request, Sequence
from pagewise.engine.speculation import Drafter
from pagewise.paged_blocks import OutOfBlocks

Policy = Literal["naive", "static", "continuous"]
POLICIES = ("naive", "static", "continuous")


class Scheduler:
    """Requests that wait and requests that run, each list oldest first.

    Invariants, after every call:
    - every running request is older than every waiting one;
    - memory is held by the sequences of running requests (`Request.in_memory`), and by nothing else;
    - at most max_num_seqs sequences run, counting those that a request will be forked into.
    """

    def __init__(
        self,
        memory: BlockMemory | DenseMemory,
        *,
        policy: Policy = "continuous",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        speculate: int = 0,
    ) -> None:
        self.memory, self.policy, self.speculate = memory, policy, speculate
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_drafted = self.num_accepted = 0
        self._may_join = 0  # number of requests that may still join the running batch, unless continuous

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended or is aborted, and free its memory."""
        if request in self.running:
            self._release(request)
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> list[Chunk]:
        """Return the next step: at most max_num_batched_tokens tokens, for which there is memory. Empty iff done."""
        preempted = self.num_preemptions
        chunks, reading = self._decode()
        left = self.max_num_batched_tokens - len(chunks)
        for request in reading:
            for sequence in request.in_memory():
                left -= self._prefill(request, sequence, left, chunks)
        while self.num_preemptions == preempted and left > 0 and self._admit(chunks):
            left -= self._prefill(self.running[-1], self.running[-1].live[0], left, chunks)
        return chunks

    def draft(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the step with drafts for the sequences that decode, the oldest first, `speculate` each at most."""
        if not self.speculate:
            return chunks
        left, step = self.max_num_batched_tokens - sum(chunk.stop - chunk.start for chunk in chunks), []
        for chunk in chunks:
            request = chunk.request
            most = min(self.speculate, left, request.most_slots - chunk.stop)
            if most > 0 and chunk.num_logits and request.forked and request.sampling.beam_width == 1:
                sequence = chunk.sequence
                sequence.drafter = sequence.drafter or Drafter(sequence.tokens)
                chunk = chunk.with_drafts(self.memory.extend_by(sequence, sequence.drafter.draft(most)))
                left -= len(chunk.drafts)
                self.num_drafted += len(chunk.drafts)
            step.append(chunk)
        return step

    def preempt(self, request: Request) -> None:
        """Let a running request wait again, before all other waiting requests."""
        self._release(request)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        self._may_join += 1

    def _decode(self) -> tuple[list[Chunk], list[Request]]:
        """Take slots for the requests that decode. Return their chunks, and the requests that do not decode yet."""
        chunks: list[Chunk] = []
        reading = []
        for request in self.running.copy():
            if request not in self.running:  # it was preempted
                continue
            sequences = request.in_memory()
            if not request.forked:
                reading.append(request)
            elif any(len(sequence.tokens) - sequence.num_computed > 1 for sequence in sequences):
                if self._take_slots(request, sequences):
                    reading.append(request)
            elif len(chunks) + len(sequences) <= self.max_num_batched_tokens and self._take_slots(request, sequences):
                chunks += (Chunk(request, s, s.num_computed, len(s.tokens)) for s in sequences)
        return chunks, reading

    def _take_slots(self, request: Request, sequences: list[Sequence]) -> bool:
        """Get slots for all sequences, and preempt the youngest requests for them. False: that was `request` itself."""
        for sequence in sequences:
            while True:
                try:
                    self.memory.extend(sequence)
                    break
                except OutOfBlocks:
                    youngest = self.running[-1]
                    self.preempt(youngest)
                    if youngest is request:
                        return False
        return True

    def _prefill(self, request: Request, sequence: Sequence, most: int, chunks: list[Chunk]) -> int:
        """Add a chunk of at most `most` tokens: of the request's common tokens, or of the sequence's own tokens.

        The newest tokens of several sequences are left for one step that decodes them together.
        """
        start, stop = sequence.num_computed, len(sequence.tokens) - 1 if request.forked else request.num_common
        num_tokens = max(0, min(stop - start, most))
        if num_tokens:
            chunks.append(Chunk(request, sequence, start, start + num_tokens))
        return num_tokens

    def _admit(self, chunks: list[Chunk]) -> bool:
        """Let the oldest waiting request run, if the policy and the memory allow it."""
        if not self.waiting or not self._has_place():
            return False
        request = self.waiting[0]
        if request.common_blocks is None:
            request.common_blocks = self.memory.blocks(request.common_tokens())
        tokens = request.common_blocks
        if self.memory.prefix_is_coming(tokens, [chunk.sequence for chunk in chunks if chunk.stop - chunk.start > 1]):
            return False
        try:
            cached = self.memory.admit(request, tokens)
        except OutOfBlocks:
            self._may_join = 0
            return False
        self.waiting.popleft()
        self.running.append(request)
        self._may_join -= 1
        request.num_common, request.common_blocks = len(tokens), None
        request.live[0].num_computed = cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = cached
        return True

    def _has_place(self) -> bool:
        if self.policy != "continuous":
            if not self.running:
                widths = accumulate(request.seats for request in self.waiting)
                self._may_join = 1 if self.policy == "naive" else sum(width <= self.max_num_seqs for width in widths)
            if self._may_join <= 0:
                return False
        return sum(r.seats for r in self.running) + self.waiting[0].seats <= self.max_num_seqs

    def computed(self, chunks: list[Chunk]) -> None:
        """Note that these chunks are computed. Fork the requests whose common tokens are now all computed.

        The chunks hold only those drafts that were right.
        """
        for request, sequence, _, stop, drafts in chunks:
            sequence.num_computed = stop
            self.num_accepted += len(drafts)
            self.memory.commit(sequence)
            if not request.forked and stop == request.num_common:
                first, *others = request.live
                for other in others:
                    self.memory.fork(first, other)
                    other.num_computed = stop
                request.forked = True

    def _release(self, request: Request) -> None:
        self.memory.release(request)
        for sequence in request.live:
            sequence.num_computed = 0
        request.forked = False


def advance(
    chunks: list[Chunk],
    chosen: Chosen,
    scheduler: Scheduler,
    ends: frozenset[int],
    end: Callable[[Request, list[Choice], list], None],
    tell: Callable[[tuple[Request, Piece]], None],
) -> None:
    """Give the tokens to their sequences.

    `tell` is called at once with the piece of each sequence, and `end` for each request that has ended. If a tokenizer
    raises, its sequence has the tokens before the one that failed, and no text is lost.
    """
    num_right = {sequence: len(picks) - 1 for _, sequence, picks in chosen.picks}
    scheduler.computed([chunk.with_drafts(chunk.drafts[: num_right.get(chunk.sequence, 0)]) for chunk in chunks])
    for request, sequence, picks in chosen.picks:
        pieces: list[Piece] = []
        try:
            for pick in picks:
                pieces.append(_grow(request, sequence, pick, ends))
                if sequence.finish_reason is not None:
                    break
        finally:  # a tokenizer may fail at a later one
            if pieces:
                tell((request, reduce(Piece.followed_by, pieces)))
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


def _grow(request: Request, sequence: Sequence, pick: Pick | None, ends: frozenset[int]) -> Piece:
    """Add the picked token to a sequence, and find out whether it ends. Without a pick, the sequence ends."""
    text, reason = "", None
    if pick is None:
        text = sequence.text.end() if sequence.text is not None else ""
        sequence.finish_reason = "error"
        return Piece(request.id, sequence.index, [], text, "error", None)
    if pick.token in request.ends(ends):
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
