"""python -m pagewise.engine.serve --model FOLDER_OR_HUB_ID"""

import argparse
import sys
from collections.abc import Sequence

import torch

from pagewise.engine import LLM
from pagewise.models.load import TINY


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; then take nothing new, and end when what runs has ended."""
    parser = argparse.ArgumentParser("python -m pagewise.engine.serve", description="An OpenAI-compatible server.")
    parser.add_argument("--model", help="a folder or hub id; default: the tiny model that ships with the package")
    parser.add_argument("--name", help="what clients call the model; default: as --model, or tiny")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--max-queue", type=int, default=256, help="requests held at once; one more is answered 429")
    parser.add_argument("--grace", type=int, default=30, help="seconds that requests have to end in at shutdown")
    parser.add_argument("--num-blocks", type=int, help="of the KV cache; default: from free memory")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--attention", choices=("paged", "dense"), default="paged")
    parser.add_argument("--backend", choices=("auto", "torch", "triton", "cuda"), default="auto")
    parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", default=None)
    parser.add_argument("--device")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name))
    options = vars(parser.parse_args(argv))
    try:
        import uvicorn

        from pagewise.engine.serve.app import make_app
    except ImportError as error:
        sys.exit(f"the server needs {error.name}: pip install 'pagewise[serve]'")
    model, name, host, port, max_queue, grace = map(
        options.pop, ("model", "name", "host", "port", "max_queue", "grace")
    )
    llm = LLM(model or TINY, **options)
    app = make_app(llm, name=name or model or "tiny", max_queue=max_queue)
    uvicorn.run(app, host=host, port=port, access_log=False, timeout_graceful_shutdown=grace)


if __name__ == "__main__":
    main()
