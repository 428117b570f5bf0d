"""A server on this machine, for the tests that talk to it."""

import functools
import socket
import threading
from collections.abc import Iterator
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


def tiny_llm(**options):
    model, tokenizer = tiny_model()
    return LLM(model, tokenizer=tokenizer, **{"num_blocks": 256} | options)


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
