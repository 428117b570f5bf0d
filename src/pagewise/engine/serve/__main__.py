"""Serve a model to OpenAI's clients: python -m pagewise.engine.serve --model FOLDER_OR_HUB_ID (lesson 9)."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

import torch

from pagewise.engine.command_line import add_engine_options, take_engine_options
from pagewise.engine.followers import GroupLost
from pagewise.engine.llm import LLM
from pagewise.models.load import TINY


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Then refuse new requests, and end when the running requests have ended.

    If the command cannot be done, print one line on stderr that says why, and return exit status 2. If a process of
    tensor parallelism ends, answer all requests with an error, and return 1.
    """
    asked = vars(_parser().parse_args(arguments))
    name, max_queue = asked.pop("name") or asked["model"] or "tiny", asked.pop("max_queue")
    address = {option: asked.pop(option) for option in ("host", "port")}
    grace, model = asked.pop("grace"), asked.pop("model") or TINY
    if asked["dtype"] is not None:
        asked["dtype"] = getattr(torch, asked["dtype"])
    try:
        import uvicorn

        from pagewise.engine.serve.app import make_app

        options = take_engine_options(asked)
        llm = LLM(model, **options, **asked)
        app = make_app(llm, name=name, max_queue=max_queue)
    except ModuleNotFoundError as error:
        print(f"error: the server needs {error.name}: pip install 'attention-page-by-page[serve]'", file=sys.stderr)
        return 2
    except (GroupLost, ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    server = uvicorn.Server(uvicorn.Config(app, **address, access_log=False, timeout_graceful_shutdown=grace))
    engine = app.state.engine
    engine.when_lost = lambda: setattr(server, "should_exit", True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises the signal again when it has ended
    with llm, contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 1 if engine.lost else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagewise.engine.serve", description="A server for OpenAI's clients: http://HOST:PORT/v1"
    )
    parser.add_argument("--model", help="a folder or a hub id; default: the tiny model that ships with the package")
    parser.add_argument("--name", help="the name of the model for clients; default: as --model")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 also serves other machines")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--max-queue", type=int, default=256, metavar="N", help="most requests; others get a 429")
    parser.add_argument("--grace", type=int, default=30, metavar="S", help="seconds for requests at the end")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a block")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="most sequences in a step")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="most tokens in a step")
    parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", default=None)
    add_engine_options(parser)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
