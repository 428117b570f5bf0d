"""A server on this machine, for the tests that talk to it."""

import functools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import httpx
import uvicorn
from eventually import soon

from pagewise.engine import LLM
from pagewise.engine.serve.app import make_app
from pagewise.engine.serve.engine_thread import EngineThread
from pagewise.engine.serve.protocol import Protocol
from pagewise.models import tiny_model

COMPLETION = "/v1/completions"


def tiny_llm(**options):
    model, tokenizer = tiny_model()
    return LLM(model, tokenizer=tokenizer, **{"num_blocks": 256} | options)


def head(body: str, path: str = COMPLETION, more: str = "") -> bytes:
    """The head of a request with this body, as it goes over the connection."""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode()


@dataclass
class Server:
    """A server in a thread of this process."""

    llm: LLM
    engine: EngineThread
    url: str
    http: httpx.Client  # a plain client

    @cached_property
    def client(self):
        """OpenAI's official client."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.http)

    def post(self, path: str, body: object, **options) -> httpx.Response:
        """A body as it stands: JSON of anything, or bytes."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(path, **content, **options)

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=20)

    def hang_up(self, body: dict, when: Callable[[], object]) -> None:
        """Ask for a completion, wait until `when()` is true, and close the connection without reading the answer.

        A client whose time is up would close the connection at a moment that nobody knows: on a busy machine before
        the server has read the request.
        """
        content = json.dumps(body)
        with self.connection() as client:
            client.sendall(head(content) + content.encode())
            assert soon(when)

    def is_idle(self) -> bool:
        """Nothing is held any more: no request, no block."""
        manager = self.llm.memory
        free = manager.num_free_blocks == manager.num_blocks
        return free and not (self.engine.num_held or self.llm.has_unfinished or self.engine._answers)

    def becomes_idle(self) -> bool:
        """Whether it is idle soon."""
        return soon(self.is_idle)


@contextmanager
def serving(llm: LLM, *, request_timeout: float = 60, **options) -> Iterator[Server]:
    """`llm` behind a free port."""
    app = make_app(llm, name="tiny", **options)
    protocol = functools.partial(Protocol, seconds=request_timeout)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_level="error", timeout_graceful_shutdown=10))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that a slow reader is noticed soon
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert soon(lambda: server.started)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=30, verify=False) as http:  # reads no certificates, which takes longer
            yield Server(llm, app.state.engine, url, http)
    finally:
        server.should_exit = True
        thread.join()
    assert not any(thread.is_alive() for thread in app.state.engine._jobs._threads)
