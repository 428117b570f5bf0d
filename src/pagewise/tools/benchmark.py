"""Times of functions that are to be compared, taken side by side."""

import statistics
import time
from collections.abc import Callable

import torch


def measure(functions: dict[str, Callable[[], object]], *, repeats: int = 7, warmup: int = 2) -> dict[str, float]:
    """Median seconds of each function, taken in turns so that a disturbance of the machine meets all of them.

    Waits for the GPU, if there is one, before and after each call. Report ratios of one call's results.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            _synchronize()
            start = time.perf_counter()
            function()
            _synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
