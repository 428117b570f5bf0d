"""Replaying requests against four memory allocators, to see where a KV cache goes (lesson 4).

A request brings a prompt, then grows by one token per step to a length that nobody knows beforehand. `replay`
runs requests in the memory of an allocator (`allocators`). At any step every slot is in one of five states:

    used        holds K and V of a token
    reserved    its own request will use it later
    internal    given to a request that will never use it
    external    free, enough in total for the next in line, but not in one piece
    idle        free, too little for the next in line, or nobody waits

Kwon et al. 2023, fig. 2.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagewise.experiments.allocators import Memory, Request
from pagewise.tools.checks import check_count, check_number


class Lengths(NamedTuple):
    """Log-normal prompt and output lengths: their means in tokens, and σ of their logarithms."""

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float


# The means are those printed in Kwon et al. 2023, fig. 11. The σ are not published: they were chosen for this course so
# that most requests are short and the tail reaches the model's limit, as in that figure. Results that matter should be
# tried with other σ as well.
SHAREGPT = Lengths(161.31, 1.2, 337.99, 0.9)
ALPACA = Lengths(19.31, 0.6, 58.45, 0.9)


def sample_requests(
    lengths: Lengths, num_requests: int, *, rate: float | None = None, max_len: int = 2048, seed: int = 0
) -> list[Request]:
    """Requests of at most max_len tokens (longer ones are drawn again, as benchmarks drop them).

    `rate` is the mean number of arrivals per step, Poisson; None: all are there at step 0.
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
    """One entry per step; the five states in slots, adding up to the capacity."""

    used: np.ndarray
    reserved: np.ndarray
    internal: np.ndarray
    external: np.ndarray
    idle: np.ndarray
    batch: np.ndarray  # requests running
    waiting: np.ndarray  # requests in line
    preemptions: int

    @property
    def crowded(self) -> np.ndarray:
        """Steps at which someone waits: memory is what limits them. All steps, if nobody ever waited."""
        return self.waiting > 0 if self.waiting.any() else self.waiting == 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens generated per crowded step: throughput, if a step takes as long whatever the batch."""
        return float(self.batch[self.crowded].mean())

    def shares(self) -> dict[str, float]:
        """Mean share of memory in each state, over the crowded steps."""
        states = {name: getattr(self, name)[self.crowded].mean() for name in Replay._fields[:5]}
        return {name: float(slots / sum(states.values())) for name, slots in states.items()}


def replay(requests: Sequence[Request], memory: Memory) -> Replay:
    """Run all requests to their end: first come, first served, one token per running request and step.

    If a running request cannot grow, the one admitted last is preempted: it loses its memory, not its tokens, and is
    the next to be admitted. Computing its K and V once more is counted as a preemption, not as time.

    Raises ValueError if some request could not even run alone.
    """
    if requests and max(memory.needs(r, r.prompt + r.output) for r in requests) > memory.capacity:
        raise ValueError(f"requests must fit in memory alone, got one that needs more than {memory.capacity} slots")
    tokens = [request.prompt for request in requests]
    arriving, waiting = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival)), deque()
    running: list[int] = []
    steps, preemptions = [], 0
    while arriving or waiting or running:
        while arriving and requests[arriving[0]].arrival <= len(steps):
            waiting.append(arriving.popleft())
        while waiting and memory.admit(waiting[0], requests[waiting[0]], tokens[waiting[0]]):
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
                preemptions += 1
        steps.append((*_states(requests, tokens, running, memory, in_pieces), len(running), len(waiting)))
        for i in [i for i in running if tokens[i] == requests[i].prompt + requests[i].output]:
            memory.release(i)
            running.remove(i)
    return Replay(*np.array(steps).reshape(-1, 7).T, preemptions)


def _states(
    requests: Sequence[Request], tokens: list[int], running: list[int], memory: Memory, in_pieces: bool
) -> tuple[int, int, int, int, int]:
    """(used, reserved, internal, external, idle) in slots."""
    used = sum(tokens[i] for i in running)
    wanted = sum(min(memory.held[i], requests[i].prompt + requests[i].output) for i in running)
    held = sum(memory.held.values())
    free = memory.capacity - held
    return used, wanted - used, held - wanted, free * in_pieces, free * (not in_pieces)
