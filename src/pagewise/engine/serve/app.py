"""The server as an ASGI application: routes, streams, errors (lesson 9).

    POST /v1/completions   /v1/chat/completions        GET /v1/models   /health   /metrics

The first three are those of OpenAI's API, so that its client works. Errors have its form too (see `errors`). When a
client hangs up, whether it reads a stream or waits for the whole, the server aborts its requests. /health answers at
once, and says how long the step in progress takes already. /metrics is for Prometheus: see `metrics`.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from hmac import compare_digest
from threading import Event
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from pagewise.engine import LLM, Output
from pagewise.engine.serve.body import Body, usage
from pagewise.engine.serve.endpoints import ChatBody, CompletionBody
from pagewise.engine.serve.engine_thread import Answer, EngineThread
from pagewise.engine.serve.errors import Failure, Refused, StepFailed, error_body, refusal
from pagewise.engine.serve.tokens import Tokens
from pagewise.tools.checks import check_counts

T = TypeVar("T")
logger = logging.getLogger(__name__)
LARGEST_BODY = 2**23  # bytes
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass each event on at once


def make_app(llm: LLM, *, name: str, max_queue: int = 256, api_key: str | None = None) -> Starlette:
    """Return the application that serves `llm` as the model `name`. More than `max_queue` requests at once get a 429.

    With an `api_key`, a request to /v1 needs the header "Authorization: Bearer KEY", as OpenAI's clients send it.

    Raises:
        ValueError, TypeError: max_queue is not a count, or the model has no tokenizer.
    """
    check_counts(max_queue=max_queue)
    if llm.tokenizer is None:
        raise ValueError("the model has no tokenizer, and the server answers with text: give LLM a tokenizer")
    if getattr(llm.tokenizer, "chat_template", "") is None:
        logger.warning('the tokenizer has no chat template: conversations become lines "role: text"')
    engine = EngineThread(llm, max_queue=max_queue)
    tokens = Tokens(llm)
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "pagewise"}
    model["max_model_len"] = tokens.context

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    async def models(request: Request) -> Response:
        check_key(request, api_key)
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        check_key(request, api_key)
        check_name(request.path_params["name"], name)
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        state = {"running": llm.num_running, "waiting": llm.num_waiting, "step_seconds": engine.step_seconds}
        return JSONResponse({"status": "ok", **state}) if engine.alive else JSONResponse({"status": "lost"}, 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type="text/plain; version=0.0.4")

    async def refused(request: Request, error: Exception) -> Response:
        response = refusal(error, request)
        if 400 <= response.status_code < 500:
            engine.metrics.refuse(response.status_code)
        return response

    app = Starlette(
        routes=[
            Route("/v1/completions", Endpoint(CompletionBody, engine, tokens, name, api_key), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(ChatBody, engine, tokens, name, api_key), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers=dict.fromkeys((Failure, HTTPException, ClientDisconnect, Exception), refused),
        lifespan=running,
    )
    app.state.engine = engine
    return app


class Endpoint:
    """A POST route for one kind of body. It answers in one piece or as a stream of server-sent events."""

    def __init__(self, body: type[Body], engine: EngineThread, tokens: Tokens, name: str, api_key: str | None) -> None:
        self.body, self.engine, self.tokens, self.name, self.api_key = body, engine, tokens, name, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_as: list[bytes] = []  # the content type of the answer, once its first bytes are sent

        async def noted(message: Message) -> None:
            began_as.extend(value for name, value in message.get("headers", ()) if name == b"content-type")
            await send(message)

        try:
            await self.answer(Request(scope, receive), receive, noted)
        except asyncio.CancelledError:  # the server ends, and does not wait any longer
            self.engine.cut_off = True
            error = Refused("the server ended before the answer was complete", status=503)
            if not began_as:
                raise error from None
            if began_as[0].startswith(b"text/event-stream"):
                last = event(error_body(error)).encode()
                with suppress(asyncio.CancelledError):  # a client that reads nothing hears nothing
                    await send({"type": "http.response.body", "body": last, "more_body": False})

    async def answer(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer a request, unless its client hangs up."""
        check_key(request, self.api_key)
        body = self.body.read(await read(request))
        if body.model is not None:
            check_name(body.model, self.name)
        if (number := len(body.prompts)) > self.engine.max_queue:
            most = f"max_queue = {self.engine.max_queue}"
            raise Refused(f"{number} prompts exceed {most}: send fewer at once", body.prompt_field)
        with self.engine.answer(number) as answer:
            if (outputs := await unless_hung_up(receive, self.outputs(body, answer))) is None:
                return
            if body.stream:
                options = {"media_type": "text/event-stream", "headers": UNBUFFERED}
                response: Response = StreamingResponse(self.events(body, answer), **options)
            else:
                response = await asyncio.to_thread(self.whole, body, outputs)  # log-probabilities take a while
            await response(request.scope, receive, send)

    async def outputs(self, body: Body, answer: Answer) -> list[Output]:
        """Submit the requests of a body. Return their outputs, or none if they are for a stream."""
        left = Event()
        try:  # a thread tokenises, so that neither the event loop nor the engine waits for a long prompt
            requests = await asyncio.to_thread(body.requests, self.tokens, left)
        finally:
            left.set()
        await self.engine.submit(answer, requests, pieces=bool(body.stream))
        return [] if body.stream else await answer.outputs()

    def whole(self, body: Body, outputs: list[Output]) -> Response:
        """Return the answer in one piece."""
        choices = [choice for i, output in enumerate(outputs) for choice in body.choices(i, output, self.tokens)]
        return JSONResponse(self.head(body, body.object) | {"choices": choices, "usage": usage(outputs)})

    async def events(self, body: Body, answer: Answer) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, while the engine computes it."""
        head, outputs = self.head(body, body.chunk_object), []
        if counted := (body.stream_options or {}).get("include_usage"):
            head["usage"] = None
        for opening in body.openings():
            yield event(head | {"choices": [opening]})
        try:
            async for index, new in answer:
                if isinstance(new, Output):
                    outputs.append(new)
                else:
                    yield event(head | {"choices": [body.piece(index, new, self.tokens)]})
        except StepFailed as error:
            yield event(error_body(error))
            return
        if counted:
            yield event(head | {"choices": [], "usage": usage(outputs)})
        yield "data: [DONE]\n\n"

    def head(self, body: Body, kind: str) -> dict[str, Any]:
        """Return the fields that every chunk of an answer begins with."""
        made = {"id": body.id_prefix + uuid.uuid4().hex, "created": int(time.time())}
        return {**made, "object": kind, "model": self.name}


def event(body: dict) -> str:
    """Return a server-sent event, in ASCII: some clients take U+2028 or U+0085 for the end of a line."""
    return f"data: {json.dumps(body)}\n\n"


async def read(request: Request) -> bytes:
    """Return the body of a request, which must be JSON as it stands."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    packed = request.headers.get("content-encoding", "identity")
    if packed != "identity" or not kind.endswith("json"):
        raise Refused(f"the body must be application/json, not compressed, got {kind}, {packed}", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise Refused(f"the body is larger than {LARGEST_BODY} bytes", status=413)
    return bytes(body)


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client hangs up before, cancel `work` and return None."""
    hung_up, done = asyncio.ensure_future(hang_up(receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((hung_up, done), return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        hung_up.cancel()
        done.cancel()


async def hang_up(receive: Receive) -> None:
    """Wait until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def check_name(asked: str, served: str) -> None:
    """Refuse a model name that this server does not serve."""
    if asked != served:
        message = f"there is no model {asked!r:.80} here, only {served!r}"
        raise Refused(message, "model", status=404, code="model_not_found")


def check_key(request: Request, key: str | None) -> None:
    """Refuse a request without the key, if there is one."""
    given = dict(request.headers.raw).get(b"authorization", b"")
    if key is not None and not compare_digest(given, f"Bearer {key}".encode()):
        message = "the header Authorization must be 'Bearer' and the key of this server"
        raise Refused(message, status=401, code="invalid_api_key")
