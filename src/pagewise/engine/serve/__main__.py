"""Serve a model to OpenAI's clients: python -m pagewise.engine.serve --model FOLDER_OR_HUB_ID (lesson 9)."""

import argparse
import sys
from collections.abc import Sequence

import torch

from pagewise.engine.llm import LLM
from pagewise.models.load import TINY


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM, take nothing new then, and end when what runs has ended.

    The exit status is 2 where the command cannot be done; one line on stderr says why.
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

        app = make_app(LLM(model, **asked), name=name, max_queue=max_queue)
    except ModuleNotFoundError as error:
        print(f"error: the server needs {error.name}: pip install 'pagewise[serve]'", file=sys.stderr)
        return 2
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    uvicorn.run(app, **address, access_log=False, timeout_graceful_shutdown=grace)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagewise.engine.serve", description="A server for OpenAI's clients: http://HOST:PORT/v1"
    )
    parser.add_argument("--model", help="a folder or a hub id; default: the tiny model that ships with the package")
    parser.add_argument("--name", help="what clients call the model; default: as --model")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: for other machines too")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--max-queue", type=int, default=256, metavar="N", help="requests at once; others get a 429")
    parser.add_argument("--grace", type=int, default=30, metavar="S", help="seconds to end in when the server ends")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="of the cache; default: from the free memory")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a block")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="sequences in a step")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in a step")
    parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", default=None)
    parser.add_argument("--attention", choices=("paged", "dense"), default="paged", help="the cache")
    parser.add_argument("--backend", choices=("auto", "torch", "triton", "cuda"), default="auto", help="the kernels")
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help="tokens to guess and check in a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the best there is")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
