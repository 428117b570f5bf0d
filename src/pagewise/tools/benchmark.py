"""Benchmarks: everything is checked on the inputs it is timed on, and what fails becomes a row that says so.

`measure` gives times, `ratios` how many times as long each takes as the first, `trial` the time of one candidate or the
reason why it has none. `pagewise.tools.timing` says how times are taken, `pagewise.tools.records` how they are kept.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pagewise.tools.records import Record, keep, recorded, surroundings, table, table_of
from pagewise.tools.timing import (
    ColdTimer,
    Spread,
    Timer,
    compare,
    copy_bandwidth,
    cpu_seconds,
    host_seconds,
    in_turns,
    matmul_rate,
    measure,
)
from pagewise.tools.worker import Failed, Worker, described

__all__ = [
    "Candidate",
    "Failed",
    "Record",
    "Spread",
    "Timing",
    "Worker",
    "copy_bandwidth",
    "cpu_seconds",
    "described",
    "keep",
    "matmul_rate",
    "measure",
    "progress",
    "ratios",
    "recorded",
    "records_of",
    "relative_error",
    "surroundings",
    "table",
    "table_of",
    "trial",
]

# Of a row's norm: a few roundings of the inputs, weights and outputs. What a wrong kernel does is larger by far.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}

T = TypeVar("T")
Candidate = Callable[[], Tensor]


class Timing(NamedTuple):
    """How long one candidate takes, and under which conditions that was measured."""

    seconds: Spread
    how: str


def relative_error(out: Tensor, exact: Tensor) -> float:
    """The worst row's ‖out − exact‖ / ‖exact‖, in float64: no row hides behind larger ones. NaN gives infinity."""
    if out.shape != exact.shape:
        raise ValueError(f"the result has shape {list(out.shape)}, the exact one {list(exact.shape)}")
    out, exact = out.detach().double(), exact.detach().double().to(out.device)
    tiny = torch.finfo(torch.float64).tiny
    errors = (out - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=tiny)
    return float(errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if errors.numel() else 0.0


def fault(run: Candidate, exact: Tensor) -> str | None:
    """Why the result of `run` is not to be timed: it raises, or is wrong. None: it is right."""
    try:
        out = run()
        error, allowed = relative_error(out, exact), TOLERANCES[out.dtype]
    except Exception as raised:
        return described(raised)
    return None if error <= allowed else f"wrong: relative error {error:.2g}, allowed {allowed:.2g}"


def trial(
    runs: Sequence[Candidate],
    exact: Sequence[Tensor],
    *,
    timer: Timer | None = None,
    repeats: int = 30,
    warmup: int = 3,
    check: Callable[[Candidate, Tensor], str | None] | None = None,
) -> Timing | str:
    """The time of one candidate, or the reason why it has none.

    `runs` are its calls on different inputs, `exact` the results that they must give: all are checked, then called in
    rotation. `timer`: by default the GPU's where there is one, else the host's clock. `check`: by default `fault`.
    """
    for run, right in zip(runs, exact, strict=True):
        if reason := (check or fault)(run, right):
            return reason
    on_gpu = exact[0].device.type == "cuda"
    timer = timer or (ColdTimer(exact[0].device) if on_gpu else host_seconds)
    turn = itertools.cycle(runs)
    try:
        (seconds,) = in_turns({"": lambda: next(turn)()}, timer, repeats=repeats, warmup=warmup).values()
    except Exception as raised:
        return described(raised)
    return Timing(Spread.of(seconds), f"{_conditions(timer)}, {repeats} calls, inputs in rotation: {len(runs)}")


def _conditions(timer: Timer) -> str:
    if isinstance(timer, ColdTimer):
        return f"cold L2, launch {'hidden' if timer.hidden else 'included'}"
    return "host clock, launch included"


def records_of(
    worker: Callable[..., Timing | str],
    tasks: Sequence[tuple[Any, str]],
    label: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    nbytes: Callable[[Any], int],
    bound: tuple[str, float | None],
    limit: float,
) -> Iterator[Record]:
    """A record for each task, a shape (a NamedTuple with `flops`) and a method, as they come.

    Args:
        worker: a `Worker`. It answers (shape, method) with a `Timing` or the reason why there is none; failing is one.
        label: what the progress bar says.
        nbytes: bytes that a shape moves.
        bound: what time is held against, "copy" or "matmul", and its rate where that is known.
        limit: seconds for one task.
    """
    about = surroundings(device)
    for shape, method in progress(tasks, label):
        record = Record(
            what=method,
            shape=shape._asdict(),
            dtype=str(dtype).removeprefix("torch."),
            how="not timed",
            bytes=nbytes(shape),
            flops=shape.flops,
            limit=bound[0],
            limit_rate=bound[1],
            **about,
        )
        try:
            result = worker(shape, method, limit=limit)
        except Failed as failed:
            result = str(failed)
        if isinstance(result, str):
            yield record._replace(refused=result)
            continue
        seconds, how = result
        record = record._replace(seconds=seconds.median, spread=seconds.high - seconds.low, how=how)
        yield record._replace(fraction=record.reached())


def ratios(functions: Mapping[str, Callable], exact: Tensor | None = None, **options: Any) -> dict[str, Spread | str]:
    """`compare` (which takes the options) of all functions whose result is `exact`; of the others what is wrong.

    Where `exact` is None, they have no result to check. With a wrong first one there is nothing to compare with.
    """
    wrong = {} if exact is None else {name: reason for name in functions if (reason := fault(functions[name], exact))}
    first, *others = functions
    if first in wrong:
        return {**dict.fromkeys(others, f"not compared: {first} failed"), **wrong}
    return compare({name: functions[name] for name in functions if name not in wrong}, **options) | wrong


def progress(items: Sequence[T], label: str) -> Iterable[T]:
    """The items, with a bar on stderr that shows how many are done, where tqdm is installed and stderr a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=label, file=sys.stderr, disable=None)
