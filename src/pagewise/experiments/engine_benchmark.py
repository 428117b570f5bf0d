"""Measure the engine on the same requests: schedulers, dense and paged caches, prefix cache on and off (lesson 9).

    python -m pagewise.experiments.engine_benchmark
    python -m pagewise.experiments.engine_benchmark --model gpt2-small --mode online --paged-attn --top-k 40 --top-p 0.9
    python -m pagewise.experiments.engine_benchmark --checkpoint-path FOLDER --source --peers --mode online

The first command measures every combination, on a model that suits this machine. `--source` measures the pair of the
source's table: block tensors and paged attention. `--peers` adds transformers and vLLM where they are installed.

The source of lesson 9 names three modes. Mode naive serves one request after the other. Mode offline has all requests
in one batch until the last one is done (the static scheduler). Mode online uses the continuous scheduler. The engines
of one command take turns. Read the ratios: seconds depend on the machine.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from pagewise.engine.llm import LLM
from pagewise.experiments.engine_peers import Server, peers
from pagewise.experiments.engine_results import overview, records, summary
from pagewise.experiments.engine_workload import Prompts, Workload, compare, serve
from pagewise.models.gpt2 import GPT2, GPT2Config
from pagewise.models.load import TINY, load_model, load_tokenizer
from pagewise.tools.device import best_device
from pagewise.tools.progress import progress, progress_bar, say
from pagewise.tools.records import keep

SCHEDULERS = {"naive": "naive", "offline": "static", "online": "continuous"}
GPT2_SMALL = {"vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def named_model(name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the tiny model ("tiny"), GPT-2's architecture with random weights ("gpt2-small"), or a checkpoint."""
    if name == "gpt2-small":
        torch.manual_seed(0)
        with progress_bar(1, "random weights") as bar:
            model = GPT2(GPT2Config(**GPT2_SMALL)).to(device, dtype).requires_grad_(False).eval()
            bar.update()
        return model
    model, _ = load_model(TINY if name == "tiny" else name, dtype=dtype, device=device)
    return model


def variants(
    modes: Sequence[str] = tuple(SCHEDULERS),
    attentions: Sequence[str] = ("dense", "paged"),
    prefix_caches: Sequence[bool] = (True, False),
) -> dict[str, dict[str, object]]:
    """Return {name: arguments of LLM} for every combination. Dense caches have no prefix cache."""
    found = {}
    for attention, mode in itertools.product(attentions, modes):
        for prefix_cache in prefix_caches if attention != "dense" else [False]:
            without = ", no prefix cache" if attention != "dense" and not prefix_cache else ""
            found[f"{mode}, {attention.replace('_', ' ')}{without}"] = {
                "scheduler": SCHEDULERS[mode],
                "attention": attention,
                "prefix_cache": prefix_cache,
            }
    return found


# ------------------------------------------------------------------------------------------------ command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. If it cannot be done, print one line that says why, and return exit status 2."""
    asked = _parser().parse_args(arguments)
    try:
        _measure(asked)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(asked: argparse.Namespace) -> None:
    device = torch.device(asked.device) if asked.device else best_device()
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no GPU here: leave it out, or say cpu")
    model_name, dtype = asked.model or ("gpt2-small" if on_gpu else "tiny"), asked.dtype
    dtype = DTYPES[dtype or ("float16" if on_gpu else "float32")]
    every, others = asked.mode == "all", _peers(asked, model_name, device, dtype)
    model = named_model(model_name, dtype, device)
    memories = ("dense", "paged") if every else ("dense",)
    chosen = variants(
        tuple(SCHEDULERS) if every else (asked.mode,),
        ("block_tensors", "paged") if asked.source else ("paged",) if asked.paged_attn else memories,
        (False,) if asked.no_prefix_cache else (True, False) if every and not asked.source else (True,),
    )
    sampling, prompt = _sampling(asked), _prompt(asked, model_name)
    prompt_tokens = len(prompt) or asked.prompt_tokens or (856 if on_gpu else 256)
    kinds = ("identical",) if prompt else asked.prompts
    for prompts in kinds or (("identical", "distinct") if every else ("identical",)):
        workload = Workload(prompts, asked.num_requests, prompt_tokens, asked.max_new_tokens, prompt)
        sizes = {
            "block_size": asked.block_size,
            "num_blocks": asked.num_blocks or workload.num_blocks(asked.block_size),
            "max_num_seqs": asked.max_num_seqs,
            "backend": asked.backend,
        }
        engines = {name: LLM(model, **sizes, **options) for name, options in chosen.items()}
        counts = {"warmup_runs": asked.warmup_runs, "repeat_runs": asked.repeat_runs}
        servers = {name: partial(serve, llm) for name, llm in engines.items()} | others
        compared = compare(servers, workload, vocab_size=model.config.vocab_size, **counts, **sampling)
        for name, runs in compared.items():
            print(summary(f"{name}, {prompts} prompts", runs, asked.warmup_runs), end="\n\n")
        print(overview(f"{model_name}, {prompts} prompts", compared), end="\n\n", flush=True)
        if asked.record:
            for record in records(model_name, model, workload, compared):
                keep(asked.record, record)
        if asked.profile:
            for name, llm in progress(engines.items(), "traces"):
                path = asked.profile / f"{name}, {prompts}.json".replace(", ", "_").replace(" ", "-")
                requests = workload.draw(model.config.vocab_size, sum(counts.values()), **sampling)
                path.parent.mkdir(parents=True, exist_ok=True)
                with torch.profiler.profile() as trace:
                    serve(llm, *requests)
                trace.export_chrome_trace(str(path))
                say(f"[profile] wrote: {path}")


def _sampling(asked: argparse.Namespace) -> dict[str, object]:
    """Return the sampling parameters that differ from those of a workload."""
    found = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p") if getattr(asked, name)}
    if found or asked.do_sample:
        found.setdefault("temperature", 1.0)
    return found | ({"ignore_eos": False} if asked.prompt is not None and not asked.no_stop_on_eos else {})


def _prompt(asked: argparse.Namespace, model_name: str) -> tuple[int, ...]:
    """Return the tokens of the prompt that all requests have, or () if their prompts are random."""
    if asked.prompt is None:
        return ()
    name = asked.tokenizer_name or model_name
    tokenizer = load_tokenizer(TINY if name == "tiny" else name)
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer for the prompt: give --tokenizer-name")
    return tuple(tokenizer.encode(asked.prompt))


def _peers(asked: argparse.Namespace, model_name: str, device: torch.device, dtype: torch.dtype) -> dict[str, Server]:
    """Return the servers of other libraries that are asked for. They read the same checkpoint."""
    if not asked.peers:
        return {}
    folder = TINY if model_name == "tiny" else Path(model_name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--peers needs the folder of a checkpoint, got --model {model_name}")
    if asked.do_sample or asked.temperature or asked.top_k or asked.top_p:
        raise ValueError("--peers compares greedy answers: leave --do-sample, --temperature, --top-k and --top-p out")
    if asked.prompt is not None and not asked.no_stop_on_eos:
        raise ValueError("--peers compares answers of one length: give --no-stop-on-eos with --prompt")
    return {name: build(folder, device, dtype) for name, build in peers(device).items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagewise.experiments.engine_benchmark",
        description="Serve the same requests with every scheduler, dense and paged, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        "--checkpoint-path",
        help="tiny, gpt2-small (random weights), a folder or a hub id; by the machine",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt of all requests, instead of random ones")
    parser.add_argument(
        "--tokenizer-name", metavar="NAME", help="whose tokenizer reads --prompt; by default the model's"
    )
    parser.add_argument("--no-stop-on-eos", action="store_true", help="go on after end tokens, as after random prompts")
    parser.add_argument("--source", action="store_true", help="block tensors against paged attention")
    parser.add_argument("--peers", action="store_true", help="add transformers and vLLM, where they are installed")
    parser.add_argument("--mode", choices=[*SCHEDULERS, "all"], default="all", help="the scheduler")
    parser.add_argument("--paged-attn", action="store_true", help="paged attention only, instead of dense caches")
    parser.add_argument("--no-prefix-cache", action="store_true", help="paged caches without a prefix cache only")
    parser.add_argument("--prompts", nargs="+", choices=get_args(Prompts), help="kinds of prompts; by the mode")
    for name, default, what in (
        ("num-requests", 64, "requests, all at once"),
        ("prompt-tokens", None, "tokens of a prompt; by the machine"),
        ("max-new-tokens", 16, "tokens to generate for each"),
        ("warmup-runs", 1, "runs that are not measured"),
        ("repeat-runs", 3, "measured runs"),
        ("max-num-seqs", 64, "most sequences in a batch"),
        ("block-size", 16, "tokens of a block"),
        ("num-blocks", None, "blocks, or their tokens for dense caches; enough for all requests"),
    ):
        count = partial(_count, minimum=0 if name == "warmup-runs" else 1)
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=what)
    parser.add_argument(
        "--do-sample", action="store_true", help="draw tokens at temperature 1 instead of the likeliest"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="1 with --top-k or --top-p, else greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this weight")
    parser.add_argument("--backend", choices=("auto", "torch", "triton", "cuda"), default="auto", help="the kernels")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the best device")
    parser.add_argument("--dtype", choices=DTYPES, help="float16 on a GPU, else float32")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what was measured in this JSON file")
    parser.add_argument(
        "--profile", type=Path, nargs="?", const=Path("profiles"), metavar="FOLDER", help="write a trace of each engine"
    )
    return parser


def _count(text: str, minimum: int) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
