"""`EngineConfig`: all options of an engine as one value, which `LLM`, the commands and the followers share (lesson 9).

`EngineConfig(…)` checks what can be checked without a model. `completed(model)` checks the rest, and fills in what
depends on the model and on the machine.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
from torch import Tensor, nn

from pagewise.engine.memory import Memory
from pagewise.engine.request import Request
from pagewise.engine.sampling import Row, sample
from pagewise.engine.sampling_params import SamplingParams
from pagewise.flash_decoding_plus_plus import Dataflow, UnifiedMax
from pagewise.models import Attend
from pagewise.paged_attention import in_cuda
from pagewise.paged_blocks.write import check_scales
from pagewise.tools.checks import FLOAT8, FLOATS, check_counts, check_flag, check_number
from pagewise.tools.device import best_device, choose_backend
from pagewise.tools.sizes import cdiv

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*FLOATS, torch.float64)}
MEMORIES = {  # by the name of the attention; only what is asked for is imported
    "paged": ("pagewise.engine.paged_memory", "PagedMemory"),
    "dense": ("pagewise.experiments.dense_memory", "DenseMemory"),
    "block_tensors": ("pagewise.experiments.block_tensors", "BlockTensorMemory"),
}


class KVSizes(NamedTuple):
    """The sizes of keys and values, with the names of a model's config. The KV heads are those of this process."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int | None = None  # a query sees so many keys, its own included


def kv_sizes(model: nn.Module) -> KVSizes:
    """Return the sizes of the keys and values that `model` computes in this process."""
    config = model.config
    num_kv_heads = getattr(model, "num_kv_heads", config.num_key_value_heads)  # models of other people may lack it
    window = getattr(config, "sliding_window", None)
    return KVSizes(config.num_hidden_layers, num_kv_heads, config.head_dim, window)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine.

    Args:
        num_blocks: of the KV cache, block_size tokens each. Default: enough for max_num_seqs sequences of the
            longest context, but at most a quarter of a CPU's free memory, or nine tenths of a GPU's without what the
            largest step takes, which is measured.
        max_num_seqs: at most so many sequences in a step. max_num_batched_tokens: so many tokens; longer prompts are
            computed in chunks. max_model_len: the most tokens of a prompt and its answer; default: the model's context.
        attention: "paged". Two slower memories show why: "dense" has contiguous caches of num_blocks · block_size
            tokens, and "block_tensors" gathers blocks that are tensors of their own. Both copy keys in every step.
        memory: another memory: memory(config, kv_sizes, device) returns a `Memory`.
        backend: what computes attention. "auto": triton on a GPU, torch on a CPU.
        prefix_cache: whole blocks of equal prompts are computed once. Default: unless dense.
        kv_cache_dtype: "float8_e4m3fn" or "float8_e5m2", or these dtypes of torch. Default: the model's dtype.
        k_scale, v_scale: a float8 cache stores k / k_scale and v / v_scale. A quotient beyond the largest number of the
            format (448 of e4m3, 57344 of e5m2) becomes that number.
        scheduler: see `pagewise.engine.scheduler`. speculate: most drafts for a sequence in a step; 0: none.
        dataflow: a table of lesson 8, which chooses the product of each linear layer for the number of its rows.
        unified_max: lesson 8's φ for decode steps with dense attention. `memory.num_recomputed` counts unsafe rows.
        generation_config: "auto": a request without SamplingParams has those of the checkpoint's generation_config.json
            in place of the defaults, and a log line names them. "none" leaves them out.
        tensor_parallel: the number of processes that share the heads and the vocabulary of the model. This process
            starts the others, and they end with `close`, a `with` block, or this process. Under torchrun they exist:
            there `LLM` returns in process 0 alone, and all other processes exit when process 0 closes.
        context_parallel: the number of processes that share the tokens of every sequence, `num_blocks` blocks in each.
            With both, tensor_parallel · context_parallel processes are started.
        group_timeout: seconds that a process waits for the others in a step. A process that stands still is then named.
        device, dtype: of a checkpoint. Default: the best device; float32 on a CPU, bfloat16 on a GPU.

    Raises:
        ValueError, TypeError: a field does not fit, or two contradict each other; the message names them.
    """

    num_blocks: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    attention: Literal["paged", "dense", "block_tensors"] = "paged"
    memory: Callable[..., Memory] | None = None
    backend: Literal["auto", "torch", "triton", "cuda"] = "auto"
    prefix_cache: bool | None = None
    kv_cache_dtype: torch.dtype | str | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    scheduler: Literal["naive", "static", "continuous"] = "continuous"
    speculate: int = 0
    dataflow: Dataflow | None = None
    unified_max: UnifiedMax | None = None
    generation_config: Literal["auto", "none"] = "auto"
    tensor_parallel: int = 1
    max_model_len: int | None = None
    context_parallel: int = 1
    group_timeout: float = 300.0
    device: torch.device | str | None = None
    dtype: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("num_blocks", "max_model_len") if getattr(self, name) is not None]
        counts = ("block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel", "context_parallel")
        check_counts(**{name: getattr(self, name) for name in (*given, *counts)})
        check_counts(minimum=0, speculate=self.speculate)
        check_number("group_timeout", self.group_timeout, low=0.0)
        check_scales(self.k_scale, self.v_scale)
        for field in fields(self):
            known, value = get_args(field.type), getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in known:
                raise ValueError(f"{field.name} must be {_one_of(known)}, got {value!r}")
        if self.prefix_cache is None:
            object.__setattr__(self, "prefix_cache", self.attention != "dense")
        check_flag("prefix_cache", self.prefix_cache)
        if self.kv_cache_dtype is not None:
            float8 = next((dtype for dtype in FLOAT8 if self.kv_cache_dtype in (dtype, _short(dtype))), None)
            if float8 is None:
                said = 'kv_cache_dtype must be "float8_e4m3fn", "float8_e5m2" or None, the model\'s dtype'
                raise ValueError(f"{said}, got {self.kv_cache_dtype!r}")
            object.__setattr__(self, "kv_cache_dtype", float8)
        for name in ("k_scale", "v_scale"):
            if self.kv_cache_dtype is None and (scale := getattr(self, name)) != 1.0:
                said = f"{name} must be 1.0 where the cache has the model's dtype, got {scale}"
                raise ValueError(f'{said}: give kv_cache_dtype="float8_e4m3fn", or leave {name} out')
        if isinstance(self.dtype, str):
            if self.dtype not in DTYPES:
                raise ValueError(f"dtype must be {', '.join(DTYPES)} or a dtype of torch, got {self.dtype!r}")
            object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if not isinstance(self.unified_max, UnifiedMax | None):
            raise TypeError(f"unified_max must be a UnifiedMax or None, got {type(self.unified_max).__name__}")
        blocks, paged, not_cuda = ("paged", "block_tensors"), ("paged",), ("auto", "torch", "triton")
        is_unified, is_parallel = self.unified_max is not None, self.num_processes > 1
        for option, is_set, name, values, why in (
            ("prefix_cache=True", self.prefix_cache, "attention", blocks, "dense memory shares nothing"),
            ("kv_cache_dtype", self.kv_cache_dtype, "attention", paged, "only the paged cache stores float8"),
            ("unified_max", is_unified, "attention", ("dense",), "its kernel reads dense keys"),
            ("unified_max", is_unified, "backend", not_cuda, "cuda has no kernel for it"),
            (self.parallel, is_parallel, "attention", paged, "others need the requests in every process"),
            ("context_parallel", self.context_parallel > 1, "backend", not_cuda, "cuda gives no lse"),
        ):
            if is_set and (value := getattr(self, name)) not in values:
                raise ValueError(f'{option} needs {name}={_one_of(values)}, got {name}="{value}": {why}')
        if is_parallel and self.device is not None and torch.device(self.device).index is not None:
            said = f'device must be "cpu" or "cuda" with {self.parallel}, got "{self.device}"'
            raise ValueError(f"{said}: each process chooses a GPU of its own")

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh of processes. The last axis varies fastest from rank to rank."""
        return {"context": self.context_parallel, "tensor": self.tensor_parallel}

    @property
    def num_processes(self) -> int:
        """The number of processes of the engine."""
        return prod(self.mesh.values())

    @property
    def parallel(self) -> str:
        """The options that make several processes, as an error names them."""
        sizes = {f"{name}_parallel": size for name, size in self.mesh.items() if size > 1 or self.num_processes == 1}
        return " · ".join(f"{name} = {size}" for name, size in reversed(sizes.items()))

    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Return where a checkpoint is loaded, and as what: by default bfloat16 on a GPU, and float32 on a CPU."""
        device = best_device() if self.device is None else torch.device(self.device)
        return device, self.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)

    def completed(self, model: nn.Module) -> "EngineConfig":
        """Return the config for the part of a model that this process has: num_blocks, backend and dtypes are known.

        Raises:
            ValueError: the backend does not exist, its kernels do not support these sizes, or there is no memory; or
                max_model_len exceeds the model's context.
        """
        weight, config, sizes = next(model.parameters()), model.config, kv_sizes(model)
        max_model_len = self.max_model_len or config.max_position_embeddings
        if max_model_len > config.max_position_embeddings:
            said = f"the model's context of {config.max_position_embeddings} tokens"
            raise ValueError(f"max_model_len = {max_model_len} exceeds {said}: give less, or leave max_model_len out")
        for name, fits in (("attention", self.attention == "paged"), ("backend", self.backend != "cuda")):
            if sizes.sliding_window is not None and not fits:
                said = f'{name} = "{getattr(self, name)}" does not support sliding_window = {sizes.sliding_window}'
                raise ValueError(f"{said} of the model: leave {name} out")
        if self.kv_cache_dtype is not None and weight.dtype not in FLOATS:
            said = f"takes models in float32, float16 or bfloat16, got {_short(weight.dtype)}"
            raise ValueError(f"kv_cache_dtype = {_short(self.kv_cache_dtype)} {said}: leave kv_cache_dtype out")
        block = 2 * self.block_size * prod(sizes[:3]) * (self.kv_cache_dtype or weight.dtype).itemsize  # bytes
        backend = self._backend_for(config, weight)
        num_blocks = self._num_blocks_for(max_model_len, block, model)
        return replace(self, backend=backend, max_model_len=max_model_len, num_blocks=num_blocks)

    def _backend_for(self, config: Any, weight: Tensor) -> str:
        """Return the backend that serves this model: "torch", "triton" or "cuda"."""
        D, P, paged, cuda = config.head_dim, self.block_size, self.attention == "paged", self.backend == "cuda"
        heads, blocks = (", ".join(map(str, sizes)) for sizes in (in_cuda.HEAD_SIZES, in_cuda.BLOCK_SIZES))
        is_odd, by_cuda = P > 256 or P & (P - 1), cuda and paged
        refusals = (
            (weight.dtype not in FLOATS, f"takes models in float32, float16 or bfloat16, got {weight.dtype}"),
            (by_cuda and D not in in_cuda.HEAD_SIZES, f"takes head_dim {heads}, got {D}"),
            (by_cuda and P not in in_cuda.BLOCK_SIZES, f"takes block_size {blocks}, got {P}"),
            (by_cuda and self.kv_cache_dtype and D % 16, f"takes float8 if head_dim is a multiple of 16, got {D}"),
            (not cuda and D > 256, f"takes head sizes up to 256, got {D}"),
            (not cuda and paged and is_odd, f"needs a block_size that is a power of two up to 256, got {P}"),
        )
        refusal = next((message for wrong, message in refusals if wrong), None)
        if not cuda:
            return choose_backend(self.backend, weight.device, refusal, others=("cuda",))
        if refusal is not None:
            raise ValueError(f'backend="cuda" {refusal}; backend="torch" takes it')
        return "cuda"

    def _num_blocks_for(self, max_model_len: int, block: int, model: nn.Module) -> int:
        """Return the number of blocks of `block` bytes in this process.

        On a CPU, the blocks of all processes take at most a quarter of the free memory. On a GPU, which one process has
        for itself, they take at most nine tenths of it, minus what the largest step takes.
        """
        device = next(model.parameters()).device
        if self.num_blocks is not None:
            on_gpu = device.type == "cuda"
            total = torch.cuda.mem_get_info(device)[1] if on_gpu else free_memory("SC_PHYS_PAGES")
            if self.attention != "dense" and self.num_blocks * block > total:
                said = f"num_blocks = {self.num_blocks} blocks of {block} bytes exceed the memory of {total} bytes"
                raise ValueError(f"{said}: give fewer, or leave num_blocks out")
            return self.num_blocks
        if device.type == "cuda":
            num_tokens = min(self.max_num_batched_tokens, self.max_num_seqs * max_model_len)
            needed = step_nbytes(model, num_tokens, min(self.max_num_seqs, num_tokens))
            free = torch.cuda.mem_get_info(device)[0] * 9 // 10 - needed
        else:
            free = free_memory() // 4 // self.num_processes
        wanted = self.max_num_seqs * cdiv(max_model_len, self.block_size * self.context_parallel)
        if (num_blocks := min(wanted, free // block)) < 1:
            raise ValueError(f"there is no memory for a block of {block} bytes: give num_blocks, or free some")
        return num_blocks

    def new_memory(self, sizes: KVSizes, device: torch.device, dtype: torch.dtype) -> Memory:
        """Return the memory of a process with a complete config. `dtype`: of the keys, unless they are float8."""
        module, name = MEMORIES[self.attention]
        new = self.memory or getattr(importlib.import_module(module), name)
        return new(self, sizes, device, dtype)


def without_attention(model: nn.Module) -> Attend:
    """Return an `attend` for this model that returns its queries."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    attend.sliding_window = getattr(model.config, "sliding_window", None)  # the model checks it
    return attend


@torch.inference_mode()
def step_nbytes(model: nn.Module, num_tokens: int, num_seqs: int) -> int:
    """Compute a step of `num_tokens` tokens that draws `num_seqs` tokens, and return the most bytes that it takes.

    Attention is left out, because its own memory is small. vLLM's profile run leaves it out, too.
    """
    device, config, attend = next(model.parameters()).device, model.config, without_attention(model)
    torch.cuda.reset_peak_memory_stats(device)
    before, tokens = torch.cuda.memory_allocated(device), torch.arange(num_tokens, device=device)
    positions = tokens % config.max_position_embeddings
    logits = model(tokens[None] % config.vocab_size, positions[None], attend, logits_for=tokens[:num_seqs])[0]
    request = Request([0], SamplingParams(top_p=0.5), None)  # whose draw sorts the vocabulary
    sample(logits, [Row(i, request, request.live[0]) for i in range(num_seqs)])
    peak = torch.cuda.max_memory_allocated(device) - before
    del tokens, positions, logits
    torch.cuda.empty_cache()  # the cache of keys and values may have it
    return peak


def free_memory(pages: str = "SC_AVPHYS_PAGES") -> int:
    """Return the bytes of this machine that nobody uses. With "SC_PHYS_PAGES", return all bytes."""
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_of(names: tuple[str, ...]) -> str:
    *most, last = (f'"{name}"' for name in names)
    return f"{', '.join(most)} or {last}" if most else last
