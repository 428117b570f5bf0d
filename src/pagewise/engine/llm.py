"""`LLM`: prompts in, text out, many at once (lesson 9).

A step is a straight line:

    scheduler.schedule() → chunks → runner.run(chunks) → logits → sample → tokens → the requests

When an exception ends a step, its requests wait again with the tokens that they had, and their memory is free.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pagewise.engine import checks
from pagewise.engine.interrupts import held_back
from pagewise.engine.memory import DenseMemory, PagedMemory
from pagewise.engine.model_runner import ModelRunner, choose
from pagewise.engine.profile import Profile, span
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.scheduler import Policy, Scheduler, advance
from pagewise.engine.sequence import Choice, Listener, Output, Piece, Request
from pagewise.tools.checks import check_counts

Prompt = str | Sequence[int] | Tensor


class LLM:
    """A model, its memory, and a scheduler between them. One thread at a time may call it.

    Args:
        model: a folder or hub id, or a model. tokenizer: for a model, if it shall read and write text.
        num_blocks: of the KV cache, block_size tokens each. Default: enough for max_num_seqs sequences of the
            longest context, but at most a quarter of a CPU's free memory, or nine tenths of a GPU's.
        max_num_seqs: at most so many sequences in a step. max_num_batched_tokens: so many tokens; longer prompts are
            computed in chunks.
        attention: "paged", or "dense": contiguous caches, copied into each batch; num_blocks · block_size tokens.
        backend: what computes attention. "auto": triton on a GPU, torch on a CPU.
        prefix_cache: whole blocks of equal prompts are computed once. Default: if paged.
        scheduler: see `pagewise.engine.scheduler`. speculate: drafts per sequence and step, see `speculation`; 0: none.
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
        attention: Literal["paged", "dense"] = "paged",
        backend: Literal["auto", "torch", "triton", "cuda"] = "auto",
        prefix_cache: bool | None = None,
        scheduler: Policy = "continuous",
        speculate: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_counts(block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        check_counts(minimum=0, speculate=speculate)
        check_counts(num_blocks=1 if num_blocks is None else num_blocks)
        prefix_cache = checks.check_choices(attention, scheduler, prefix_cache)
        self.model, self.tokenizer = checks.loaded(model, tokenizer, dtype, device)
        weight, config = next(self.model.parameters()), self.model.config
        self.backend = checks.checked_backend(backend, attention, config, block_size, weight)
        if num_blocks is None:
            num_blocks = checks.default_num_blocks(self.model, block_size, max_num_seqs)
        kind = {"backend": self.backend, "dtype": weight.dtype, "device": weight.device}
        if attention == "dense":
            self.memory = DenseMemory(config, num_tokens=num_blocks * block_size, **kind)
        else:
            sizes = {"num_blocks": num_blocks, "block_size": block_size, "prefix_cache": prefix_cache}
            self.memory = PagedMemory(config, **sizes, **kind)
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        self.scheduler = Scheduler(self.memory, policy=scheduler, speculate=speculate, **limits)
        graphs = weight.is_cuda and attention == "paged" and self.backend == "triton"
        self.runner = ModelRunner(self.model, self.memory, weight.device, graphs)
        self._ends = checks.end_tokens(self.model, self.tokenizer)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.failed_ids: list[int] = []  # requests that the last step that raised had to do with
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
        if isinstance(prompts, str) or not all(isinstance(prompt, str | list | tuple | Tensor) for prompt in prompts):
            raise TypeError("prompts must be a list of texts or of lists of token ids: put a single one into a list")
        params = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"sampling must be one for all or one for each of {len(prompts)} prompts, got {len(params)}"
            )
        requests = [self.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        ids = [self.add(request) for request in requests]
        try:
            with _bar(len(ids), progress) as bar:
                while missing := self._requests.keys() & ids:
                    self._step()
                    bar.update(len(missing - self._requests.keys()))
        finally:
            for request_id in ids:
                self.abort(request_id)
            ended = {request_id: self._ended.pop(request_id, None) for request_id in ids}
        return list(ended.values())

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str | int]:
        """The text that follows a prompt, piece by piece; without a tokenizer its token ids.

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
        """The largest max_tokens that context and memory leave this prompt; less than 1 if it is too long."""
        tokens = checks.token_ids(prompt, self.tokenizer)
        return min(self.model.config.max_position_embeddings, self.memory.num_tokens + 1) - len(tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do, or to tell."""
        return bool(self._requests or self._ended or self._pieces)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no memory."""
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that do."""
        return len(self.scheduler.running)

    def profile(self, *, ops: bool = False) -> Profile:
        """A context manager that marks what steps do, see `pagewise.engine.profile`."""
        return Profile(ops=ops)

    def _step(self) -> None:
        """One step, all of it or, as far as anyone can tell, nothing of it."""
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
        """A request has all its choices."""
        self.scheduler.remove(request)
        del self._requests[request.id]
        self._ended[request.id] = Output(request.id, request.prompt, choices, logprobs, request.num_cached_tokens)


def _bar(total: int, progress: bool | None) -> AbstractContextManager:
    """tqdm's bar, where it is installed; `progress` None: if stderr is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext(SimpleNamespace(update=lambda: None))
    return tqdm(total=total, unit="prompt", disable=None if progress is None else not progress)
