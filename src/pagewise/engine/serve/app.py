"""The server as an ASGI application: routes, streams, errors (lesson 9).

    POST /v1/completions   /v1/chat/completions        GET /v1/models   /health   /metrics

The first three are those of OpenAI's API, so that its client works. Errors have its form too. When a client hangs up,
whether it reads a stream or waits for the whole, the server aborts its requests. /health answers at once, and says how
long the step in progress takes already. The logger `requests` gets a line for each POST, without its text.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from threading import Event
from time import perf_counter, time
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pagewise.engine import LLM
from pagewise.engine.request import Piece
from pagewise.engine.serve.answer import Answer, Failure
from pagewise.engine.serve.bodies import Body, ChatBody, CompletionBody
from pagewise.engine.serve.engine_thread import EngineThread
from pagewise.engine.serve.tokens import Tokens
from pagewise.tools.checks import check_counts

logger = logging.getLogger(__name__)
requests = logging.getLogger("pagewise.engine.serve.requests")
LARGEST_BODY = 2**23  # bytes
# proxies pass each event on at once
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")


def make_app(
    llm: LLM, *, name: str, max_queue: int = 256, api_key: str | None = None, allow_origins: Sequence[str] = ()
) -> Starlette:
    """Return the application that serves `llm` as the model `name`. More than `max_queue` requests at once get a 429.

    With an `api_key`, a request to /v1 needs the header "Authorization: Bearer KEY", as OpenAI's clients send it.
    Browsers let the pages of `allow_origins` read answers (CORS): "http://localhost:3000", or "*" for all pages.

    Raise ValueError or TypeError if max_queue is not a count, an origin is none, or the model has no tokenizer.
    """
    check_counts(max_queue=max_queue)
    check_origins(allow_origins)
    if llm.tokenizer is None:
        raise ValueError("the model has no tokenizer, and the server answers with text: give LLM a tokenizer")
    if getattr(llm.tokenizer, "chat_template", "") is None:
        logger.warning('the tokenizer has no chat template: conversations become lines "role: text"')
    engine = EngineThread(llm, max_queue=max_queue)
    tokens = Tokens(llm)
    model = {"id": name, "object": "model", "created": int(time()), "owned_by": "pagewise"}
    model["max_model_len"] = tokens.context

    async def models(request: Request) -> Response:
        check_key(request, api_key)
        asked = request.path_params.get("name")
        check_name(asked, name)
        return JSONResponse({"object": "list", "data": [model]} if asked is None else model)

    async def health(request: Request) -> Response:
        if engine.lost:
            return JSONResponse({"status": "lost"}, 503)
        state = {"running": len(llm.scheduler.running), "waiting": len(llm.scheduler.waiting)}
        seconds = 0.0 if (began := engine.step_began) is None else perf_counter() - began
        return JSONResponse({"status": "ok", **state, "step_seconds": seconds})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type="text/plain; version=0.0.4")

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = Failure(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
        elif not isinstance(error, Failure):
            error = Failure(f"{type(error).__name__}: {error}", status=500)
        if error.status < 500:
            engine.metrics.refused.labels(error.status).inc()
        return JSONResponse(error.body, error.status, headers={"Retry-After": "1"} if error.status == 429 else None)

    browsers = {"allow_origins": [*allow_origins], "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    app = Starlette(
        routes=[
            Route("/v1/completions", Endpoint(CompletionBody, engine, tokens, name, api_key), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(ChatBody, engine, tokens, name, api_key), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers=dict.fromkeys((Failure, HTTPException, Exception), refused),
        middleware=[Middleware(CORSMiddleware, **browsers)] if allow_origins else [],
        lifespan=engine.running,
    )
    app.state.engine = engine
    return app


class Endpoint:
    """A POST route for one kind of body. It answers in one piece or as a stream of server-sent events."""

    def __init__(self, body: type[Body], engine: EngineThread, tokens: Tokens, name: str, api_key: str | None) -> None:
        self.body, self.engine, self.tokens, self.name, self.api_key = body, engine, tokens, name, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(self.body.id_prefix, self.name)
        try:
            await self.respond(Request(scope, receive), send, answer)
        except ClientDisconnect:
            answer.end = "abort"
        except Exception as error:
            answer.end = str(getattr(error, "status", 500))
            raise
        except asyncio.CancelledError:  # the server ends, and does not wait any longer
            self.engine.cut_off = True
            error = Failure("the server ended before the answer was complete", status=503)
            answer.end = str(error.status)
            if "streams" not in scope:
                raise error from None
            if scope["streams"]:
                with suppress(asyncio.CancelledError):  # a client that reads nothing hears nothing
                    await send({"type": "http.response.body", "body": event(error.body).encode()})
        finally:
            requests.info(answer.line())

    async def respond(self, request: Request, send: Send, answer: Answer) -> None:
        """Answer a request, unless its client hangs up."""
        check_key(request, self.api_key)
        body = self.body.read(await read(request))
        check_name(body.model, self.name)
        if (number := len(body.prompts)) > self.engine.max_queue:
            said = f"{number} prompts exceed max_queue = {self.engine.max_queue}: send fewer at once"
            raise Failure(said, body.prompt_field)
        with self.engine.reserved(answer, number):
            await unless_hung_up(request.receive, self.submit(body, answer))
            if body.stream:
                response: Response = StreamingResponse(self.events(body, answer), headers=STREAM)
            else:
                response = await asyncio.to_thread(self.whole, body, answer)  # log-probabilities take a while
            request.scope["streams"] = bool(body.stream)  # its client begins to get it, see also `Protocol`
            await response(request.scope, request.receive, send)

    async def submit(self, body: Body, answer: Answer) -> None:
        """Submit the requests of a body. Wait for their outputs, unless they are for a stream."""
        left = Event()
        try:  # a thread tokenises, so that neither the event loop nor the engine waits for a long prompt
            prepared = await asyncio.to_thread(body.requests, self.tokens, left)
        finally:
            left.set()
        await self.engine.submit(answer, prepared, pieces=bool(body.stream))
        if not body.stream:
            async for _ in answer:
                pass

    def whole(self, body: Body, answer: Answer) -> Response:
        """Return the answer in one piece."""
        choices = []
        for index, output in sorted(answer.outputs.items()):
            for number, (choice, logprobs) in enumerate(zip(output.choices, output.logprobs, strict=True)):
                piece = Piece(output.request_id, number, choice.token_ids, choice.text, choice.finish_reason, logprobs)
                choices.append(body.shown(index, answer.requests[index], piece, self.tokens))
        return JSONResponse(answer.head | {"object": body.object, "choices": choices, "usage": answer.usage()})

    async def events(self, body: Body, answer: Answer) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, while the engine computes it."""
        head, begun = answer.head | {"object": body.chunk_object}, set()
        if counted := (body.stream_options or {}).get("include_usage"):
            head["usage"] = None
        try:
            async for index, piece in answer:
                first = (index, piece.choice) not in begun
                begun.add((index, piece.choice))
                shown = partial(body.shown, index, answer.requests[index], piece, self.tokens, first=first)
                choice = await asyncio.to_thread(shown) if first else shown()  # an echo may be long
                yield event(head | {"choices": [choice]})
        except Failure as error:
            answer.end = str(error.status)
            yield event(error.body)
            return
        if counted:
            yield event(head | {"choices": [], "usage": answer.usage()})
        yield "data: [DONE]\n\n"


def event(body: dict) -> str:
    """Return a server-sent event, in ASCII: some clients take U+2028 or U+0085 for the end of a line."""
    return f"data: {json.dumps(body)}\n\n"


async def read(request: Request) -> bytes:
    """Return the body of a request, which must be JSON as it stands."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    packed = request.headers.get("content-encoding", "identity")
    if packed != "identity" or not kind.endswith("json"):
        raise Failure(f"the body must be application/json, not compressed, got {kind}, {packed}", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise Failure(f"the body is larger than {LARGEST_BODY} bytes", status=413)
    return bytes(body)


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Wait for the end of `work`. If the client hangs up before, cancel `work` and raise ClientDisconnect."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    first, second = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise ClientDisconnect
        first.result()
    finally:
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)  # `work` has cleaned up when its caller does


def check_name(asked: str | None, served: str) -> None:
    """Refuse a model name that this server does not serve. None asks for the only model."""
    if asked not in (None, served):
        message = f"there is no model {asked!r:.80} here, only {served!r}"
        raise Failure(message, "model", status=404, code="model_not_found")


def check_key(request: Request, key: str | None) -> None:
    """Refuse a request without the key, if there is one."""
    given = dict(request.headers.raw).get(b"authorization", b"")
    if key is not None and not compare_digest(given, f"Bearer {key}".encode()):
        message = "the header Authorization must be 'Bearer' and the key of this server"
        raise Failure(message, status=401, code="invalid_api_key")


def check_origins(origins: Sequence[str]) -> None:
    """Raise ValueError if one of them is not what a browser sends as the origin of a page."""
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ValueError(f'allow_origin must be "*" or as "http://localhost:3000", without a path, got {origin!r}')
