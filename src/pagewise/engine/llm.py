"""`LLM`: prompts in, text out, many at once (lesson 9).

A step is a straight line:

    scheduler.schedule() → chunks → runner.run(chunks) → logits → sample → tokens → the requests

When an exception ends a step, its requests keep their tokens and wait again, and their memory is free.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pagewise.engine import checks
from pagewise.engine.block_tensors import BlockTensorMemory
from pagewise.engine.dense_memory import DenseMemory
from pagewise.engine.flash_decoding_plus_plus import check_unified_max, with_dataflow
from pagewise.engine.interrupts import held_back
from pagewise.engine.memory import PagedMemory
from pagewise.engine.model_runner import ModelRunner, choose
from pagewise.engine.profile import Profile, span
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.scheduler import Policy, Scheduler, advance
from pagewise.engine.sequence import Choice, Listener, Output, Piece, Request
from pagewise.flash_decoding_plus_plus import Dataflow, UnifiedMax
from pagewise.tools.checks import check_counts
from pagewise.tools.progress import progress_bar

MEMORIES = {"paged": PagedMemory, "dense": DenseMemory, "block_tensors": BlockTensorMemory}
Prompt = str | Sequence[int] | Tensor


class LLM:
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_counts(block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        check_counts(minimum=0, speculate=speculate)
        check_counts(num_blocks=1 if num_blocks is None else num_blocks)
        prefix_cache = checks.check_choices(attention, scheduler, prefix_cache)
        float8 = checks.float8_dtype(kv_cache_dtype, k_scale, v_scale, attention)
        self.model, self.tokenizer = checks.loaded(model, tokenizer, dtype, device)
        weight = next(self.model.parameters())
        self.backend = checks.checked_backend(backend, attention, self.model.config, block_size, weight, float8)
        check_unified_max(unified_max, attention, self.backend)
        forward = self.model if dataflow is None else with_dataflow(self.model, dataflow)
        kind = {"backend": self.backend, "dtype": float8 or weight.dtype, "device": weight.device}
        if num_blocks is None:
            num_blocks = checks.default_num_blocks(self.model, block_size, max_num_seqs, kind["dtype"])
        kind |= {"num_blocks": num_blocks, "block_size": block_size, "prefix_cache": prefix_cache}
        own = {"dense": {"unified_max": unified_max}, "paged": {"k_scale": k_scale, "v_scale": v_scale}}
        self.memory = MEMORIES[attention](checks.kv_sizes(self.model), **kind, **own.get(attention, {}))
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        self.scheduler = Scheduler(self.memory, policy=scheduler, speculate=speculate, **limits)
        graphs = weight.is_cuda and attention == "paged" and self.backend == "triton"
        self.runner = ModelRunner(forward, self.memory, weight.device, graphs)
        self._ends = checks.end_tokens(self.model, self.tokenizer)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.failed_ids: list[int] = []  # requests of the last step that raised an exception
        self._ended: dict[int, Output] = {}  # `step` has not returned them yet
        self._pieces: deque[tuple[Request, Piece]] = deque()  # likewise

    # -------------------------------------------------------------------------------------- prompts in, text out

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

    # -------------------------------------------------------------------------------------- step by step

    def add_request(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, listener: Listener | None = None
    ) -> int:
        """Let a prompt wait for its turn; returns the request's id.

        `listener` is called with a `Piece` at the end of each step that brought something new for a choice. Beams are
        told of when the search has ended.

        Raises:
            ValueError, TypeError: as `generate`.
        """
        return self.add(self.prepare(prompt, sampling, listener=listener))

    def prepare(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, listener: Listener | None = None
    ) -> Request:
        """The first half of `add_request`: make the token ids and check everything. The engine does not change.

        Another thread may prepare requests while this one steps. So a long prompt does not hold up a step.
        """
        sampling = SamplingParams() if sampling is None else sampling
        request = checks.checked_request(prompt, sampling, self.tokenizer, self.model.config, self.scheduler)
        request.listener = listener
        return request

    def add(self, request: Request) -> int:
        """The second half of `add_request`: let a prepared request wait for its turn; returns its id."""
        with held_back():
            request.id, self._next_id = self._next_id, self._next_id + 1
            self._requests[request.id] = request
            self.scheduler.add(request)
        return request.id

    def step(self) -> list[Output]:
        """Compute one step; returns the requests that have ended since the last call."""
        self._step()
        outputs, self._ended = [*self._ended.values()], {}
        return outputs

    def abort(self, request_id: int) -> None:
        """Forget a request and free what it holds. One that has ended is left alone; ValueError if there never was."""
        if request_id not in range(self._next_id):
            raise ValueError(f"there is no request {request_id!r}")
        with held_back():
            if (request := self._requests.pop(request_id, None)) is not None:
                self.scheduler.remove(request)

    def max_new_tokens(self, prompt: Prompt) -> int:
        """Return the largest max_tokens that fits context and memory after this prompt; below 1 if it is too long."""
        tokens = checks.token_ids(prompt, self.tokenizer)
        return min(self.model.config.max_position_embeddings, self.memory.num_tokens + 1) - len(tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to compute or to return."""
        return bool(self._requests or self._ended or self._pieces)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no memory."""
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self.scheduler.running)

    def profile(self, *, ops: bool = False) -> Profile:
        """A context manager that marks what steps do, see `pagewise.engine.profile`."""
        return Profile(ops=ops)

    def _step(self) -> None:
        """Compute one step. If it raises, every request is as it was before the step."""
        try:
            with span("step"):
                with held_back(), span("schedule"):
                    chunks = self.scheduler.draft(self.scheduler.schedule())
                if not chunks:
                    return
                logits = self.runner.run(chunks)
                with span("sampling"):
                    chosen = choose(chunks, logits, self._ends)
                with held_back():
                    advance(chunks, chosen, self.scheduler, self._ends, self._end, self._pieces.append)
        except BaseException:
            with held_back():
                self.failed_ids = [request.id for request in self.scheduler.running]
                for request in reversed(self.scheduler.running.copy()):
                    self.scheduler.preempt(request)
            raise
        while self._pieces:
            request, piece = self._pieces.popleft()
            if request.listener is not None:
                request.listener(piece)

    def _end(self, request: Request, choices: list[Choice], logprobs: list) -> None:
        """End a request that has all its choices."""
        self.scheduler.remove(request)
        del self._requests[request.id]
        self._ended[request.id] = Output(request.id, request.prompt, choices, logprobs, request.num_cached_tokens)
