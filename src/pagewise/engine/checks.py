"""Check the arguments of an engine and of its requests, once: sizes, backends, prompts (lesson 9)."""

import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pagewise.engine.memory import kv_sizes
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.scheduler import POLICIES, Scheduler
from pagewise.engine.sequence import Request
from pagewise.models import load_model
from pagewise.paged_attention import in_cuda
from pagewise.paged_blocks.prefix_cache import as_token
from pagewise.paged_blocks.write import check_scales
from pagewise.tools.checks import FLOAT8, FLOATS, check_flag
from pagewise.tools.device import best_device, choose_backend
from pagewise.tools.sizes import cdiv

ATTENTIONS = ("paged", "dense", "block_tensors")


def loaded(
    model: str | Path | nn.Module,
    tokenizer: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    *,
    whole: bool = True,
) -> tuple[nn.Module, Any]:
    """Return the model and its tokenizer: loaded from a folder or the hub, or unchanged if `model` is a module.

    By default a checkpoint goes to the machine's best device, as float32 on a CPU and as bfloat16 on a GPU. If the
    device will not hold the `whole` model, the checkpoint stays on the CPU.
    """
    if isinstance(model, nn.Module):
        weight = next(model.parameters())
        for name, wanted, actual in (("dtype", dtype, weight.dtype), ("device", device, weight.device)):
            if wanted is not None and not _same(wanted, actual):
                raise ValueError(
                    f"{name} is {wanted}, but the model's weights are {actual}: move it with model.to(...)"
                )
        return model, tokenizer
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a folder, a hub id or a model, got {type(model).__name__}")
    device = best_device() if device is None else torch.device(device)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, found = load_model(model, dtype=dtype, device=device if whole else "cpu")
    return model, tokenizer or found


def _same(wanted: object, actual: torch.dtype | torch.device) -> bool:
    if not isinstance(actual, torch.device):
        return wanted == actual
    wanted = torch.device(wanted)
    return wanted.type == actual.type and wanted.index in (None, actual.index)


def float8_dtype(kv_cache_dtype: object, k_scale: float, v_scale: float, attention: str) -> torch.dtype | None:
    """Return the float8 dtype of the cache, or None if the cache has the model's dtype.

    Raises:
        ValueError, TypeError: the dtype or a scale is impossible, or they do not fit each other or the attention.
    """
    check_scales(k_scale, v_scale)
    if kv_cache_dtype is None:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale != 1.0:
                raise ValueError(
                    f"{name} must be 1.0 where the cache has the model's dtype, got {scale}: give "
                    f'kv_cache_dtype="float8_e4m3fn", or leave {name} out'
                )
        return None
    dtype = next((one for one in FLOAT8 if kv_cache_dtype in (one, _short(one))), None)
    if dtype is None:
        raise ValueError(
            f'kv_cache_dtype must be "float8_e4m3fn", "float8_e5m2" or None, the model\'s dtype, got {kv_cache_dtype!r}'
        )
    if attention != "paged":
        raise ValueError(
            f'kv_cache_dtype = {_short(dtype)} needs attention="paged", got attention="{attention}": only the paged '
            f"cache stores float8"
        )
    return dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checked_backend(
    backend: str, attention: str, config: Any, block_size: int, weight: Tensor, float8: torch.dtype | None = None
) -> str:
    """Return the backend that serves this model: "torch", "triton" or "cuda".

    `float8` is the dtype of a cache that does not have the model's dtype.

    Raises:
        ValueError: the backend does not exist, or its kernels do not support these sizes.
    """
    if float8 is not None and weight.dtype not in FLOATS:
        raise ValueError(
            f"kv_cache_dtype = {_short(float8)} takes models in float32, float16 or bfloat16, got "
            f"{_short(weight.dtype)}: leave kv_cache_dtype out"
        )
    if backend != "cuda":
        refusal = None
        if weight.dtype not in FLOATS:
            refusal = f"takes models in float32, float16 or bfloat16, got {weight.dtype}"
        elif config.head_dim > 256:
            refusal = f"takes head sizes up to 256, got {config.head_dim}"
        elif attention == "paged" and (block_size > 256 or block_size & (block_size - 1)):
            refusal = f"needs a block_size that is a power of two up to 256, got {block_size}"
        return choose_backend(backend, weight.device, refusal, others=("cuda",))
    if weight.dtype not in FLOATS:
        raise ValueError(f'backend="cuda" takes models in float32, float16 or bfloat16, got {weight.dtype}')
    if attention == "paged":
        for name, size, sizes in (
            ("head_dim", config.head_dim, in_cuda.HEAD_SIZES),
            ("block_size", block_size, in_cuda.BLOCK_SIZES),
        ):
            if size not in sizes:
                takes = ", ".join(map(str, sizes))
                raise ValueError(f'backend="cuda" takes {name} {takes}, got {size}; backend="torch" takes it')
        if float8 is not None and config.head_dim % 16:
            raise ValueError(
                f'backend="cuda" takes a float8 cache if head_dim is a multiple of 16, got {config.head_dim}; '
                f'backend="torch" takes it'
            )
    return backend


def check_choices(attention: str, scheduler: str, prefix_cache: bool | None) -> bool:
    """Whether the prefix cache is on, for one of the three memories and three schedulers."""
    for name, value, known in (("attention", attention, ATTENTIONS), ("scheduler", scheduler, POLICIES)):
        if value not in known:
            *most, last = (f'"{one}"' for one in known)
            raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}")
    if prefix_cache is None:
        return attention != "dense"
    check_flag("prefix_cache", prefix_cache)
    if prefix_cache and attention == "dense":
        raise ValueError('prefix_cache=True needs attention="paged": dense memory shares nothing')
    return prefix_cache


def check_parallel(tensor_parallel: int, attention: str, device: torch.device | str | None) -> None:
    """Check that an engine of these options can have `tensor_parallel` processes."""
    if tensor_parallel == 1:
        return
    if attention != "paged":
        raise ValueError(
            f'tensor_parallel = {tensor_parallel} needs attention="paged", got "{attention}", which needs the requests '
            f"in every process"
        )
    if device is not None and torch.device(device).index is not None:
        raise ValueError(
            f'device must be "cpu" or "cuda" with tensor_parallel = {tensor_parallel}, got "{device}": each process '
            f"chooses a GPU of its own"
        )


def default_num_blocks(
    model: nn.Module, block_size: int, max_num_seqs: int, dtype: torch.dtype, num_processes: int = 1
) -> int:
    """Return the number of blocks in `dtype` for max_num_seqs sequences of the longest context.

    On a CPU, the blocks of all processes take at most a quarter of the free memory. On a GPU, which one process has for
    itself, they take at most nine tenths of it, minus 1 GiB for the activations of a step.
    """
    weight = next(model.parameters())
    block = 2 * block_size * prod(kv_sizes(model)) * dtype.itemsize
    if weight.is_cuda:
        free = torch.cuda.mem_get_info(weight.device)[0] * 9 // 10 - 2**30
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // num_processes
    wanted = max_num_seqs * cdiv(model.config.max_position_embeddings, block_size)
    if (num_blocks := min(wanted, free // block)) < 1:
        raise ValueError(f"there is no memory for a block of {block} bytes: give num_blocks, or free some")
    return num_blocks


def end_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of the checkpoint, or else the end token of the tokenizer, if any."""
    own = getattr(model, "eos_token_ids", ())
    other = getattr(tokenizer, "eos_token_id", None)
    return frozenset(own or (() if other is None else (other,)))


def token_ids(prompt: object, tokenizer: Any) -> list[int]:
    """Return a prompt as a list of tokens. `checked_tokens` checks them.

    Raises:
        ValueError, TypeError: the prompt is text and the model has no tokenizer, or it is empty or not iterable.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is text, but the model came without a tokenizer: give token ids")
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable):
        raise TypeError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}")
    tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not tokens:
        raise ValueError("the prompt must hold at least 1 token, got none")
    return tokens


def checked_tokens(tokens: list[object], vocab_size: int) -> list[int]:
    """Return the tokens as ints. If one of them is not an id of the model, raise ValueError or TypeError."""
    tokens = [as_token(token) for token in tokens]
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"token ids must be in [0, vocab_size = {vocab_size}), got {wrong[0]} in the prompt")
    return tokens


def paired(prompts: Any, sampling: Any) -> list[tuple[Any, Any]]:
    """Return each prompt with its SamplingParams, of which there is one for all or one for each."""
    if isinstance(prompts, str) or not all(isinstance(prompt, str | list | tuple | Tensor) for prompt in prompts):
        raise TypeError("prompts must be a list of texts or of lists of token ids: put a single one into a list")
    params = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"sampling must be one for all or one for each of {len(prompts)} prompts, got {len(params)}")
    return list(zip(prompts, params, strict=True))


def checked_request(prompt: object, sampling: object, tokenizer: Any, config: Any, scheduler: Scheduler) -> Request:
    """Return a request that can be served. Sizes are compared before any work that grows with them.

    Raises:
        ValueError, TypeError: `token_ids` or `checked_tokens` raises; there are stop strings but no text; or the
            request alone exceeds the context, a step or the memory.
    """
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
    tokens = token_ids(prompt, tokenizer)
    if sampling.stop_strings and (tokenizer is None or sampling.beam_width > 1):
        why = "the model came without a tokenizer" if tokenizer is None else "a beam search knows tokens only"
        raise ValueError(f"stop has strings, but {why}: give token ids")
    if sampling.width > min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens):
        raise ValueError(
            f"n or beam_width = {sampling.width} exceeds max_num_seqs = {scheduler.max_num_seqs} or "
            f"max_num_batched_tokens = {scheduler.max_num_batched_tokens}"
        )
    if len(tokens) + sampling.max_tokens > config.max_position_embeddings:
        raise ValueError(
            f"{sampling.described(len(tokens))} exceed the model's context of {config.max_position_embeddings} tokens: "
            f"shorten one of them"
        )
    request = Request(checked_tokens(tokens, config.vocab_size), sampling, tokenizer)
    scheduler.memory.check_fits(request)
    return request
