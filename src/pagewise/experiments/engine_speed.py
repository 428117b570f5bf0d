"""The speed of the engine next to other engines: the table that lesson 9 explains, on this machine.

    python -m pagewise.experiments.engine_speed --record lessons/measurements/engine.json

The model has GPT-2 small's architecture and random weights. It gets 64 requests of 856 tokens with 16 new tokens each.
On a CPU, the default is a smaller model and fewer tokens. All engines get the same checkpoint and prompts, in turns.
"""

import argparse
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
from pagewise.experiments.engine_results import overview, records
from pagewise.experiments.engine_workload import Prompts, Run, Workload, compare, serve
from pagewise.models.load import load_model
from pagewise.tools import benchmark
from pagewise.tools.device import best_device

# As transformers' GPT2Config names them. With its own, smaller, weights GPT-2 repeats its last token, whatever came
# before: engines with different attention would agree.
GPT2_SMALL = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "initializer_range": 0.1}
SMALLER = {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
SMALLER |= {"n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
OURS, NAIVE, STATIC, GENERATE = "online, paged", "naive, dense", "offline, dense", "transformers, generate"


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
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(Path(folder), sizes)
        model, _ = load_model(folder, dtype=dtype, device=device)
        others = {}
        for name, build in peers(device).items():
            try:
                others[name] = build(Path(folder), device, dtype)
            except Exception as error:
                print(f"{name} is not compared with: {benchmark.described(error)}")
        for workload in workloads:
            room = {"num_blocks": workload.num_blocks(16), "max_num_seqs": workload.num_requests}
            ours = {name: partial(serve, LLM(model, **room, **of_it)) for name, of_it in variants().items()}
            servers = {name: server for name, server in (ours | others).items() if any(part in name for part in only)}
            yield model, workload, compare(servers, workload, vocab_size=sizes["vocab_size"], **options)


def main() -> None:
    """The command line."""
    device = best_device()
    on_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description="Serve the same requests with every engine of this machine.")
    parser.add_argument("--record", type=Path, help="keep what was measured in this file as it comes (GPU only)")
    parser.add_argument("--prompts", nargs="+", choices=get_args(Prompts), default=get_args(Prompts), help="which")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="engines whose name has one of these")
    parser.add_argument("--gpt2-small", action="store_true", default=on_gpu, help="on a CPU, too")
    parser.add_argument("--requests", type=int, default=64 if on_gpu else 8, help="(%(default)d)")
    parser.add_argument("--prompt-tokens", type=int, default=856 if on_gpu else 64, help="(%(default)d)")
    parser.add_argument("--new-tokens", type=int, default=16 if on_gpu else 8, help="(%(default)d)")
    parser.add_argument("--repeats", type=int, default=3, help="runs to measure (%(default)d)")
    asked = parser.parse_args()
    if asked.record and not on_gpu:
        parser.error("--record needs a GPU")
    name, sizes = ("GPT-2 small", GPT2_SMALL) if asked.gpt2_small else ("a smaller GPT-2", SMALLER)
    workloads = [Workload(kind, asked.requests, asked.prompt_tokens, asked.new_tokens) for kind in asked.prompts]
    dtype = torch.float16 if on_gpu else torch.float32
    options = {"only": asked.only, "repeat_runs": asked.repeats}
    for model, workload, compared in measure(sizes, workloads, device, dtype, **options):
        print(overview(f"{name}, {workload.prompts} prompts", compared), end="\n\n", flush=True)
        for record in records(name, model, workload, compared) if asked.record else ():
            benchmark.keep(asked.record, record)


if __name__ == "__main__":
    main()
