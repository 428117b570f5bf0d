"""Serve a model to OpenAI's clients: python -m pagewise.engine.serve --model FOLDER_OR_HUB_ID (lesson 9)."""

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from pagewise.engine.command_line import Parser, add_engine_options, engine_config
from pagewise.engine.leader import GroupLost
from pagewise.engine.llm import LLM
from pagewise.models.load import TINY
from pagewise.tools.checks import check_count, check_counts

MOST_PORT = 2**16 - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Then refuse new requests, and end when the running requests have ended.

    If the command cannot be done, print one line on stderr that says why, and return exit status 2. All options and the
    address are checked before the model is loaded. If a process of tensor parallelism ends, or --grace does, answer all
    requests with an error, and return 1.
    """
    asked = _parser().parse_args(arguments)
    try:
        import uvicorn

        from pagewise.engine.serve.app import make_app

        check_counts(max_queue=asked.max_queue)
        check_counts(minimum=0, grace=asked.grace, keep_alive=asked.keep_alive)
        config = engine_config(asked)
        leads = os.environ.get("RANK", "0") == "0"  # under torchrun only one process serves
        address = _bound(asked.host, asked.port) if leads else None
        llm = LLM(asked.model or TINY, config)
        name = asked.name or asked.model or "tiny"
        app = make_app(llm, name=name, max_queue=asked.max_queue, api_key=asked.api_key)
    except ModuleNotFoundError as error:
        print(f"error: the server needs {error.name}: pip install 'attention-page-by-page[serve]'", file=sys.stderr)
        return 2
    except (GroupLost, ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = address.getsockname()[:2]  # uvicorn says this only of sockets that it has bound
            print(f"serving at http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)

    timeouts = {"timeout_graceful_shutdown": asked.grace, "timeout_keep_alive": asked.keep_alive}
    server = Server(uvicorn.Config(app, access_log=False, **timeouts))
    engine = app.state.engine
    engine.when_lost = lambda: setattr(server, "should_exit", True)
    # uvicorn raises the signal again when it has ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(engine.cut_off)))
    with llm, contextlib.suppress(KeyboardInterrupt):
        server.run([address])
    return int(engine.lost or engine.cut_off)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that has the address and does not listen yet, so that clients are refused until a model is there.

    Raises:
        ValueError, OSError: there is no such address, or it is in use.
    """
    check_count("port", port, minimum=0)
    if port > MOST_PORT:
        raise ValueError(f"port must be at most {MOST_PORT}, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ValueError(f"cannot serve at {host} port {port}: {error.strerror or error}") from error
    return found


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m pagewise.engine.serve", description="A server for OpenAI's clients: http://HOST:PORT/v1"
    )
    parser.add_argument("--model", help="a folder or a hub id; default: the tiny model that ships with the package")
    parser.add_argument("--name", help="the name of the model for clients; default: as --model")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 also serves other machines")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--max-queue", type=int, default=256, metavar="N", help="most requests; others get a 429")
    parser.add_argument("--grace", type=int, default=30, metavar="S", help="seconds for requests at the end")
    parser.add_argument("--keep-alive", type=int, default=120, metavar="S", help="seconds for an idle connection")
    parser.add_argument("--api-key", metavar="KEY", help="clients must send it; default: any client is served")
    add_engine_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
