"""How long a call takes, and how many times as long another one: times that are to be compared are taken in turns.

On the host by its clock. On a GPU by two events on the stream, from a cold and clean L2 cache, with the cost of
launching hidden (`ColdTimer`). A noisy machine slows neighbours alike, so ratios of neighbours are worth more than
times: `compare` takes A B A B … and the median of B's time over that of the A beside it.
"""

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
    """Median seconds of each function, taken in turns so that a disturbance of the machine meets all of them.

    Waits for the GPU, if there is one, before and after each call; with `cold`, a GPU's own time: see `ColdTimer`.
    Report ratios of one call's results.
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
    """How many times as long as the first function each takes: the median of the ratios of neighbouring calls.

    The first one runs once more in each round, under its name and "again": how far that is from 1 is the noise.
    Before each timed call comes one that is not, so that each finds the caches as itself, not as another, left them.
    Rounds go on until there were `repeats` of them and `seconds` have passed. Many calls of a millisecond each are
    worth more than few long ones: a busy machine interrupts few of them. `timer`: by default `host_seconds`.
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


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    timer: Timer,
    *,
    repeats: int = 7,
    warmup: int = 2,
    seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of each call: at least `repeats` rounds of all functions, one after the other, and for `seconds`."""
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
    """Seconds of one call on the host's clock; waits for the GPU, if there is one, before and after."""
    _synchronize()
    start = time.perf_counter()
    function()
    _synchronize()
    return time.perf_counter() - start


def cpu_seconds(function: Callable[[], object]) -> float:
    """Seconds that one call keeps cores busy, all threads together: what other processes take is not in it."""
    start = time.process_time()
    function()
    return time.process_time() - start


class ColdTimer:
    """Seconds of one call on the GPU, between two events, from an L2 cache that is cold and clean.

    Before the call one buffer is written, so that the cache holds nothing of the inputs, then another one read, so that
    it holds nothing that must be written back meanwhile. Then the GPU sleeps while the host queues the call: no waiting
    for the host lies between the events. If it woke too early, the call is repeated after a longer sleep. A call that
    itself waits for the GPU can never be hidden: `hidden` says whether all calls so far were.
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
    """Bytes per second, read and written together, of a copy of `num_bytes` on the device: what a kernel can reach."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure({"copy": lambda: target.copy_(source)}, cold=True)["copy"]


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations per second of torch's product of two square matrices on the device: what a kernel can reach."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / measure({"matmul": lambda: a @ b}, cold=True)["matmul"]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
