"""Requests to measure an engine with, and what serving them took (lesson 9).

The source of lesson 9 measures 64 prompts of 856 tokens, with 16 new tokens each. All 64 prompts are the same, so a
prefix cache serves nearly all of them. This module has other kinds of prompts too.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from pagewise.engine.llm import LLM
from pagewise.engine.profile import Profile
from pagewise.engine.sampling_params import SamplingParams
from pagewise.tools.progress import progress
from pagewise.tools.sizes import cdiv
from pagewise.tools.timing import rounds_at_most

Prompts = Literal["identical", "shared", "distinct", "mixed"]


class Workload(NamedTuple):
    """`num_requests` requests that come at once.

    prompts: "identical": one prompt for all. "shared": the first 7/8 in common, as of a system prompt. "distinct":
        nothing in common. "mixed": distinct, and the lengths of prompts and of answers vary independently of each
        other, evenly from 1/8 of the given length to the whole of it.
    """

    prompts: Prompts = "identical"
    num_requests: int = 64
    prompt_tokens: int = 856
    max_new_tokens: int = 16
    prompt: tuple[int, ...] = ()  # of "identical" requests, prompt_tokens long; (): a random one

    def draw(self, vocab_size: int, seed: int, **sampling: object) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts of random tokens, and how to continue each: request i is seeded with i.

        seed: from 0; another one, other prompts. sampling: fields of SamplingParams. By default the draw is greedy, and
            end tokens are ignored.
        """
        chance = random.Random(seed)
        lengths, budgets = ([most] * self.num_requests for most in (self.prompt_tokens, self.max_new_tokens))
        if self.prompts == "mixed":
            lengths, budgets = (_spread(most, self.num_requests) for most in (self.prompt_tokens, self.max_new_tokens))
            chance.shuffle(lengths)
            chance.shuffle(budgets)
        common = {"identical": self.prompt_tokens, "shared": self.prompt_tokens * 7 // 8}.get(self.prompts, 0)
        start = [*self.prompt] or chance.choices(range(vocab_size), k=common)
        prompts = [start + chance.choices(range(vocab_size), k=length - common) for length in lengths]
        params = [
            SamplingParams(max_tokens=budget, seed=i, **{"temperature": 0.0, "ignore_eos": True, **sampling})
            for i, budget in enumerate(budgets)
        ]
        return prompts, params

    def num_blocks(self, block_size: int) -> int:
        """Enough blocks for all requests at once, whatever they share."""
        return self.num_requests * cdiv(self.prompt_tokens + self.max_new_tokens, block_size)


def _spread(most: int, count: int) -> list[int]:
    """From most / 8 to most, evenly."""
    least = max(1, most // 8)
    return [least + (most - least) * i // max(1, count - 1) for i in range(count)]


class Run(NamedTuple):
    """Times and counts of serving a workload once. A value that a server does not report is empty or 0."""

    seconds: float
    prompt_tokens: int
    token_ids: list[list[int]]
    prefill: float = 0.0  # seconds of steps that computed tokens of a prompt
    steps: Sequence[float] = ()  # seconds of each of the other steps
    first_token: Sequence[float] = ()  # seconds from the beginning until each request had a token
    cached_tokens: int = 0  # prompt tokens that the prefix cache served
    peak_cache: int = 0  # bytes of K and V that requests held, or had reserved, between two steps, at most
    profile: Profile | None = None

    @property
    def decode(self) -> float:
        """Seconds of all steps that computed no token of a prompt."""
        return sum(self.steps)

    @property
    def completion_tokens(self) -> int:
        """Tokens that were generated."""
        return sum(map(len, self.token_ids))


def serve(llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]) -> Run:
    """Give an engine all requests, and step until it has answered."""
    first: dict[int, float] = {}
    outputs, peak = [], 0
    with llm.profile() as profile:
        begin = time.perf_counter()

        def note(piece) -> None:
            first.setdefault(piece.request_id, time.perf_counter() - begin)

        for prompt, params in zip(prompts, sampling, strict=True):
            llm.add_request(prompt, params, listener=note)
        while llm.has_unfinished:
            outputs += llm.step()
            peak = max(peak, llm.memory.used_nbytes)
        seconds = time.perf_counter() - begin
    outputs.sort(key=lambda output: output.request_id)
    prefills = {span.step for span in profile.spans if span.name == "prefill"}
    steps = [span for span in profile.spans if span.depth == 0]
    return Run(
        seconds,
        sum(len(output.prompt_token_ids) for output in outputs),
        [output.token_ids for output in outputs],
        sum(span.seconds for span in steps if span.step in prefills),
        [span.seconds for span in steps if span.step not in prefills],
        [first[output.request_id] for output in outputs],
        sum(output.num_cached_tokens for output in outputs),
        peak,
        profile,
    )


def compare(
    servers: Mapping[str, Callable[[list[list[int]], list[SamplingParams]], Run]],
    workload: Workload,
    *,
    vocab_size: int,
    warmup_runs: int = 1,
    repeat_runs: int = 3,
    **sampling: object,
) -> dict[str, list[Run]]:
    """Have a workload served by each server in turn, so that what disturbs the machine meets all of them.

    Each round has prompts of its own: what a prefix cache serves, it has met in the same run. A server is
    `partial(serve, llm)`, or another engine as a function of prompts and parameters. `PAGEWISE_ROUNDS` in the
    environment limits the runs that count, and leaves out the others.
    """
    if (most := rounds_at_most(repeat_runs)) is not None:
        warmup_runs, repeat_runs = 0, most
    runs = {name: [] for name in servers}
    turns = [(round, name) for round in range(warmup_runs + repeat_runs) for name in servers]
    for round, name in progress(turns, f"{workload.prompts} prompts"):
        run = servers[name](*workload.draw(vocab_size, round, **sampling))
        if round >= warmup_runs:
            runs[name].append(run)
    return runs
