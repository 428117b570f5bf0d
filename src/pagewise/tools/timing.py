"""Measure how long calls take. Calls that are to be compared take turns.

The host uses its clock. A GPU uses two events on the stream, with a cold and clean L2 cache and with the cost of the
launch hidden (`ColdTimer`). A noisy machine slows neighbouring calls alike, so ratios of neighbours are more reliable
than times. `compare` therefore measures A B A B … and takes the median of B's time over the time of the A beside it.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

Timer = Callable[[Callable[[], object]], float]  # calls a function once and says how many seconds it took


class Spread(NamedTuple):
    """The median of some numbers, and the quartiles: half of the numbers lie between them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        if len(numbers) == 1:
            return cls(*numbers * 3)
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)


def measure(
    functions: Mapping[str, Callable[[], object]], *, repeats: int = 7, warmup: int = 2, cold: bool = False
) -> dict[str, float]:
    """Return the median seconds of each function. They take turns, so that a disturbance meets all of them.

    Waits for the GPU, if there is one, before and after each call. With `cold`, a GPU's own time is taken
    (`ColdTimer`). Report ratios of one call's results.
    """
    timer = ColdTimer() if cold and torch.cuda.is_available() else host_seconds
    taken = in_turns(functions, timer, repeats=repeats, warmup=warmup)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    repeats: int = 9,
    warmup: int = 2,
    timer: Timer | None = None,
) -> dict[str, Spread]:
    """Return how many times as long as the first function each takes: the median of the ratios of neighbouring calls.

    The first function runs once more in each round, under its name and "again". Its distance from 1 shows the noise. An
    untimed call precedes each timed call, so that each function finds the caches as it left them itself. There are at
    least `repeats` rounds, and they go on for `seconds`. Many short calls are better than few long ones, because a busy
    machine interrupts few of them. `timer`: the default is `host_seconds`.
    """
    once = timer or host_seconds

    def in_its_own_caches(function: Callable[[], object]) -> float:
        function()
        return once(function)

    first = next(iter(functions))
    functions = {**functions, f"{first}, again": functions[first]}
    taken = in_turns(functions, in_its_own_caches, repeats=repeats, warmup=warmup, seconds=seconds)
    return {
        name: Spread.of([theirs / base for theirs, base in zip(taken[name], taken[first], strict=True)])
        for name in functions
    }


def rounds_at_most(repeats: int) -> int | None:
    """Return `repeats` or `PAGEWISE_ROUNDS` of the environment, whichever is less. None if the latter is not set.

    A test that runs a lesson does not look at its timings, so it sets one round.
    """
    most = int(os.environ.get("PAGEWISE_ROUNDS") or 0)
    return min(repeats, most) if most else None


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    timer: Timer,
    *,
    repeats: int = 7,
    warmup: int = 2,
    seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Return the seconds of each call, in at least `repeats` rounds of all functions and for at least `seconds`.

    `PAGEWISE_ROUNDS=1` in the environment makes it one round without a warm-up: see `rounds_at_most`.
    """
    if (most := rounds_at_most(repeats)) is not None:
        repeats, warmup, seconds = most, 0, 0.0
    for function in functions.values():
        for _ in range(warmup):
            function()
    taken = {name: [] for name in functions}
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < repeats or time.perf_counter() < until:
        rounds += 1
        for name, function in functions.items():
            taken[name].append(timer(function))
    return taken


def host_seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one call on the host's clock. Waits for the GPU, if there is one, before and after."""
    _synchronize()
    start = time.perf_counter()
    function()
    _synchronize()
    return time.perf_counter() - start


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the seconds that one call keeps cores busy, all threads together. Other processes do not count."""
    start = time.process_time()
    function()
    return time.process_time() - start


class ColdTimer:
    """Measure the seconds of one call on the GPU, between two events, with an L2 cache that is cold and clean.

    Before the call, one buffer is written, so that the cache holds no inputs. Then another buffer is read, so that the
    cache holds nothing that must be written back. The GPU then sleeps while the host queues the call, so that no wait
    for the host is between the events. If the GPU woke too early, the call is repeated after a longer sleep. A call
    that itself waits for the GPU can never be hidden. `hidden` says whether all calls so far were hidden.
    """

    SLEEPS = (2**20, 2**22, 2**24, 2**26)  # cycles: 0.5 to 35 ms at 1.9 GHz

    def __init__(self, device: torch.device | None = None) -> None:
        device = device or torch.device("cuda", torch.cuda.current_device())
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._written, self._read = (
            torch.zeros(4 * max(l2_bytes, 2**24), dtype=torch.uint8, device=device).view(torch.int32) for _ in range(2)
        )
        self.hidden = True

    def __call__(self, function: Callable[[], object]) -> float:
        for cycles in self.SLEEPS:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._written.zero_()
            self._read.max()
            torch.cuda._sleep(cycles)
            start.record()
            function()
            end.record()
            still_asleep = not start.query()
            end.synchronize()
            if still_asleep:
                break
        self.hidden &= still_asleep
        return start.elapsed_time(end) / 1e3


def copy_bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
    """Return the bytes per second, read and written together, of a copy of `num_bytes` on the device."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure({"copy": lambda: target.copy_(source)}, cold=True)["copy"]


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Return the operations per second of torch's product of two square matrices on the device."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / measure({"matmul": lambda: a @ b}, cold=True)["matmul"]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
