"""The options of an engine for both commands: python -m pagewise.engine and python -m pagewise.engine.serve."""

import argparse
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, NoReturn

from pagewise.engine.config import DTYPES, MEMORIES, EngineConfig
from pagewise.flash_decoding_plus_plus import Dataflow

Option = tuple[str, type | Collection[str], str]  # a field, its type or its values, and what it means
OPTIONS: tuple[Option, ...] = (
    ("block_size", int, "tokens of a block"),
    ("max_num_seqs", int, "most sequences in a step"),
    ("max_num_batched_tokens", int, "most tokens in a step"),
    ("speculate", int, "draft N tokens, verify them in a step"),
    ("num_blocks", int, "blocks of the cache; by default as many as fit"),
    ("max_model_len", int, "most tokens of a prompt and its answer; by default the model's context"),
    ("attention", MEMORIES, "the cache"),
    ("backend", ("auto", "torch", "triton", "cuda"), "the kernels"),
    ("kv_cache_dtype", ("float8_e4m3fn", "float8_e5m2"), "by default the model's"),
    ("k_scale", float, "a float8 cache stores k / N"),
    ("v_scale", float, "a float8 cache stores v / N"),
    ("generation_config", ("auto", "none"), "auto: what the checkpoint recommends, where a request gives nothing"),
    ("tensor_parallel", int, "processes that share the model; by default those of torchrun, or 1"),
    ("context_parallel", int, "processes that share the tokens of each sequence"),
    ("group_timeout", float, "seconds that a process waits for the others"),
    ("device", ("cpu", "cuda"), "by default the best device"),
    ("dtype", DTYPES, "of a checkpoint; default: float32 on a CPU, else bfloat16"),
)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with status 2."""
        self.exit(2, f"error: {message}\n")


def add_fields(parser: argparse.ArgumentParser, options: Iterable[Option], defaults: Mapping[str, Any]) -> None:
    """Add fields of a dataclass to a parser, under their own names. A field without a default is set only if given."""
    for name, kind, what in options:
        values = {"type": kind, "metavar": "N"} if isinstance(kind, type) else {"choices": kind}
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=defaults.get(name, argparse.SUPPRESS), help=what, **values)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add fields of `EngineConfig` to a parser."""
    # a text is read as the option would be
    add_fields(parser, OPTIONS, vars(EngineConfig()) | {"tensor_parallel": os.environ.get("WORLD_SIZE", "1")})
    parser.add_argument("--dataflow", metavar="FILE", help="a table of products that Dataflow.save wrote")
    what = "compute equal beginnings of prompts each time"
    parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_const", const=False, help=what)


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
