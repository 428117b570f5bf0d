"""The server as an ASGI application: routes, streams, errors (lesson 9).

    POST /v1/completions   /v1/chat/completions        GET /v1/models   /health   /metrics

The first three are those of OpenAI's API, so that its client works. Errors have its form too:
{"error": {message, type, param, code}}. When a client hangs up, whether it reads a stream or waits for the whole, the
server aborts its requests. /metrics is for Prometheus: `pagewise.engine.serve.metrics` lists the names.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pagewise.engine import LLM, Output
from pagewise.engine.serve.body import Body, Refused, usage
from pagewise.engine.serve.endpoints import ChatBody, CompletionBody
from pagewise.engine.serve.engine_thread import Answer, EngineThread, Full, StepFailed
from pagewise.tools.checks import check_counts

T = TypeVar("T")
LARGEST_BODY = 2**23  # bytes


def make_app(llm: LLM, *, name: str, max_queue: int = 256) -> Starlette:
    """Return the application that serves `llm` as the model `name`. More than `max_queue` requests at once get a 429.

    Raises:
        ValueError, TypeError: max_queue is not a count, or the model has no tokenizer.
    """
    check_counts(max_queue=max_queue)
    if llm.tokenizer is None:
        raise ValueError("the model has no tokenizer, and the server answers with text: give LLM a tokenizer")
    engine = EngineThread(llm, max_queue=max_queue)
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "pagewise"}

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        check_name(request.path_params["name"], name)
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        state = await engine.ask(lambda: {"running": llm.num_running, "waiting": llm.num_waiting})
        return JSONResponse({"status": "ok", **state})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type="text/plain; version=0.0.4")

    async def refused(request: Request, error: Exception) -> Response:
        response = await refusal(request, error)
        if 400 <= response.status_code < 500:
            engine.metrics.refuse(response.status_code)
        return response

    app = Starlette(
        routes=[
            Route("/v1/completions", Endpoint(CompletionBody, engine, name), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(ChatBody, engine, name), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers=dict.fromkeys(
            (Refused, Full, StepFailed, HTTPException, ClientDisconnect, Exception), refused
        ),
        lifespan=running,
    )
    app.state.engine = engine
    return app


class Endpoint:
    """A POST route for one kind of body. It answers in one piece or as a stream of server-sent events."""

    def __init__(self, body: type[Body], engine: EngineThread, name: str) -> None:
        self.body, self.engine, self.name, self.tokenizer = body, engine, name, engine.llm.tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self.body.read(await read(Request(scope, receive)))
        if body.model is not None:
            check_name(body.model, self.name)
        if (number := len(body.prompts)) > self.engine.max_queue:
            most = f"max_queue = {self.engine.max_queue}"
            raise Refused(f"{number} prompts exceed {most}: send fewer at once", body.prompt_field)
        with self.engine.answer(number) as answer:
            # a thread tokenises, so that neither the event loop nor the engine waits for a long prompt
            prepared = asyncio.to_thread(body.requests, self.engine.llm)
            if (requests := await unless_hung_up(receive, prepared)) is None:
                return
            if not await unless_hung_up(receive, self.engine.submit(answer, requests, pieces=bool(body.stream))):
                return
            if body.stream:
                response = StreamingResponse(self.events(body, answer), media_type="text/event-stream")
            elif outputs := await unless_hung_up(receive, answer.outputs()):
                response = JSONResponse(self.whole(body, outputs))
            else:
                return
            await response(scope, receive, send)

    def whole(self, body: Body, outputs: list[Output]) -> dict:
        """Return the answer in one piece."""
        choices = [choice for i, output in enumerate(outputs) for choice in body.choices(i, output, self.tokenizer)]
        return self.head(body, body.object) | {"choices": choices, "usage": usage(outputs)}

    async def events(self, body: Body, answer: Answer) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, while the engine computes it."""
        head, outputs = self.head(body, body.chunk_object), []
        counted = body.stream_options is not None and body.stream_options.include_usage
        if counted:
            head["usage"] = None
        for opening in body.openings():
            yield event(head | {"choices": [opening]})
        try:
            async for index, new in answer:
                if isinstance(new, Output):
                    outputs.append(new)
                else:
                    yield event(head | {"choices": [body.piece(index, new, self.tokenizer)]})
        except StepFailed as error:
            yield event(error_body(500, str(error)))
            return
        if counted:
            yield event(head | {"choices": [], "usage": usage(outputs)})
        yield "data: [DONE]\n\n"

    def head(self, body: Body, kind: str) -> dict[str, Any]:
        """Return the fields that every chunk of an answer begins with."""
        made = {"id": body.id_prefix + uuid.uuid4().hex, "created": int(time.time())}
        return {**made, "object": kind, "model": self.name}


def event(body: dict) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def read(request: Request) -> bytes:
    """Return the body of a request."""
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
        raise Refused(f"there is no model {asked!r:.80} here, only {served!r}", "model", status=404)


async def refusal(request: Request, error: Exception) -> Response:
    """Return the answer to a request that ended in an exception."""
    match error:
        case Refused():
            return error_response(error.status, str(error), error.field)
        case Full():
            return error_response(429, str(error), headers={"Retry-After": "1"})
        case StepFailed():
            return error_response(500, str(error))
        case HTTPException():
            return error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        case ClientDisconnect():
            return Response()  # no one reads it
        case _:
            return error_response(500, f"{type(error).__name__}: {error}")


def error_response(status: int, message: str, field: str | None = None, **options: Any) -> Response:
    """Return a response that holds an error in OpenAI's form."""
    return JSONResponse(error_body(status, message, field), status, **options)


def error_body(status: int, message: str, field: str | None = None) -> dict:
    """Return an error in the form that OpenAI's client raises as an exception."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}
