"""Serve a model to OpenAI's clients: python -m pagewise.engine.serve --model FOLDER_OR_HUB_ID (lesson 9)."""

import argparse
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from pagewise.engine.command_line import Parser, add_engine_options, engine_config
from pagewise.engine.leader import GroupLost
from pagewise.engine.llm import LLM
from pagewise.models.load import TINY
from pagewise.tools.checks import check_counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Then refuse new requests, and end when the running requests have ended.

    If the command cannot be done, print one line on stderr that says why, and return exit status 2. All options and the
    address are checked before the model is loaded. If a process of tensor parallelism ends, or --grace does, answer all
    requests with an error, and return 1.
    """
    asked = _parser().parse_args(arguments)
    try:
        import uvicorn

        from pagewise.engine.serve import app as asgi
        from pagewise.engine.serve.protocol import Protocol

        check_counts(max_queue=asked.max_queue, request_timeout=asked.request_timeout)
        check_counts(minimum=0, grace=asked.grace, keep_alive=asked.keep_alive)
        asgi.check_origins(asked.allow_origin)
        template = None if asked.chat_template is None else _chat_template(Path(asked.chat_template))
        config = engine_config(asked)
        leads = os.environ.get("RANK", "0") == "0"  # under torchrun only one process serves
        address = _bound(asked.host, asked.port) if leads else None
        llm = LLM(asked.model or TINY, config)
        if template is not None:
            if not hasattr(llm.tokenizer, "apply_chat_template"):
                raise ValueError("chat_template needs a tokenizer of transformers, which the checkpoint does not have")
            llm.tokenizer.chat_template = template
        options = {"max_queue": asked.max_queue, "api_key": asked.api_key, "allow_origins": asked.allow_origin}
        app = asgi.make_app(llm, name=asked.name or asked.model or "tiny", **options)
    except (GroupLost, ImportError, OSError, TypeError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        said = f"the server needs {error.name}: pip install 'attention-page-by-page[serve]'" if missing else error
        print(f"error: {said}", file=sys.stderr)
        return 2

    if asked.log_requests:
        logging.basicConfig(format="%(asctime)s %(message)s")
        asgi.requests.setLevel(logging.INFO)
    timeouts = {"timeout_graceful_shutdown": asked.grace, "timeout_keep_alive": asked.keep_alive}
    protocol = functools.partial(Protocol, seconds=asked.request_timeout)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, access_log=False, **timeouts))
    engine = app.state.engine
    engine.when_lost = lambda: setattr(server, "should_exit", True)
    address.listen()  # the first clients wait until uvicorn has started
    host, port = address.getsockname()[:2]  # uvicorn says this only of sockets that it has bound
    print(f"serving at http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
    # uvicorn raises the signal again when it has ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(engine.cut_off)))
    with llm, contextlib.suppress(KeyboardInterrupt):
        server.run([address])
    return int(engine.lost or engine.cut_off)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that does not listen yet, so clients are refused until a model is there, or raise ValueError."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be from 0 to {2**16 - 1}, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ValueError(f"cannot serve at {host} port {port}: {error.strerror or error}") from error
    return found


def _chat_template(path: Path) -> str:
    """Return the chat template in a file. ValueError: the file is missing or not UTF-8, or the syntax is wrong."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = path.read_text(encoding="utf-8")
        render_jinja_template([[{"role": "user", "content": "Hi"}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template {path}, line {error.lineno}: {error.message}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template {path}: {error}") from error
    except Exception:  # the template may refuse this conversation and serve others
        pass
    return template


def _parser() -> argparse.ArgumentParser:
    what = "A server for OpenAI's clients: http://HOST:PORT/v1"
    parser = Parser(prog="python -m pagewise.engine.serve", description=what)
    parser.add_argument("--model", help="a folder or a hub id; default: the tiny model that ships with the package")
    parser.add_argument("--name", help="the name of the model for clients; default: as --model")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 also serves other machines")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--max-queue", type=int, default=256, metavar="N", help="most requests; others get a 429")
    parser.add_argument("--grace", type=int, default=30, metavar="S", help="seconds for requests at the end")
    parser.add_argument("--keep-alive", type=int, default=120, metavar="S", help="seconds for an idle connection")
    parser.add_argument("--request-timeout", type=int, default=60, metavar="S", help="seconds for a request to arrive")
    parser.add_argument("--api-key", metavar="KEY", help="clients must send it; default: any client is served")
    parser.add_argument("--allow-origin", action="append", default=[], metavar="URL", help="CORS: an origin, or *")
    parser.add_argument("--chat-template", metavar="FILE", help="in place of the checkpoint's")
    parser.add_argument("--log-requests", action="store_true", help="a line for each request, without its text")
    add_engine_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
