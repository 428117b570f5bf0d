"""`Engine`: requests in, steps, outputs (lesson 9).

A step is a straight line:

    scheduler.schedule() → chunks → runner.run(chunks) → logits → sample → tokens → the requests

When an exception ends a step, its requests keep their tokens and wait again, and their memory is free. With tensor
parallelism, other processes follow `runner.run`, and the rest of a step happens in this process (see `followers`).
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pagewise.engine import checks
from pagewise.engine.interrupts import held_back
from pagewise.engine.model_runner import ModelRunner, choose
from pagewise.engine.profile import Profile, span
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.scheduler import Scheduler, advance
from pagewise.engine.sequence import Choice, Listener, Output, Piece, Request

Prompt = str | Sequence[int] | Tensor


class Engine:
    """A model, its memory, and a scheduler between them. One thread at a time may call it."""

    def __init__(self, model: nn.Module, tokenizer: Any, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.model, self.tokenizer, self.scheduler, self.runner = model, tokenizer, scheduler, runner
        self.memory = runner.memory
        self._ends = checks.end_tokens(model, tokenizer)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.failed_ids: list[int] = []  # requests of the last step that raised an exception
        self._ended: dict[int, Output] = {}  # `step` has not returned them yet
        self._pieces: deque[tuple[Request, Piece]] = deque()  # likewise

    def add_request(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, listener: Listener | None = None
    ) -> int:
        """Let a prompt wait for its turn; returns the request's id.

        `listener` is called with a `Piece` at the end of each step that brought something new for a choice. Beams are
        told of when the search has ended.

        Raises:
            ValueError, TypeError: as `generate`.
        """
        return self.add(self.prepare(prompt, sampling, listener=listener))

    def prepare(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, listener: Listener | None = None
    ) -> Request:
        """The first half of `add_request`: make the token ids and check everything. The engine does not change.

        Another thread may prepare requests while this one steps. So a long prompt does not hold up a step.
        """
        sampling = SamplingParams() if sampling is None else sampling
        request = checks.checked_request(prompt, sampling, self.tokenizer, self.model.config, self.scheduler)
        request.listener = listener
        return request

    def add(self, request: Request) -> int:
        """The second half of `add_request`: let a prepared request wait for its turn; returns its id."""
        with held_back():
            request.id, self._next_id = self._next_id, self._next_id + 1
            self._requests[request.id] = request
            self.scheduler.add(request)
        return request.id

    def step(self) -> list[Output]:
        """Compute one step; returns the requests that have ended since the last call."""
        self._step()
        outputs, self._ended = [*self._ended.values()], {}
        return outputs

    def abort(self, request_id: int) -> None:
        """Forget a request and free what it holds. One that has ended is left alone; ValueError if there never was."""
        if request_id not in range(self._next_id):
            raise ValueError(f"there is no request {request_id!r}")
        with held_back():
            if (request := self._requests.pop(request_id, None)) is not None:
                self.scheduler.remove(request)

    def max_new_tokens(self, prompt: Prompt) -> int:
        """Return the largest max_tokens that fits context and memory after this prompt; below 1 if it is too long."""
        tokens = checks.token_ids(prompt, self.tokenizer)
        return min(self.model.config.max_position_embeddings, self.memory.num_tokens + 1) - len(tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to compute or to return."""
        return bool(self._requests or self._ended or self._pieces)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no memory."""
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self.scheduler.running)

    def profile(self, *, ops: bool = False) -> Profile:
        """A context manager that marks what steps do, see `pagewise.engine.profile`."""
        return Profile(ops=ops)

    def _step(self) -> None:
        """Compute one step. If it raises, every request is as it was before the step."""
        try:
            with span("step"):
                self._compute()
        except BaseException:
            with held_back():
                self.failed_ids = [request.id for request in self.scheduler.running]
                for request in reversed(self.scheduler.running.copy()):
                    self.scheduler.preempt(request)
            raise
        while self._pieces:
            request, piece = self._pieces.popleft()
            if request.listener is not None:
                request.listener(piece)

    def _compute(self) -> None:
        """Schedule, run and sample one step. With nothing to compute, do nothing."""
        with held_back(), span("schedule"):
            chunks = self.scheduler.draft(self.scheduler.schedule())
        if not chunks:
            return
        logits = self.runner.run(chunks)
        with span("sampling"):
            chosen = choose(chunks, logits, self._ends)
        with held_back():
            advance(chunks, chosen, self.scheduler, self._ends, self._end, self._pieces.append)

    def _end(self, request: Request, choices: list[Choice], logprobs: list) -> None:
        """End a request that has all its choices."""
        self.scheduler.remove(request)
        del self._requests[request.id]
        self._ended[request.id] = Output(request.id, request.prompt, choices, logprobs, request.num_cached_tokens)
