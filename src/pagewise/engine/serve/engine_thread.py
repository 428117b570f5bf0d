"""The only thread that calls an LLM, and the messages between this thread and an event loop (lesson 9).

    event loop                         engine thread
    submit, drop      ── inbox ──▶     runs the jobs in order, between two steps
    Answer.events  ◀── once a step ──  pieces, outputs, or an error

The engine never waits for a reader. Events that a reader has not taken yet wait in its `Answer`, which holds at most
the tokens of its requests. Answers that are not read to their end count against `max_queue`. So memory is bounded.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TypeVar

from pagewise.engine import LLM, Output
from pagewise.engine.leader import GroupLost
from pagewise.engine.request import Piece, Request
from pagewise.engine.serve.errors import Full, StepFailed
from pagewise.engine.serve.metrics import Metrics

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Answer:
    """The events of one body's requests: (index of the request, piece or output)."""

    def __init__(self, num_requests: int) -> None:
        self.arrived = perf_counter()
        self.request_ids: list[int] = []  # the engine thread's
        self.events: asyncio.Queue[tuple[int, Piece | Output | StepFailed]] = asyncio.Queue()
        self._unfinished = num_requests

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece | Output]]:
        """Yield events until every request has its output.

        Raises:
            StepFailed: a step raised, or a choice ended with an error. The answer will not be whole.
        """
        while self._unfinished:
            index, event = await self.events.get()
            if isinstance(event, StepFailed):
                raise event
            if event.error is not None:
                raise StepFailed(event.error)
            self._unfinished -= isinstance(event, Output)
            yield index, event

    async def outputs(self) -> list[Output]:
        """Return the output of each request, in their order."""
        found = {index: event async for index, event in self if isinstance(event, Output)}
        return [output for _, output in sorted(found.items())]


class EngineThread:
    """Runs `llm.step()` while there is something to compute, and sleeps otherwise.

    Invariant: apart from jobs that still wait in the inbox, a request is in `llm` only while its answer is open (`with
    engine.answer(...)`). An exception in a step fails only the requests that ran in this step. GroupLost fails every
    request, and `when_lost` is called, which should end the server.
    """

    def __init__(self, llm: LLM, *, max_queue: int) -> None:
        self.llm, self.max_queue = llm, max_queue
        self.metrics = Metrics(llm)
        self.lost, self.when_lost = False, lambda: None
        self.cut_off = False  # whether the server ended before an answer was complete
        self._step_began: float | None = None
        self.num_held = 0  # requests of open answers; the event loop's
        self._inbox: SimpleQueue[tuple[Future, Callable[[], object]] | None] = SimpleQueue()
        self._answers: dict[int, tuple[Answer, int]] = {}  # by request id; the engine thread's own, like the next
        self._events: list[tuple[int, Piece | Output | StepFailed]] = []

    def start(self) -> None:
        """Start the thread. Call this from the event loop that will read the answers."""
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread can compute."""
        return self._thread.is_alive() and not self.lost

    @property
    def step_seconds(self) -> float:
        """How long the step in progress takes already, or 0.0."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    async def stop(self) -> None:
        """End the thread after its current step. No answer may be open."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @contextmanager
    def answer(self, num_requests: int) -> Iterator[Answer]:
        """Reserve places for `num_requests` requests. Unfinished requests are aborted at the end of the `with` block.

        Raises:
            Full: the queue has no space for them now.
        """
        if self.num_held + num_requests > self.max_queue:
            raise Full(f"{self.num_held} requests wait or run, and {self.max_queue} may: try again in a moment")
        self.num_held += num_requests
        answer = Answer(num_requests)
        try:
            yield answer
        finally:
            self.num_held -= num_requests
            self._post(lambda: self._drop(answer))

    async def submit(self, answer: Answer, requests: list[Request], *, pieces: bool) -> list[int]:
        """Add the prepared requests of an answer and return their ids. With `pieces`, the answer also gets every piece.

        If the call is cancelled before the engine thread begins it, no request is added.
        """
        return await asyncio.wrap_future(self._post(lambda: self._add(answer, requests, pieces)))

    def _post(self, work: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._inbox.put((future, work))
        return future

    # ------------------------------------------------------------------------------------ on the engine thread

    def _run(self) -> None:
        while True:
            while not (self.llm.has_unfinished and self._inbox.empty()):
                if (job := self._inbox.get()) is None:
                    return
                _do(*job)
            self._step_began = perf_counter()
            self._step()
            self._step_began = None

    def _add(self, answer: Answer, requests: list[Request], pieces: bool) -> list[int]:
        for index, request in enumerate(requests):
            request.listener = self._hear if pieces else self.metrics.hear
            request_id = self.llm.add(request)
            answer.request_ids.append(request_id)
            self._answers[request_id] = answer, index
            self.metrics.begin(request, answer.arrived)
        self.metrics.update()
        return answer.request_ids

    def _drop(self, answer: Answer) -> None:
        for request_id in answer.request_ids:
            if self._answers.pop(request_id, None):
                self.llm.abort(request_id)
                self.metrics.end(request_id, "abort", answered=False)
        self.metrics.update()

    def _hear(self, piece: Piece) -> None:
        self.metrics.hear(piece)
        self._events.append((piece.request_id, piece))

    def _step(self) -> None:
        try:
            self._events += ((output.request_id, output) for output in self.llm.step())
        except Exception as error:
            if not isinstance(error, GroupLost):
                logger.exception("a step failed, and with it the requests that ran in it")
            elif not self.lost:
                logger.error("the server ends: %s", error)
                self.lost = True
                self.when_lost()
            # if the step failed before it had any request, fail the oldest waiting one, or this would go on for ever
            waiting = [request.id for request in islice(self.llm.scheduler.waiting, 1)]
            for request_id in self.llm.failed_ids or waiting:
                self.llm.abort(request_id)
                self._events.append((request_id, StepFailed(f"{type(error).__name__}: {error}")))
        events, self._events = self._events, []
        # without requests that ended in a failing step and were dropped before the next step reported them
        heard = [(*self._answers[request_id], event) for request_id, event in events if request_id in self._answers]
        for request_id, event in events:
            if not isinstance(event, Piece):
                self._answers.pop(request_id, None)
                answered = isinstance(event, Output)
                self.metrics.end(request_id, event.finish_reason if answered else "error", answered=answered)
        self.metrics.update()
        self._loop.call_soon_threadsafe(_deliver, heard)


def _do(future: Future, work: Callable[[], object]) -> None:
    """Run a job, unless its caller has cancelled it."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)


def _deliver(events: list[tuple[Answer, int, Piece | Output | StepFailed]]) -> None:
    for answer, index, event in events:
        answer.events.put_nowait((index, event))
