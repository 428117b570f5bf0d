"""`LLM`: prompts in, text out, many at once (lesson 9).

`steps` has the class `Engine`, which computes step by step. This module makes the parts of an engine, and adds the two
methods that most users need: `generate` and `stream`.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagewise.engine.config import EngineConfig
from pagewise.engine.leader import Leader
from pagewise.engine.model_runner import make_runner
from pagewise.engine.prompts import paired, sampling_defaults
from pagewise.engine.request import Output, Piece, Request
from pagewise.engine.sampling_params import SamplingParams
from pagewise.engine.scheduler import Scheduler
from pagewise.engine.steps import Engine, Prompt
from pagewise.models import load_model
from pagewise.tools.device import best_device
from pagewise.tools.progress import progress_bar


class LLM(Engine, AbstractContextManager):
    """A model, its memory, and a scheduler between them. One thread at a time may call it.

    On a CPU, it keeps packed copies of the model's weights if they fit a quarter of the free memory (see
    `models.linear`).

    Args:
        model: a folder or hub id, or a model. tokenizer: for a model, if it shall read and write text.
        config: the options of the engine. Without it, give the fields of `EngineConfig` as keywords.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """

    def __init__(
        self, model: str | Path | nn.Module, config: EngineConfig | None = None, *, tokenizer: Any = None, **fields: Any
    ) -> None:
        if "data_parallel" in fields:
            raise TypeError("LLM has no data_parallel: start a server for each replica, as lessons/cluster.md says")
        config = EngineConfig(**fields) if config is None else replace(config, **fields)
        self._leader = None
        with ExitStack() as on_error:
            on_error.callback(self.close)
            if config.num_processes == 1:
                mine, tokenizer = _loaded(model, tokenizer, config)
                self.config = config.completed(mine)
                runner = make_runner(mine, self.config)
            else:
                _check_model(model, config)
                self._leader = Leader(model, config)
                runner, mine, found, self.config = self._leader.part
                tokenizer = tokenizer or found
            recommended = sampling_defaults(mine, config.generation_config)
            on_error.pop_all()
        self.backend = self.config.backend  # that computes attention
        if self._leader is not None:
            weakref.finalize(self, self._leader.close)
        scheduler = Scheduler(
            runner.memory,
            policy=config.scheduler,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            speculate=config.speculate,
        )
        super().__init__(mine, tokenizer, scheduler, runner)
        self.sampling_defaults = recommended
        self.max_model_len = self.config.max_model_len

    def close(self) -> None:
        """End the other processes of the engine. Afterwards this engine computes no step. Alone, do nothing."""
        if self._leader is not None:
            self._leader.close()

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
            sampling: for all, or one for each. Default: `sampling_params()`.
            progress: show a bar (tqdm). Default: if stderr is a terminal.

        Raises:
            ValueError, TypeError: a prompt does not fit: it is empty, has foreign ids, or is too long with its
                max_tokens for the model's context or for the memory.
            Any other exception: the call's requests are aborted, and the engine can be used again.
        """
        requests = [self.prepare(prompt, one) for prompt, one in paired(prompts, sampling)]
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


def _loaded(model: str | Path | nn.Module, tokenizer: Any, config: EngineConfig) -> tuple[nn.Module, Any]:
    """Return the model and its tokenizer: loaded from a folder or the hub, or unchanged if `model` is a module."""
    _check_model(model, config)
    if isinstance(model, nn.Module):
        return model, tokenizer
    device = best_device() if config.device is None else torch.device(config.device)
    dtype = config.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    model, found = load_model(model, dtype=dtype, device=device)
    return model, tokenizer or found


def _check_model(model: object, config: EngineConfig) -> None:
    """Raise ValueError or TypeError unless `model` is a path, or a module with the dtype and device of the config."""
    if isinstance(model, nn.Module):
        weight = next(model.parameters())
        device = None if config.device is None else torch.device(config.device)
        if config.dtype not in (None, weight.dtype):
            raise ValueError(f"dtype is {config.dtype}, but the model's weights are {weight.dtype}: {_MOVE}")
        if device is not None and (
            device.type != weight.device.type or device.index not in (None, weight.device.index)
        ):
            raise ValueError(f"device is {config.device}, but the model's weights are {weight.device}: {_MOVE}")
    elif not isinstance(model, str | Path):
        raise TypeError(f"model must be a folder, a hub id or a model, got {type(model).__name__}")


_MOVE = "move it with model.to(...)"
