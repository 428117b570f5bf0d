"""Choose the requests that compute in the next step, and give them its tokens afterwards (lesson 9).

A step has a budget of tokens. Sequences that decode come first and need one token each. The rest of the budget goes to
prompts, oldest first, and a longer prompt is computed in chunks (chunked prefill). Drafts (see `speculation`) come
last. They take only tokens and blocks that the step leaves over, so they preempt no request and delay no prompt.

When memory runs out, the youngest running request is preempted. Its memory is freed, its tokens are kept, and it will
compute them again (preemption by recomputation). Therefore the oldest request always advances, and all requests end.
So that this happens rarely, a memory lets a request join only while some blocks stay free (see `paged_memory`).

    naive       one request at a time
    static      as many as fit; no request joins before all of these have ended
    continuous  a request that fits joins at any step

Yu et al. 2022 (Orca: continuous batching); Kwon et al. 2023 (preemption); Agrawal et al. 2023 (Sarathi: chunked
prefill, decoding first).
"""

from collections import deque
from typing import Any

from pagewise.engine.memory import Memory
from pagewise.engine.request import Chunk, Request, Sequence
from pagewise.engine.speculation import Drafter
from pagewise.paged_blocks.pool import OutOfBlocks
from pagewise.paged_blocks.prefix_cache import TokenBlocks


class Scheduler:
    """Requests that wait and requests that run, each list oldest first.

    Invariants, after every call:
    - every running request is older than every waiting one;
    - memory is held by the live sequences of running requests, until they are forked the first alone, and nothing else;
    - at most max_num_seqs sequences run, counting those that a request will be forked into.
    """

    def __init__(self, memory: Memory, config: Any) -> None:  # an EngineConfig, whose module imports torch
        self.memory, self.config = memory, config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_drafted = self.num_accepted = 0
        self._may_join = 0  # number of requests that may still join the running batch, unless continuous

    def remove(self, request: Request) -> None:
        """Forget a request that has ended or is aborted, and free its memory."""
        for sequence in request.live:
            self.memory.free(sequence)
        request.forked = False
        (self.running if request in self.running else self.waiting).remove(request)

    def finish(self, request: Request, sequence: Sequence) -> None:
        """Free a sequence that has ended. A request without other sequences is removed."""
        self.memory.free(sequence)
        request.live.remove(sequence)
        request.finished.append(sequence)
        if not request.live:
            self.remove(request)

    def schedule(self) -> list[Chunk]:
        """Return the next step: at most max_num_batched_tokens tokens, for which there is memory. Empty iff done."""
        chunks, reading, preempted = [], [], self.num_preemptions
        for request in self.running:  # only the last ones are preempted meanwhile
            if not request.forked:
                reading.append(request)
                continue
            decoding, left = [], self.config.max_num_batched_tokens - len(chunks)
            for sequence in request.live:
                if len(sequence.tokens) - sequence.num_computed == 1:
                    decoding.append(Chunk(request, sequence, sequence.num_computed, len(sequence.tokens), 1))
            behind = len(decoding) < len(request.live)
            if (behind or len(decoding) <= left) and self._take_slots(request):
                if behind:
                    reading.append(request)
                else:
                    chunks += decoding
        num_decoding = len(chunks)
        left = self.config.max_num_batched_tokens - num_decoding
        for request in reading:
            for sequence in request.live if request.forked else request.live[:1]:
                left -= self._prefill(request, sequence, left, chunks)
        while self.waiting and left > 0 and self.num_preemptions == preempted and self._admit(chunks[num_decoding:]):
            left -= self._prefill(self.running[-1], self.running[-1].live[0], left, chunks)
        return chunks

    def draft(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the step with drafts for the sequences that decode, the oldest first, `speculate` each at most."""
        left, step = self.config.max_num_batched_tokens - sum(chunk.stop - chunk.start for chunk in chunks), []
        for chunk in chunks:
            request, sequence, _, stop, num_logits, _ = chunk
            most = min(self.config.speculate, left, request.most_slots - stop)
            if most > 0 and num_logits and request.forked and request.sampling.beam_width == 1:
                sequence.drafter = sequence.drafter or Drafter(sequence.tokens)
                drafts = sequence.drafter.draft(most)
                while drafts:  # as many as there are free blocks for
                    try:
                        self.memory.resize(sequence, stop + len(drafts))
                        break
                    except OutOfBlocks:
                        drafts = drafts[:-1]
                n = len(drafts)
                chunk = chunk._replace(stop=stop + n, num_logits=num_logits + n, drafts=drafts)
                left -= n
                self.num_drafted += n
            step.append(chunk)
        return step

    def preempt(self, request: Request) -> None:
        """Let a running request wait again, before all other waiting requests. Sequences that have ended stay so."""
        self.remove(request)
        request.finished += [sequence for sequence in request.live if sequence.finish_reason is not None]
        request.live = [sequence for sequence in request.live if sequence.finish_reason is None]
        if request.live:
            self.waiting.appendleft(request)
        self.num_preemptions += 1
        self._may_join += 1

    def _take_slots(self, request: Request) -> bool:
        """Get slots for a request, and preempt the youngest requests for them. False: that was the request itself."""
        for sequence in request.live:
            while True:
                try:
                    self.memory.resize(sequence, len(sequence.tokens))
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
            stop = start + num_tokens
            num_logits = max(0, stop - len(sequence.tokens) + 1)
            if request.prompt_logprobs is not None:
                num_logits += len(request.scored(start, stop))
            chunks.append(Chunk(request, sequence, start, stop, num_logits))
        return num_tokens

    def _admit(self, computing: list[Chunk]) -> bool:
        """Let the oldest waiting request run, if the policy and the memory allow it. See `Memory.admit`."""
        policy, most, request = self.config.scheduler, self.config.max_num_seqs, self.waiting[0]
        if not self.running:
            self._may_join = 1 if policy == "naive" else len(self.waiting)
        num_seqs = 0
        for each in (*self.running, request):  # a sample that has ended needs no place any more
            num_seqs += max(len(each.live), each.sampling.beam_width)
        if num_seqs > most:
            self._may_join = 0  # the batch is full
        if num_seqs > most or (policy != "continuous" and self._may_join <= 0):
            return False
        if request.common is None:
            tokens, size, logprobs = request.common_tokens(), self.memory.block_size, request.prompt_logprobs
            if logprobs is not None and len(logprobs) < len(request.prompt) - 1:
                size = len(tokens)  # one block has no full block before its last token, so none is found in the cache
            request.common = TokenBlocks(tokens, size)
        try:
            cached = self.memory.admit(request, computing)
        except OutOfBlocks:
            self._may_join = 0
            return False
        if cached is None:  # it is cheaper to wait for a prefix
            return False
        self.running.append(self.waiting.popleft())
        self._may_join -= 1
        request.num_common, request.common = len(request.common.tokens), None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = cached
        return True

    def computed(self, chunks: list[Chunk], num_right: dict[Sequence, int] | None = None) -> None:
        """Note that these chunks are computed, and that `num_right` of a sequence's drafts were right.

        The slots of wrong drafts are given back. Requests whose common tokens are now all computed are forked.
        """
        for request, sequence, _, stop, _, drafts in chunks:
            if drafts:
                right = num_right[sequence]
                self.num_accepted += right
                stop -= len(drafts) - right
            self.memory.commit(sequence, stop)
            if drafts:
                self.memory.resize(sequence, stop)
            if not request.forked and stop == request.num_common:
                for other in request.live[1:]:
                    self.memory.fork(request.live[0], other)
                request.forked = True
