"""The only thread that calls an LLM, and the messages between this thread and an event loop (lesson 9).

    event loop                          engine thread
    submit, drop      ── jobs ────▶     runs them in order, and a step when it has done all
    Answer.events  ◀── once a step ──   pieces, outputs, or an error

The engine never waits for a reader. Events that a reader has not taken yet wait in its `Answer`, which holds at most
the tokens of its requests. Answers that are not read to their end count against `max_queue`. So memory is bounded.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import islice
from time import perf_counter

from pagewise.engine import LLM, Output
from pagewise.engine.leader import GroupLost
from pagewise.engine.request import Piece, Request
from pagewise.engine.serve.answer import Answer, Failure
from pagewise.engine.serve.metrics import Metrics

ENDING = 5.0  # seconds that a step may take when the server ends
logger = logging.getLogger(__name__)


class EngineThread:
    """Runs `llm.step()` while there is something to compute, and sleeps otherwise.

    Invariant: apart from jobs that are not done yet, a request is in `llm` only while its answer is open (`with
    engine.reserved(...)`). An exception in a step fails only the requests that ran in this step. GroupLost fails every
    request, and `when_lost` is called, which should end the server.
    """

    def __init__(self, llm: LLM, *, max_queue: int) -> None:
        self.llm, self.max_queue = llm, max_queue
        self.metrics = Metrics(llm)
        self.lost, self.when_lost = False, lambda: None
        self.cut_off = False  # whether the server ended before an answer was complete
        self.num_held = 0  # requests of open answers; the event loop's
        self._jobs = ThreadPoolExecutor(1, "engine")
        self.step_began: float | None = None  # the step in progress
        self._steps = False  # whether a step is one of the jobs; the engine thread's own, like the next two
        self._answers: dict[int, tuple[Answer, int]] = {}  # by request id, with the index of the request
        self._events: list[tuple[Answer, int, Piece | Output | Failure]] = []

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """End the thread after the block and its current step. A step that never ends loses its processes."""
        yield
        ending = asyncio.ensure_future(asyncio.to_thread(self._jobs.shutdown))
        if not (await asyncio.wait([ending], timeout=ENDING))[0]:  # the step waits for a process that stands still
            self.llm.close()
            await asyncio.wait([ending], timeout=ENDING)

    @contextmanager
    def reserved(self, answer: Answer, num_requests: int) -> Iterator[None]:
        """Reserve places for the requests of an answer. Unfinished ones are aborted at the end of the `with` block.

        Raise Failure (status 429) if the queue has no space for them now.
        """
        if self.num_held + num_requests > self.max_queue:
            full = f"{self.num_held} requests wait or run, and {self.max_queue} may: try again in a moment"
            raise Failure(full, status=429, code="rate_limit_exceeded")
        self.num_held += num_requests
        try:
            yield
        finally:
            self.num_held -= num_requests
            with suppress(RuntimeError):  # the thread has ended
                self._jobs.submit(self._drop, answer)

    async def submit(self, answer: Answer, requests: list[Request], *, pieces: bool) -> None:
        """Add prepared requests, unless it is cancelled before. With `pieces`, the answer also gets every piece."""
        answer.requests, answer.newest = requests, [{} for _ in requests]
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._jobs, self._add, answer, pieces)

    # ------------------------------------------------------------------------------------ on the engine thread

    def _add(self, answer: Answer, pieces: bool) -> None:
        for index, request in enumerate(answer.requests):
            request.listener = lambda piece: self._hear(piece, pieces)
            self._answers[self.llm.add(request)] = answer, index
        self.metrics.update()
        if not self._steps:
            self._steps = True
            self._jobs.submit(self._go_on)

    def _drop(self, answer: Answer) -> None:
        for request in answer.requests:
            if self._answers.pop(request.id, None):
                self.llm.abort(request.id)
                self.metrics.end(answer, "abort", answered=False)
        self.metrics.update()

    def _hear(self, piece: Piece, pieces: bool) -> None:
        answer, index = self._answers.get(piece.request_id, (None, 0))
        self.metrics.hear(piece, answer, index)
        if answer and pieces:
            self._events.append((answer, index, piece))

    def _end(self, request_id: int, end: Output | Failure, reason: str) -> None:
        # nobody waits for a request that ended in a failing step and was dropped before the next step told of it
        if found := self._answers.pop(request_id, None):
            self._events.append((*found, end))
            self.metrics.end(found[0], reason, answered=isinstance(end, Output))

    def _go_on(self) -> None:
        """Compute a step, and another one after the jobs that have come meanwhile."""
        self.step_began = perf_counter()
        try:
            self._step()
        except Exception as error:  # not of the LLM, but of the server
            logger.exception("no further step is possible")
            self._lose(error)
            return
        self.step_began = None
        self._steps = self.llm.has_unfinished
        if self._steps:
            self._jobs.submit(self._go_on)

    def _step(self) -> None:
        """Compute a step, and tell the event loop of it."""
        outputs: list[Output] = []
        try:
            outputs = self.llm.step()
        except Exception as error:
            if isinstance(error, GroupLost):
                self._lose(error)
            else:
                logger.exception("a step failed, and with it the requests that ran in it")
            # if the step failed before it had any request, fail the oldest waiting one, or this would go on for ever
            waiting = [request.id for request in islice(self.llm.scheduler.waiting, 1)]
            for request_id in self.llm.failed_ids or waiting:
                self.llm.abort(request_id)
                self._end(request_id, Failure(f"{type(error).__name__}: {error}", status=500), "error")
        for output in outputs:
            self._end(output.request_id, output, output.finish_reason)
        self.metrics.update()
        events, self._events = self._events, []

        def deliver() -> None:
            for answer, index, event in events:
                answer.events.put_nowait((index, event))

        self._loop.call_soon_threadsafe(deliver)

    def _lose(self, error: Exception) -> None:
        """End the server, once."""
        if not self.lost:
            logger.error("the server ends: %s", error)
            self.lost = True
            self.when_lost()
