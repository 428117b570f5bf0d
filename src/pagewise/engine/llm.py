"""`LLM`: prompts in, text out, many at once (lesson 9).

A step is a straight line:

    scheduler.schedule() → chunks → runner.run(chunks) → logits → draw → tokens → the sequences → their texts

All sequences get their tokens before any of them gets its text. A tokenizer that raises then ends its own sequence and
no other. When another exception ends a step, its requests keep their tokens and wait again, and their memory is free.
With tensor parallelism, other processes follow `runner.run`, and the rest of a step happens in this process.
"""

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pagewise.engine import beam_search
from pagewise.engine.config import EngineConfig
from pagewise.engine.interrupts import held_back
from pagewise.engine.leader import Leader
from pagewise.engine.model_runner import ModelRunner
from pagewise.engine.profile import Profile
from pagewise.engine.prompts import sampling_defaults, special_stops, token_ids
from pagewise.engine.request import Choice, Chunk, Listener, Output, Piece, Request, Sequence
from pagewise.engine.sampling import Row, sample, scored
from pagewise.engine.sampling_params import Pick, SamplingParams
from pagewise.engine.scheduler import Scheduler
from pagewise.engine.text import Text
from pagewise.models import load_model
from pagewise.paged_blocks.prefix_cache import as_token
from pagewise.tools.progress import progress_bar
from pagewise.tools.worker import described

Prompt = str | Several[int] | Tensor
Drawn = tuple[Request, Sequence, tuple[int, ...], list[Pick | None]]  # a sequence, its drafts, and the drawn tokens


class LLM(AbstractContextManager):
    """A model, its memory, and a scheduler between them. One thread at a time may call it.

    On a CPU, it keeps packed copies of the model's weights if they fit a quarter of the free memory (see
    `models.linear`).

    Args:
        model: a folder or hub id, or a model. tokenizer: for a model, if it shall read and write text.
        config: the options of the engine. Without it, give the fields of `EngineConfig` as keywords.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """

    profile = Profile  # `with llm.profile() as profile:` measures what steps do

    def __init__(
        self, model: str | Path | nn.Module, config: EngineConfig | None = None, *, tokenizer: Any = None, **fields: Any
    ) -> None:
        if "data_parallel" in fields:
            raise TypeError("LLM has no data_parallel: start a server for each replica, as lessons/cluster.md says")
        config = EngineConfig(**fields) if config is None else replace(config, **fields)
        _check_model(model, config)
        self._leader, found = None, None
        with ExitStack() as on_error:
            on_error.callback(self.close)
            if config.num_processes > 1:
                self._leader = Leader(model, config)
                self.runner, model, found, config = self._leader.part
                weakref.finalize(self, self._leader.close)
            else:
                if not isinstance(model, nn.Module):
                    device, dtype = config.device_and_dtype()
                    model, found = load_model(model, dtype=dtype, device=device)
                config = config.completed(model)
                self.runner = ModelRunner(model, config)
            self.sampling_defaults = sampling_defaults(model, config.generation_config)
            on_error.pop_all()
        self.model, self.tokenizer, self.config = model, tokenizer or found, config
        self.memory, self.scheduler = self.runner.memory, Scheduler(self.runner.memory, config)
        of_tokenizer = getattr(self.tokenizer, "eos_token_id", None)
        self._ends = frozenset(getattr(model, "eos_token_ids", ())) | {of_tokenizer} - {None}
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.failed_ids: list[int] = []  # requests of the last step that raised an exception
        self._untold: deque[tuple[Request, Sequence | None]] = deque()  # have tokens without text; None: beams
        self._pieces: deque[tuple[Request, Piece]] = deque()  # no listener has heard of them yet
        self._ended: dict[int, Output] = {}  # `step` has not returned them yet

    def close(self) -> None:
        """End the other processes of the engine. Afterwards this engine computes no step. Alone, do nothing."""
        if self._leader is not None:
            self._leader.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Several[Prompt],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
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
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts or of lists of token ids: put a single one into a list")
        params = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
        if len(params) != len(prompts):
            said = f"sampling must be one for all or one for each of {len(prompts)} prompts"
            raise ValueError(f"{said}, got {len(params)}")
        requests, outputs = list(map(self.prepare, prompts, params)), []
        ids = list(map(self.add, requests))
        try:
            with progress_bar(len(ids), "prompts", show=progress) as bar:
                while missing := self._requests.keys() & ids:
                    self._step()
                    bar.update(len(missing - self._requests.keys()))
        finally:
            for request_id in ids:
                if request_id in self._requests:
                    self.abort(request_id)
                outputs.append(self._ended.pop(request_id, None))
        return outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str | int]:
        """Yield the text that follows a prompt, piece by piece. Without a tokenizer, yield token ids.

        A prompt that does not fit raises `generate`'s errors at once. A stream that is left early aborts its request.
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

    def add_request(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, listener: Listener | None = None
    ) -> int:
        """Let a prompt wait for its turn; returns the request's id.

        `listener` is called with a `Piece` at the end of each step that brought something new for a choice. Beams are
        told of when the search has ended.

        Raises:
            ValueError, TypeError: as `generate`.
        """
        request = self.prepare(prompt, sampling)
        request.listener = listener
        return self.add(request)

    def prepare(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Request:
        """The first half of `add_request`: make the token ids and check everything. The engine does not change.

        Another thread may prepare requests while this one steps. So a long prompt does not hold up a step.
        """
        if sampling is None:
            sampling, most = self.sampling_params(), self.sampling_defaults.get("max_tokens")
            if most is not None:
                prompt = token_ids(prompt, self.tokenizer)
                sampling = replace(sampling, max_tokens=max(1, min(most, self.max_new_tokens(prompt))))
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
        tokens, vocab_size = token_ids(prompt, self.tokenizer), self.model.config.vocab_size
        # sizes are compared before any work that grows with them
        if sampling.stop_strings and (self.tokenizer is None or sampling.beam_width > 1):
            why = "the model came without a tokenizer" if self.tokenizer is None else "a beam search knows tokens only"
            raise ValueError(f"stop has strings, but {why}: give token ids")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if sampling.width > (limit := getattr(self.config, name)):
                raise ValueError(f"n or beam_width = {sampling.width} exceeds {name} = {limit}")
        if len(tokens) + sampling.max_tokens > self.config.max_model_len:
            said = f"{sampling.described(len(tokens))} exceed the model's context of {self.config.max_model_len}"
            raise ValueError(f"{said} tokens: shorten one of them")
        named = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
        for name, ids in (named | {"logit_bias": dict(sampling.logit_bias or ())}).items():
            for token in ids:
                if not isinstance(token, str) and token >= vocab_size:
                    raise ValueError(f"{name} must name tokens in [0, vocab_size = {vocab_size}), got {token}")
        if set(map(type, tokens)) != {int}:
            tokens = list(map(as_token, tokens))
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(f"token ids must be in [0, vocab_size = {vocab_size}), got {wrong} in the prompt")
        ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else self._ends)
        if sampling.stop_strings:
            ends |= special_stops(self.tokenizer, sampling.stop_strings)
        ends = frozenset(filter(vocab_size.__gt__, ends))  # a tokenizer may know more than the model
        draws_seed = sampling.seed is None and not sampling.greedy
        seed = int(torch.randint(2**63 - 1, ())) if draws_seed else sampling.seed or 0
        try:
            request = Request(tokens, sampling, self.tokenizer, ends, seed)
        except Exception as error:
            said = f"prompt must be tokens that the tokenizer decodes: it raised {described(error)}"
            raise ValueError(said) from error
        self.memory.check_fits(request)
        return request

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Return the sampling parameters of a request that gives some of them. The checkpoint may recommend others.

        The max_tokens that it recommends is for requests without parameters alone, where it is cut to what fits.

        Raises:
            ValueError, TypeError: as SamplingParams.
        """
        beams = given.get("beam_width", 1) != 1
        left_out = {"max_tokens", *(("top_k", "top_p", "min_p") if beams else ())}  # a beam search draws nothing
        recommended = {name: value for name, value in self.sampling_defaults.items() if name not in left_out}
        return SamplingParams(**recommended | given)

    def add(self, request: Request) -> int:
        """The second half of `add_request`: let a prepared request wait for its turn; returns its id."""
        with held_back():
            request.id, self._next_id = self._next_id, self._next_id + 1
            self._requests[request.id] = request
            self.scheduler.waiting.append(request)
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

    def max_new_tokens(self, prompt: Prompt, *, n: int = 1) -> int:
        """Return the largest max_tokens of n samples that fits context and memory after this prompt.

        The result is below 1 if the prompt is too long.
        """
        tokens = token_ids(prompt, self.tokenizer)
        n = min(n, self.config.max_num_seqs)  # `prepare` refuses more

        def exceeds(max_tokens: int) -> bool:
            try:
                self.memory.check_fits(Request(tokens, SamplingParams(max_tokens, n=n), None))
            except ValueError:
                return True
            return False

        most = min(self.config.max_model_len, self.memory.num_tokens + 1) - len(tokens)
        return most if n == 1 or most < 1 else bisect_left(range(1, most + 1), True, key=exceeds)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to compute or to return."""
        return bool(self._requests or self._ended or self._pieces)

    def _step(self) -> None:
        """Compute one step, and let listeners hear of it. If computing raises, all its requests wait again."""
        self.failed_ids = []
        with Profile.span("step"):
            try:
                with held_back(), Profile.span("schedule"):
                    chunks = self.scheduler.schedule()
                    if self.config.speculate:
                        chunks = self.scheduler.draft(chunks)
                if chunks:
                    logits = self.runner.run(chunks)
                    with Profile.span("sampling"):
                        drawn, selections, prompts = draw(chunks, logits)
                    with held_back():
                        num_right = {}
                        for request, logprobs in prompts:
                            request.prompt_logprobs += logprobs
                        for request, sequence, drafts, picks in drawn:
                            if not sequence.untold:  # else a step failed before the sequence was told
                                self._untold.append((request, sequence))
                            num_right[sequence] = sequence.take(picks, drafts, request.ends, request.longest)
                        self.scheduler.computed(chunks, num_right)
                        for request, sequence, *_ in drawn:
                            if sequence.finish_reason is not None:
                                self.scheduler.finish(request, sequence)
                        for request, selection in selections:
                            if beam_search.apply(request, selection, self.memory):
                                self.scheduler.remove(request)
                                self._untold.append((request, None))
            except BaseException:
                with held_back():
                    self.failed_ids = [request.id for request in self.scheduler.running]
                    for request in reversed(self.scheduler.running.copy()):
                        self.scheduler.preempt(request)
                raise
            if self._untold:
                with held_back():
                    self._tell()
        while self._pieces:
            request, piece = self._pieces.popleft()
            if request.listener is not None:
                request.listener(piece)

    def _tell(self) -> None:
        """Give the drawn tokens to the texts of their sequences. End the requests that have no live sequences left."""
        while self._untold:
            request, sequence = self._untold[0]
            if request.id in self._requests:  # else it was aborted
                if sequence is None:
                    self._tell_of_beams(request)
                else:
                    self._tell_of(request, sequence)
            self._untold.popleft()
            if not request.live and request.id in self._requests and request not in dict(self._untold):
                self._end(request)

    def _tell_of(self, request: Request, sequence: Sequence) -> None:
        """Give a sequence the text of its untold tokens, in which a stop string may end it. A failure ends it too."""
        told, new, text, logprobs = False, [], "", []
        try:
            while sequence.untold and not sequence.text.stopped:
                pick = sequence.untold[0]
                last = sequence.finish_reason is not None and len(sequence.untold) == 1
                ended = last and sequence.finish_reason == "stop"
                text += sequence.text.add(None if ended else pick.token, last=last)
                new.append(sequence.untold.pop(0).token)
                sequence.score += pick.logprob
                if pick.likeliest is not None:
                    logprobs.append(pick.likeliest)
            if sequence.finish_reason == "error":
                text += sequence.text.add(None)
            if sequence.text.stopped:
                sequence.cut("stop")
            told = True
        except Exception as error:
            text += sequence.text.give_up()
            sequence.cut("error", f"the tokenizer raised {described(error)}")
            told = True
        finally:  # after Ctrl-C the others are told in the next step
            sequence.logprobs += logprobs
            reason, error = (sequence.finish_reason, sequence.error) if told else (None, None)
            piece = Piece(request.id, sequence.index, new, text, reason, logprobs or None, error)
            self._pieces.append((request, piece))
        if sequence.finish_reason is not None and sequence in request.live:
            self.scheduler.finish(request, sequence)

    def _tell_of_beams(self, request: Request) -> None:
        """Give the choices of a beam search their texts, which leave out end tokens."""
        try:
            if request.tokenizer is not None:
                text = Text(request.tokenizer, (), request.prompt)
                for i, choice in enumerate(request.beams):
                    tokens = choice.token_ids[: -1 if choice.finish_reason == "stop" else None]
                    request.beams[i] = choice._replace(text=text.following(tokens))
        except Exception as error:
            request.error = f"the tokenizer raised {described(error)}"
            request.beams = [choice._replace(text="", finish_reason="error") for choice in request.beams]
        for index, (ids, text, reason, _) in enumerate(request.beams):
            error = request.error if reason == "error" else None
            self._pieces.append((request, Piece(request.id, index, ids, text or "", reason, None, error)))

    def _end(self, request: Request) -> None:
        """Make the output of a request whose choices all have ended."""
        del self._requests[request.id]
        start, wants = len(request.prompt), request.sampling.logprobs is not None
        choices, logprobs, error = [*request.beams], [None] * len(request.beams), request.error
        for s in sorted(request.finished, key=attrgetter("index")):
            choices.append(Choice(s.tokens[start:], s.text.text, s.finish_reason, s.score))
            logprobs.append(s.logprobs if wants else None)
            error = error or s.error
        cached, of_prompt = request.num_cached_tokens, request.prompt_logprobs
        self._ended[request.id] = Output(request.id, request.prompt, choices, logprobs, cached, error, of_prompt)


def draw(
    chunks: list[Chunk], logits: Float[Tensor, "n vocab"]
) -> tuple[list[Drawn], list[tuple[Request, beam_search.Selection]], list[tuple[Request, list[dict[int, float]]]]]:
    """Return tokens of each sequence that has logits, the next beams of each search, and log p of prompt tokens.

    A sequence gets a token after each of its drafts, and one more. Nothing changes.
    """
    rows, wanted, prompts, stop = [], [], [], 0
    searches: dict[Request, list[int]] = {}
    for chunk in chunks:
        request, drafts, at, stop = chunk.request, chunk.drafts, stop, stop + chunk.num_logits
        if request.prompt_logprobs is not None and (found := request.scored(chunk.start, chunk.stop)):
            tokens = request.prompt[found.start : found.stop]
            prompts.append((request, scored(logits[at : at + len(found)], tokens, request.sampling.prompt_logprobs)))
            at += len(found)
        if at == stop:
            continue
        if request.sampling.beam_width > 1:
            searches.setdefault(request, []).extend(range(at, stop))
            continue
        for sequence in [chunk.sequence] if request.forked else request.live:  # all begin with these tokens
            wanted.append((request, sequence, drafts, len(rows)))
            for i in range(stop - at):
                rows.append(Row(at + i, request, sequence, drafts[:i]))
    picks, drawn, selections = sample(logits, rows), [], []
    for request, sequence, drafts, first in wanted:
        drawn.append((request, sequence, drafts, picks[first : first + len(drafts) + 1]))
    for request, at in searches.items():
        selections.append((request, beam_search.select(request, logits[at])))
    return drawn, selections, prompts


def _check_model(model: object, config: EngineConfig) -> None:
    """Raise ValueError or TypeError unless `model` is a path, or a module with the dtype and device of the config."""
    if isinstance(model, nn.Module):
        weight = next(model.parameters())
        device = torch.device(config.device or weight.device)
        same = device.type == weight.device.type and device.index in (None, weight.device.index)
        for name, fits in (("dtype", config.dtype in (None, weight.dtype)), ("device", same)):
            if not fits:
                said = f"{name} is {getattr(config, name)}, but the model's weights are {getattr(weight, name)}"
                raise ValueError(f"{said}: move it with model.to(...)")
    elif not isinstance(model, str | Path):
        raise TypeError(f"model must be a folder, a hub id or a model, got {type(model).__name__}")
