"""`LLM`: prompts in, text out, many at once (lesson 9).

`steps` has the class `Engine`, which computes step by step. This module makes the parts of an engine, and adds the two
methods that most users need: `generate` and `stream`.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pagewise.engine import checks
from pagewise.engine.flash_decoding_plus_plus import check_unified_max
from pagewise.engine.follow import Plan, follow_torchrun
from pagewise.engine.followers import Followers
from pagewise.engine.model_runner import make_runner
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.scheduler import Policy, Scheduler
from pagewise.engine.sequence import Output, Piece, Request
from pagewise.engine.steps import Engine, Prompt
from pagewise.flash_decoding_plus_plus import Dataflow, UnifiedMax
from pagewise.tools.checks import check_counts
from pagewise.tools.progress import progress_bar


class LLM(Engine, AbstractContextManager):
    """A model, its memory, and a scheduler between them. One thread at a time may call it.

    Args:
        model: a folder or hub id, or a model. tokenizer: for a model, if it shall read and write text.
        num_blocks: of the KV cache, block_size tokens each. Default: enough for max_num_seqs sequences of the
            longest context, but at most a quarter of a CPU's free memory, or nine tenths of a GPU's.
        max_num_seqs: at most so many sequences in a step. max_num_batched_tokens: so many tokens; longer prompts are
            computed in chunks.
        attention: "paged". Two slower memories show why: "dense" has contiguous caches of num_blocks · block_size
            tokens, and "block_tensors" gathers blocks that are tensors of their own. Both copy keys in every step.
        backend: what computes attention. "auto": triton on a GPU, torch on a CPU.
        prefix_cache: whole blocks of equal prompts are computed once. Default: unless dense.
        kv_cache_dtype: "float8_e4m3fn" or "float8_e5m2", or these dtypes of torch. Default: the model's dtype.
        k_scale, v_scale: a float8 cache stores k / k_scale and v / v_scale. A quotient beyond the largest number of the
            format (448 of e4m3, 57344 of e5m2) becomes that number.
        scheduler: see `pagewise.engine.scheduler`. speculate: most drafts for a sequence in a step; 0: none.
        dataflow: a table of lesson 8, which chooses the product of each linear layer for the number of its rows.
        unified_max: lesson 8's φ for decode steps with dense attention. `memory.num_recomputed` counts unsafe rows.
        tensor_parallel: the number of processes that share the heads of the model and of the cache. This process starts
            the others, and they end with `close`, a `with` block, or this process. Under torchrun they exist already:
            there the constructor returns in process 0 alone, and all other processes exit when process 0 closes.
        device, dtype: of a checkpoint. Default: the best device; float32 on a CPU, bfloat16 on a GPU.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        attention: Literal["paged", "dense", "block_tensors"] = "paged",
        backend: Literal["auto", "torch", "triton", "cuda"] = "auto",
        prefix_cache: bool | None = None,
        kv_cache_dtype: torch.dtype | str | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        scheduler: Policy = "continuous",
        speculate: int = 0,
        dataflow: Dataflow | None = None,
        unified_max: UnifiedMax | None = None,
        tensor_parallel: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_counts(block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        check_counts(num_blocks=1 if num_blocks is None else num_blocks, tensor_parallel=tensor_parallel)
        check_counts(minimum=0, speculate=speculate)
        prefix_cache = checks.check_choices(attention, scheduler, prefix_cache)
        float8 = checks.float8_dtype(kv_cache_dtype, k_scale, v_scale, attention)
        alone = tensor_parallel == 1
        if not alone:
            checks.check_parallel(tensor_parallel, attention, device)
            follow_torchrun(tensor_parallel)
        mine, tokenizer = checks.loaded(model, tokenizer, dtype, device, whole=alone)
        self._followers = None
        with ExitStack() as on_error:
            on_error.callback(self.close)
            if not alone:
                self._followers = Followers(tensor_parallel, Plan.of(model, mine, device, dataflow), mine)
                mine = self._followers.model
            weight = next(mine.parameters())
            self.backend = checks.checked_backend(backend, attention, mine.config, block_size, weight, float8)
            check_unified_max(unified_max, attention, self.backend)
            if num_blocks is None:
                sizes = (block_size, max_num_seqs, float8 or weight.dtype, tensor_parallel)
                num_blocks = checks.default_num_blocks(mine, *sizes)
            kind = {"backend": self.backend, "dtype": float8 or weight.dtype, "prefix_cache": prefix_cache}
            own = {"dense": {"unified_max": unified_max}, "paged": {"k_scale": k_scale, "v_scale": v_scale}}
            kind |= {"num_blocks": num_blocks, "block_size": block_size, **own.get(attention, {})}
            runner = make_runner(mine, attention, kind, dataflow, self._followers)
            on_error.pop_all()
        if not alone:
            weakref.finalize(self, self._followers.close)
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        scheduler = Scheduler(runner.memory, policy=scheduler, speculate=speculate, **limits)
        super().__init__(mine, tokenizer, scheduler, runner)

    def close(self) -> None:
        """End the other processes of tensor parallelism. Afterwards this engine computes no step. Alone, do nothing."""
        if self._followers is not None:
            self._followers.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Return an output for each prompt, in their order. Everything is checked before anything is computed.

        Args:
            prompts: texts, or lists of token ids.
            sampling: for all, or one for each. Default: SamplingParams().
            progress: show a bar (tqdm). Default: if stderr is a terminal.

        Raises:
            ValueError, TypeError: a prompt does not fit: it is empty, has foreign ids, or is too long with its
                max_tokens for the model's context or for the memory.
            Any other exception: the call's requests are aborted, and the engine can be used again.
        """
        requests = [self.prepare(prompt, one) for prompt, one in checks.paired(prompts, sampling)]
        ids = [self.add(request) for request in requests]
        try:
            with progress_bar(len(ids), "prompts", show=progress) as bar:
                while missing := self._requests.keys() & ids:
                    self._step()
                    bar.update(len(missing - self._requests.keys()))
        finally:
            for request_id in ids:
                self.abort(request_id)
            ended = {request_id: self._ended.pop(request_id, None) for request_id in ids}
        return list(ended.values())

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str | int]:
        """Yield the text that follows a prompt, piece by piece. Without a tokenizer, yield token ids.

        A prompt that does not fit is refused at once (ValueError, TypeError).
        A stream that is left early aborts its request.
        """
        request = self.prepare(prompt, sampling)
        if request.width > 1:
            raise ValueError(f"stream gives one text, got n or beam_width = {request.width}: use generate")
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str | int]:
        pieces: deque[Piece] = deque()
        request.listener = pieces.append
        self.add(request)
        try:
            while pieces or request.id in self._requests:
                if not pieces:
                    self._step()
                while pieces:
                    piece = pieces.popleft()
                    if self.tokenizer is None:
                        yield from piece.token_ids
                    elif piece.text:
                        yield piece.text
        finally:
            self.abort(request.id)
            self._ended.pop(request.id, None)
