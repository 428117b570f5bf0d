"""The speed of the engine: the throughput table of lesson 9's source, and the engine next to other engines (lesson 9).

    python -m pagewise.experiments.engine_speed source --full     the source's table, with its model and its requests
    python -m pagewise.experiments.engine_speed rivals --record lessons/measurements/engine.json

The source measures GPT-2 small with 64 identical prompts of 856 tokens and 16 new tokens each. Its first engine keeps
each block as a tensor of its own. Its second engine has paged attention. The table `source` compares both memories,
and says how much of a step each part takes. Here all engines have a prefix cache. The source's naive engine works
without a prefix cache.

The table `rivals` compares every scheduler and memory with other libraries. All engines get the same checkpoint and
prompts, in turns. On a CPU, a smaller model and fewer tokens are the default.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from pagewise.engine.llm import LLM
from pagewise.experiments.engine_benchmark import variants
from pagewise.experiments.engine_peers import peers, random_checkpoint
from pagewise.experiments.engine_results import overview, records, source_table
from pagewise.experiments.engine_workload import Prompts, Run, Workload, compare, serve
from pagewise.models.load import load_model
from pagewise.tools import benchmark
from pagewise.tools.device import best_device
from pagewise.tools.progress import progress, progress_bar, say
from pagewise.tools.sizes import cdiv

# As transformers' GPT2Config names them. With its own, smaller, weights GPT-2 repeats its last token, whatever came
# before: engines with different attention would agree.
GPT2_SMALL = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "initializer_range": 0.1}
SMALLER = {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
SMALLER |= {"n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
OURS, NAIVE, STATIC, GENERATE = "online, paged", "naive, dense", "offline, dense", "transformers, generate"
SOURCE = variants(attentions=("block_tensors", "paged"), prefix_caches=(True,))  # the engines of the source's table


@contextlib.contextmanager
def random_model(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Path, nn.Module]]:
    """Write a random checkpoint of GPT-2's architecture; yield its folder and the model that it holds."""
    with tempfile.TemporaryDirectory() as folder:
        with progress_bar(2, "a random checkpoint") as bar:
            random_checkpoint(Path(folder), sizes)
            bar.update()
            model, _ = load_model(folder, dtype=dtype, device=device)
            bar.update()
        yield Path(folder), model


def measure_source(model: nn.Module, workload: Workload, **options: int) -> dict[str, list[Run]]:
    """Return the runs of each engine of the source's table. options: of `compare`.

    The requests share most of their blocks, so each engine gets a quarter of the blocks that they would need alone.
    """
    longest = cdiv(workload.prompt_tokens + workload.max_new_tokens, 16)
    num_blocks = max(longest + 2 * workload.num_requests, workload.num_blocks(16) // 4)
    room = {"num_blocks": num_blocks, "max_num_seqs": workload.num_requests}
    options_of = progress(list(SOURCE.items()), "engines")
    engines = {name: partial(serve, LLM(model, **room, **of_it)) for name, of_it in options_of}
    return compare(engines, workload, vocab_size=model.config.vocab_size, **options)


def measure(
    sizes: dict[str, int],
    workloads: Sequence[Workload],
    device: torch.device,
    dtype: torch.dtype,
    *,
    only: Sequence[str] = ("",),
    **options: int,
) -> Iterator[tuple[nn.Module, Workload, dict[str, list[Run]]]]:
    """Yield (model, workload, the runs of each engine).

    Args:
        sizes: of the model.
        only: measure engines whose name contains one of these texts.
        options: of `compare`.
    """
    with random_model(sizes, device, dtype) as (folder, model):
        others = {}
        for name, build in progress(list(peers(device).items()), "other libraries"):
            try:
                others[name] = build(folder, device, dtype)
            except Exception as error:
                say(f"{name} is not compared with: {benchmark.described(error)}")
        for workload in workloads:
            room = {"num_blocks": workload.num_blocks(16), "max_num_seqs": workload.num_requests}
            options_of = progress(list(variants().items()), "our engines")
            ours = {name: partial(serve, LLM(model, **room, **of_it)) for name, of_it in options_of}
            servers = {name: server for name, server in (ours | others).items() if any(part in name for part in only)}
            yield model, workload, compare(servers, workload, vocab_size=sizes["vocab_size"], **options)


def main() -> None:
    """The command line."""
    device = best_device()
    on_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description="Serve the same requests with several engines, and compare.")
    parser.add_argument(
        "tables", nargs="*", default=["source", "rivals"], metavar="TABLE", help="source, rivals (both)"
    )
    parser.add_argument("--record", type=Path, help="keep what was measured in this file as it comes (GPU only)")
    parser.add_argument("--prompts", nargs="+", choices=get_args(Prompts), default=get_args(Prompts), help="of rivals")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rivals whose name has one of these")
    parser.add_argument(
        "--full", action="store_true", default=on_gpu, help="the source's model and sizes on a CPU, too"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="64, or 8 unless --full")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="856, or 64 unless --full")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="16, or 8 unless --full")
    parser.add_argument("--repeats", type=int, default=3, help="runs to measure (%(default)d)")
    asked = parser.parse_args()
    if unknown := set(asked.tables) - {"source", "rivals"}:
        parser.error(f"TABLE must be source or rivals, got {min(unknown)}")
    if asked.record and not on_gpu:
        parser.error("--record needs a GPU")
    name, sizes = ("GPT-2 small", GPT2_SMALL) if asked.full else ("a smaller GPT-2", SMALLER)
    usual = (64, 856, 16) if asked.full else (8, 64, 8)
    given = (asked.requests, asked.prompt_tokens, asked.new_tokens)
    counts = [number or default for number, default in zip(given, usual, strict=True)]
    dtype = torch.float16 if on_gpu else torch.float32
    if "source" in asked.tables:
        with random_model(sizes, device, dtype) as (_, model):
            compared = measure_source(model, Workload("identical", *counts), repeat_runs=asked.repeats)
        print(source_table(name, compared), end="\n\n", flush=True)
    if "rivals" in asked.tables:
        workloads = [Workload(kind, *counts) for kind in asked.prompts]
        options = {"only": asked.only, "repeat_runs": asked.repeats}
        for model, workload, compared in measure(sizes, workloads, device, dtype, **options):
            print(overview(f"{name}, {workload.prompts} prompts", compared), end="\n\n", flush=True)
            for record in records(name, model, workload, compared) if asked.record else ():
                benchmark.keep(asked.record, record)


if __name__ == "__main__":
    main()
