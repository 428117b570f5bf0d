"""What a client gets: the events of its requests, or an error in OpenAI's form (lesson 9).

{"error": {"message": …, "type": …, "param": the field of the body or null, "code": OpenAI's name or null}}
"""

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter, time
from uuid import uuid4

from pagewise.engine import Output
from pagewise.engine.request import Piece, Request


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
    """The requests of one body, and what comes of them."""

    def __init__(self, id_prefix: str, model: str) -> None:
        self.id, self.arrived = id_prefix + uuid4().hex, perf_counter()
        self.head = {"id": self.id, "created": int(time()), "model": model}  # of the whole answer, or of every chunk
        self.requests: list[Request] = []
        self.events: asyncio.Queue[tuple[int, Piece | Output | Failure]] = asyncio.Queue()
        self.outputs: dict[int, Output] = {}  # of the requests that have ended, by their index
        self.end = "abort"  # or its finish reasons, or the status of an error
        self.num_tokens = 0  # the engine thread's, like the next two
        self.first: float | None = None  # when the first token came
        self.newest: list[dict[int, float]] = []  # of each request: when each of its choices got the newest token

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (index of a request, piece) until every request has its output.

        Raise Failure if a step raised, or if a choice ended with an error. The answer will not be whole.
        """
        while len(self.outputs) < len(self.requests):
            index, event = await self.events.get()
            if isinstance(event, Failure):
                raise event
            if event.error is not None:
                raise Failure(event.error, status=500)
            if isinstance(event, Output):
                self.outputs[index] = event
            else:
                yield index, event
        choices = (choice for output in self.outputs.values() for choice in output.choices)
        self.end = ",".join(dict.fromkeys(choice.finish_reason for choice in choices))

    def usage(self) -> dict:
        """Count the prompt tokens, those among them that the prefix cache had, and the generated tokens."""
        prompt, completion = sum(len(request.prompt) for request in self.requests), self.num_tokens
        cached = {"cached_tokens": sum(output.num_cached_tokens for output in self.outputs.values())}
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return counts | {"prompt_tokens_details": cached}

    def line(self) -> str:
        """Return the line of the log: the tokens of all prompts and choices, and seconds since the request arrived."""
        first = "-" if self.first is None else f"{self.first - self.arrived:.3f}"
        tokens = "prompt_tokens={prompt_tokens} completion_tokens={completion_tokens}".format_map(self.usage())
        return f"id={self.id} {tokens} first={first} total={perf_counter() - self.arrived:.3f} end={self.end}"
