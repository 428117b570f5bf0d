"""What a client gets: the events of its requests, or an error in OpenAI's form (lesson 9).

{"error": {"message": …, "type": …, "param": the field of the body or null, "code": OpenAI's name or null}}
"""

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter, time
from uuid import uuid4

from pagewise.engine import Output
from pagewise.engine.request import Piece, Request

QUIET = 5.0  # seconds without an event, after which an answer says so


class Failure(Exception):
    """A request without an answer: the field of the body that is wrong, the status, and OpenAI's code, if any."""

    def __init__(self, message: str, field: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code

    @property
    def body(self) -> dict:
        """The error in the form that OpenAI's client raises as an exception."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


class Answer:
    """The requests of one body, and what comes of them: (index of the request, piece or output)."""

    def __init__(self, id_prefix: str, model: str) -> None:
        self.id, self.arrived = id_prefix + uuid4().hex, perf_counter()
        self.head = {"id": self.id, "created": int(time()), "model": model}  # of the whole answer, or of every chunk
        self.requests: list[Request] = []
        self.events: asyncio.Queue[tuple[int, Piece | Output | Failure]] = asyncio.Queue()
        self.sent_as = ""  # "stream" or "whole", when its client begins to get it
        self.end = "abort"  # or its finish reasons, or the status of an error
        self.num_tokens = 0  # the engine thread's, like the next two
        self.first: float | None = None  # when the first token came
        self.newest: list[dict[int, float]] = []  # of each request: when each of its choices got the newest token

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece | Output | None]]:
        """Yield events until every request has its output. Yield (-1, None) if there was none for a while.

        Raises:
            Failure: a step raised, or a choice ended with an error. The answer will not be whole.
        """
        unfinished, reasons = len(self.requests), {}
        while unfinished:
            try:
                async with asyncio.timeout(QUIET):
                    index, event = await self.events.get()
            except TimeoutError:
                yield -1, None
                continue
            if isinstance(event, Failure):
                raise event
            if event.error is not None:
                raise Failure(event.error, status=500)
            if isinstance(event, Output):
                unfinished -= 1
                reasons |= dict.fromkeys(choice.finish_reason for choice in event.choices)
            yield index, event
        self.end = ",".join(reasons)

    def line(self) -> str:
        """Return the line of the log: the tokens of all prompts and choices, and seconds since the request arrived."""
        first = "-" if self.first is None else f"{self.first - self.arrived:.3f}"
        prompt = sum(len(request.prompt) for request in self.requests)
        tokens = f"prompt_tokens={prompt} completion_tokens={self.num_tokens}"
        return f"id={self.id} {tokens} first={first} total={perf_counter() - self.arrived:.3f} end={self.end}"
