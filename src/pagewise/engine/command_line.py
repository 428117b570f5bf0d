"""The options of an engine for both commands: python -m pagewise.engine and python -m pagewise.engine.serve."""

import argparse
import os
from dataclasses import fields
from typing import Any, NoReturn

from pagewise.engine.config import DTYPES, GENERATION_CONFIGS, MEMORIES, EngineConfig
from pagewise.flash_decoding_plus_plus import Dataflow


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with status 2."""
        self.exit(2, f"error: {message}\n")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add fields of `EngineConfig` to a parser, under their own names."""
    default = EngineConfig()
    for name, kind, what in (
        ("block_size", int, "tokens of a block"),
        ("max_num_seqs", int, "most sequences in a step"),
        ("max_num_batched_tokens", int, "most tokens in a step"),
        ("speculate", int, "draft N tokens, verify them in a step"),
        ("num_blocks", int, "blocks of the cache; by default as many as fit"),
        ("max_model_len", int, "most tokens of a prompt and its answer; by default the model's context"),
        ("k_scale", float, "a float8 cache stores k / N"),
        ("v_scale", float, "a float8 cache stores v / N"),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=getattr(default, name), metavar="N", help=what)
    parser.add_argument("--attention", choices=MEMORIES, default=default.attention, help="the cache")
    parser.add_argument(
        "--backend", choices=("auto", "torch", "triton", "cuda"), default=default.backend, help="the kernels"
    )
    parser.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_const",
        const=False,
        help="compute equal beginnings of prompts each time",
    )
    parser.add_argument("--kv-cache-dtype", choices=("float8_e4m3fn", "float8_e5m2"), help="by default the model's")
    parser.add_argument("--dataflow", metavar="FILE", help="a table of products that Dataflow.save wrote")
    parser.add_argument(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        default=default.generation_config,
        help="auto: the sampling parameters that the checkpoint recommends, where a request gives none",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=os.environ.get("WORLD_SIZE", "1"),  # a text is read as the option would be
        metavar="N",
        help="processes that share the model; by default those of torchrun, or 1",
    )
    parser.add_argument(
        "--context-parallel",
        type=int,
        default=default.context_parallel,
        metavar="N",
        help="processes that share the tokens of each sequence",
    )
    parser.add_argument(
        "--group-timeout",
        type=float,
        default=default.group_timeout,
        metavar="S",
        help="seconds that a process waits for the others",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the best device")
    parser.add_argument("--dtype", choices=DTYPES, help="of a checkpoint; default: float32 on a CPU, else bfloat16")


def given_fields(kind: type, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of dataclass `kind` that a command line gives, by their names."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in vars(asked).items() if name in names}


def engine_config(asked: argparse.Namespace) -> EngineConfig:
    """Return the options that a command line asks for.

    Raises:
        OSError, ValueError, TypeError: an option does not fit, or the file of the dataflow does not.
    """
    options = given_fields(EngineConfig, asked)
    if asked.dataflow is not None:
        options["dataflow"] = Dataflow.load(asked.dataflow)
    return EngineConfig(**options)
