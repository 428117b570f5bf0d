"""The options of `LLM` that both commands share: python -m pagewise.engine and python -m pagewise.engine.serve."""

import argparse
import os
from typing import Any

from pagewise.engine.checks import ATTENTIONS
from pagewise.flash_decoding_plus_plus import Dataflow

SHARED = (
    "attention",
    "backend",
    "num_blocks",
    "kv_cache_dtype",
    "k_scale",
    "v_scale",
    "speculate",
    "dataflow",
    "tensor_parallel",
    "device",
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the shared options to a parser."""
    parser.add_argument("--attention", choices=ATTENTIONS, default="paged", help="the cache")
    parser.add_argument("--backend", choices=("auto", "torch", "triton", "cuda"), default="auto", help="the kernels")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the cache; by default as many as fit")
    parser.add_argument("--kv-cache-dtype", choices=("float8_e4m3fn", "float8_e5m2"), help="by default the model's")
    parser.add_argument("--k-scale", type=float, default=1.0, metavar="X", help="a float8 cache stores k / X")
    parser.add_argument("--v-scale", type=float, default=1.0, metavar="X", help="a float8 cache stores v / X")
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help="draft N tokens, verify them in a step")
    parser.add_argument("--dataflow", metavar="FILE", help="a table of products that Dataflow.save wrote")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=int(os.environ.get("WORLD_SIZE", 1)),
        metavar="N",
        help="processes that share the model; by default those of torchrun, or 1",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the best device")


def take_engine_options(asked: dict[str, Any]) -> dict[str, Any]:
    """Remove the shared options from `asked`, and return them as arguments of `LLM`.

    Raises:
        OSError, ValueError: the file of the dataflow cannot be read, or does not fit this machine.
    """
    options = {name: asked.pop(name) for name in SHARED}
    if options["dataflow"] is not None:
        options["dataflow"] = Dataflow.load(options["dataflow"])
    return options
