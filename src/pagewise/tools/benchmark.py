"""Benchmarks that check every result before they time it. A candidate that fails becomes a row that says why.

`trial` returns the time of one candidate, or the reason why it has no time. `ratios` returns how many times as long
each function takes as the first. `pagewise.tools.timing` takes the times, and `pagewise.tools.records` keeps them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagewise.tools.records import keep, recorded, table
from pagewise.tools.timing import ColdTimer, Spread, Timer, compare, copy_bandwidth, host_seconds, in_turns, measure
from pagewise.tools.worker import described

# for lessons and experiments
__all__ = ["copy_bandwidth", "described", "keep", "measure", "recorded", "table"]

# As a fraction of a row's norm: a few roundings of inputs, weights and outputs. A wrong kernel's error is far larger.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}

Candidate = Callable[[], Tensor]


class Timing(NamedTuple):
    """The time of one candidate, and the conditions under which it was measured."""

    seconds: Spread
    how: str


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Return the largest ‖out − exact‖ / ‖exact‖ of all rows, in float64. NaN gives infinity."""
    if out.shape != exact.shape:
        raise ValueError(f"the result has shape {list(out.shape)}, the exact one {list(exact.shape)}")
    out, exact = out.detach().double(), exact.detach().double().to(out.device)
    tiny = torch.finfo(torch.float64).tiny
    errors = (out - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=tiny)
    return float(errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if errors.numel() else 0.0


def fault(run: Candidate, exact: Tensor) -> str | None:
    """Return why `run` is not to be timed: it raises, or its result is wrong. None means that the result is right."""
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
    """Return the time of one candidate, or the reason why it has no time.

    Args:
        runs: the calls of the candidate on different inputs. All are checked, then called in rotation.
        exact: the right results.
        timer: measures a call. The default is a GPU's own time on a GPU and the host's clock elsewhere.
        check: returns why a result is wrong, or None. The default is `fault`.
    """
    for run, right in zip(runs, exact, strict=True):
        if reason := (check or fault)(run, right):
            return reason
    if timer is None:
        timer = ColdTimer(exact[0].device) if exact[0].is_cuda else host_seconds
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


def ratios(functions: Mapping[str, Callable], exact: Tensor | None = None, **options: Any) -> dict[str, Spread | str]:
    """Return `compare` of all functions whose result is `exact`, and what is wrong with the other functions.

    If `exact` is None, no result is checked. If the first function is wrong, nothing is compared.
    """
    wrong = {} if exact is None else {name: reason for name in functions if (reason := fault(functions[name], exact))}
    first, *others = functions
    if first in wrong:
        return {**dict.fromkeys(others, f"not compared: {first} failed"), **wrong}
    return compare({name: functions[name] for name in functions if name not in wrong}, **options) | wrong
