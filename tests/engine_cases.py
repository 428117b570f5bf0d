"""The work of the processes of test_followers.py. They import this module, so it imports no test."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from pagewise.engine import LLM, leader


def for_backend(model, backend):
    """The model, or for Triton a copy on the GPU if there is one: its kernels are compiled for that."""
    return copy.deepcopy(model).cuda() if backend == "triton" and torch.cuda.is_available() else model


def finished(llm):
    """All outputs, when no request is left."""
    outputs = []
    while llm.has_unfinished:
        outputs += llm.step()
    return outputs


def tokens_of(llm, prompts, sampling):
    """The tokens of each choice of each prompt."""
    return [[choice.token_ids for choice in output.choices] for output in llm.generate(prompts, sampling)]


def serve(jobs, prompts, sampling):
    """Serve one engine after the other in a group of processes. `jobs`: (model, options) of each engine.

    Returns what this process has of each engine: tokens, counts, and the bytes of its weights and cache.
    """
    results, runners = [], []
    ModelRunner = leader.ModelRunner
    leader.ModelRunner = lambda *args: runners.append(ModelRunner(*args)) or runners[-1]
    for model, options in jobs:
        try:
            with LLM(model, **options) as llm:
                outputs = llm.generate(prompts, sampling)
                results.append(
                    {
                        "tokens": [[choice.token_ids for choice in output.choices] for output in outputs],
                        "cached": max(output.num_cached_tokens for output in outputs),
                        "preemptions": llm.scheduler.num_preemptions,
                        "accepted": llm.scheduler.num_accepted,
                        **held(llm.runner),
                    }
                )
        except SystemExit:  # a follower ends when process 0 closes its engine
            results.append(held(runners[-1]))
    leader.ModelRunner = ModelRunner
    return results


def serve_differently(model, options, prompts, sampling):
    """Serve one engine with other options in each process."""
    return serve([(model, options[dist.get_rank()])], prompts, sampling)


def held(runner):
    """The bytes that a process holds."""
    weights = runner.model.parameters() if isinstance(runner.model, nn.Module) else []
    return {"cache": runner.memory.nbytes, "weights": sum(weight.nbytes for weight in weights)}
