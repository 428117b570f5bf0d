"""Times of functions that are to be compared, taken side by side, and their record (lessons/measurements/*.json)."""

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def measure(
    functions: Mapping[str, Callable[[], object]], *, repeats: int = 7, warmup: int = 2, cold: bool = False
) -> dict[str, float]:
    """Median seconds of each function, taken in turns so that a disturbance of the machine meets all of them.

    Waits for the GPU, if there is one, before and after each call. Report ratios of one call's results.

    With `cold`, on a GPU: its L2 cache holds nothing of the inputs when a call begins, and the time is the GPU's own,
    between two events on the stream; what the launch costs on the host is hidden behind the clearing of the cache.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    timed = _cold_seconds if cold and torch.cuda.is_available() else _seconds
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(timed(function))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def copy_bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
    """Bytes per second, read and written together, of a copy of `num_bytes` on the device: what a kernel can reach."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure({"copy": lambda: target.copy_(source)}, cold=True)["copy"]


def record(path: Path, rows: Sequence[Mapping[str, Any]], **facts: object) -> None:
    """Write rows of measurements to `path` with the device, the date and the versions they belong to."""
    on_gpu = torch.cuda.is_available()
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU ({platform.machine()})",
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, **{name: _version(name) for name in ("triton", "cuda-core")}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, **facts, "rows": list(rows)}, indent=1) + "\n")


def recorded(path: Path) -> dict[str, Any] | None:
    """What `record` wrote, or None where nothing was recorded yet."""
    return json.loads(path.read_text()) if path.exists() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _seconds(function: Callable[[], object]) -> float:
    _synchronize()
    start = time.perf_counter()
    function()
    _synchronize()
    return time.perf_counter() - start


def _cold_seconds(function: Callable[[], object]) -> float:
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(4 * max(l2_bytes, 2**26), dtype=torch.uint8, device="cuda").zero_()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
