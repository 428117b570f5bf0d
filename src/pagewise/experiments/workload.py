"""Replaying requests against four memory allocators, to see where a KV cache goes (lesson 4).

A request brings a prompt and then grows by one token per step to a length that is not known beforehand. `replay` runs
requests in the memory of an allocator (`allocators`). At any step, every slot is in one of five states:

    used        holds K and V of a token
    reserved    its own request will use it later
    internal    given to a request that will never use it
    external    free: the next request in line would fit if the free slots were contiguous
    idle        free: too little for the next request in line, or no request waits

Kwon et al. 2023, fig. 2.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from pagewise.experiments.allocators import Memory, Request
from pagewise.tools.checks import check_count, check_number
from pagewise.tools.roofline import Gpu


class Lengths(NamedTuple):
    """Log-normal prompt and output lengths: their means in tokens, and σ of their logarithms."""

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float


# The means are those printed in Kwon et al. 2023, fig. 11. The σ are not published. They were chosen for this course so
# that most requests are short and the tail reaches the model's limit, as in that figure. Try other σ before you rely on
# a result.
SHAREGPT = Lengths(161.31, 1.2, 337.99, 0.9)
ALPACA = Lengths(19.31, 0.6, 58.45, 0.9)


def sample_requests(
    lengths: Lengths, num_requests: int, *, rate: float | None = None, max_len: int = 2048, seed: int = 0
) -> list[Request]:
    """Return requests of at most max_len tokens. Longer requests are drawn again, as benchmarks drop them.

    `rate` is the mean number of arrivals per step, with Poisson arrivals. None: all requests arrive at step 0.
    """
    check_count("num_requests", num_requests)
    check_count("max_len", max_len, minimum=2)
    rng = np.random.default_rng(seed)
    gaps = np.zeros(num_requests)
    if rate is not None:
        check_number("rate", rate, low=1e-9)
        gaps = rng.exponential(1 / rate, num_requests)
    requests = []
    for arrival in np.cumsum(gaps):
        prompt = output = max_len
        while prompt + output > max_len:
            prompt = _draw(rng, lengths.prompt_mean, lengths.prompt_sigma)
            output = _draw(rng, lengths.output_mean, lengths.output_sigma)
        requests.append(Request(int(arrival), prompt, output))
    return requests


def _draw(rng: np.random.Generator, mean: float, sigma: float) -> int:
    return max(1, round(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma)))


class Replay(NamedTuple):
    """Arrays with one entry per step. The five states count slots and add up to the capacity."""

    used: np.ndarray
    reserved: np.ndarray
    internal: np.ndarray
    external: np.ndarray
    idle: np.ndarray
    batch: np.ndarray  # requests running
    waiting: np.ndarray  # requests in line
    prefilled: np.ndarray  # tokens of the requests let in: their K and V are computed before the step
    preemptions: int
    recomputed: int  # tokens of `prefilled` that had been computed before

    @property
    def crowded(self) -> np.ndarray:
        """Steps at which a request waits, so that memory limits them. All steps, if no request ever waited."""
        return self.waiting > 0 if self.waiting.any() else self.waiting == 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens generated per crowded step: the throughput, if the time of a step does not depend on the batch."""
        return float(self.batch[self.crowded].mean())

    def shares(self) -> dict[str, float]:
        """Return the mean share of memory in each state, over the crowded steps."""
        states = {name: getattr(self, name)[self.crowded].mean() for name in Replay._fields[:5]}
        return {name: float(slots / sum(states.values())) for name, slots in states.items()}

    def least_seconds(self, gpu: Gpu, *, weights_bytes: float, token_bytes: float) -> float:
        """Return the least time of the whole run for 16-bit weights, recomputation included.

        Each step reads the weights and the K and V in use once. Every token that is computed costs 2 FLOPs per weight.
        The slower of the two counts. Attention's own FLOPs are left out.
        """
        flops = weights_bytes * (self.batch + self.prefilled)
        return sum(map(gpu.seconds, flops.tolist(), (weights_bytes + token_bytes * self.used).tolist()))


class _Step(NamedTuple):
    """The state after every running request has grown by a token, before finished requests leave."""

    tokens: list[int]
    running: list[int]
    waiting: int
    in_pieces: bool  # the next request in line would fit if the free slots were contiguous
    prefilled: int
    preempted: int


def replay(requests: Sequence[Request], memory: Memory) -> Replay:
    """Run all requests to their end: first come, first served, one token per running request and step.

    If a running request cannot grow, the request admitted last is preempted. It keeps its tokens and loses its memory.
    It is the next request to be admitted, and its K and V are then computed once more (`recomputed`).

    Raises ValueError if a request could not even run alone.
    """
    steps, preemptions = [], 0
    for step in _steps(requests, memory):
        counts = len(step.running), step.waiting, step.prefilled
        steps.append((*_states(requests, step, memory), *counts))
        preemptions += step.preempted
    columns = np.array(steps, dtype=np.int64).reshape(-1, 8).T
    return Replay(*columns, preemptions, int(columns[-1].sum()) - sum(request.prompt for request in requests))


def slots_at(requests: Sequence[Request], memory: Memory, step: int) -> list[tuple[str, int | None]]:
    """Return (state, request) of every slot at step `step` of `replay`, from 0. A free slot has the request None."""
    at = next(islice(_steps(requests, memory), step, None))
    slots: list[tuple[str, int | None]] = [("external" if at.in_pieces else "idle", None)] * memory.capacity
    for i in at.running:
        for n, slot in enumerate(memory.slots(i)):
            kept = "reserved" if n < requests[i].prompt + requests[i].output else "internal"
            slots[slot] = ("used" if n < at.tokens[i] else kept, i)
    return slots


def _steps(requests: Sequence[Request], memory: Memory) -> Iterator[_Step]:
    """Run `replay` step by step."""
    if requests and max(memory.needs(r, r.prompt + r.output) for r in requests) > memory.capacity:
        raise ValueError(f"requests must fit in memory alone, got one that needs more than {memory.capacity} slots")
    tokens = [request.prompt for request in requests]
    arriving, waiting = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival)), deque()
    running: list[int] = []
    now = 0
    while arriving or waiting or running:
        while arriving and requests[arriving[0]].arrival <= now:
            waiting.append(arriving.popleft())
        prefilled = preempted = 0
        while waiting and memory.admit(waiting[0], requests[waiting[0]], tokens[waiting[0]]):
            prefilled += tokens[waiting[0]]
            running.append(waiting.popleft())
        next_needs = memory.needs(requests[waiting[0]], tokens[waiting[0]]) if waiting else memory.capacity + 1
        in_pieces = next_needs <= memory.capacity - sum(memory.held.values())
        grown = 0
        while grown < len(running):
            if memory.grow(running[grown]):
                tokens[running[grown]] += 1
                grown += 1
            else:
                memory.release(running[-1])
                waiting.appendleft(running.pop())
                preempted += 1
        yield _Step(tokens, running, len(waiting), in_pieces, prefilled, preempted)
        for i in [i for i in running if tokens[i] == requests[i].prompt + requests[i].output]:
            memory.release(i)
            running.remove(i)
        now += 1


def _states(requests: Sequence[Request], step: _Step, memory: Memory) -> tuple[int, int, int, int, int]:
    """Return (used, reserved, internal, external, idle) in slots."""
    used = sum(step.tokens[i] for i in step.running)
    wanted = sum(min(memory.held[i], requests[i].prompt + requests[i].output) for i in step.running)
    held = sum(memory.held.values())
    free = memory.capacity - held
    return used, wanted - used, held - wanted, free * step.in_pieces, free * (not step.in_pieces)
