"""The time of each part of a step, as spans with names (lesson 9).

The engine marks each part of a step with `with Profile.span(name)`. A span may contain others:

    step ─┬─ schedule
          ├─ build batch
          ├─ prefill | decode ─┬─ block tables              (paged)
          │                    └─ model ─┬─ cache write     (in each layer)
          │                              ├─ build batch     (dense: K and V of all sequences)
          │                              └─ attention
          └─ sampling

A step is a prefill if it computes more than one token of any sequence, even if other sequences decode in it. While no
profile runs, a span costs a fraction of a microsecond.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, NamedTuple

import torch
from torch.profiler import record_function


class Span(NamedTuple):
    """A named part of one step. Times are host seconds, and `start` counts from the beginning of the profile."""

    name: str
    start: float
    seconds: float
    depth: int  # the number of spans that contain this span
    step: int  # the number of the step in the profile, from 0


class Total(NamedTuple):
    """The sum over all spans of one name."""

    count: int
    seconds: float
    own: float  # without the spans inside them; over all names these add up to the time of the outermost spans


class Profile:
    """A context manager that records `spans` of the engine, in the order in which they began.

    On a GPU, a span ends when the host has queued its work. The time of the device is in the span that waits for a
    result. Inside `torch.profiler.profile`, torch's trace has the spans too. A second profile raises RuntimeError.

    Attributes:
        span: `with Profile.span(name):` marks code for the profile that runs now. Without one, it does nothing.
    """

    span: ClassVar[Callable[[str], AbstractContextManager]] = nullcontext

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._step, self._depth = -1, 0

    def __enter__(self) -> "Profile":
        if Profile.span is not nullcontext:
            raise RuntimeError("a profile is running already: leave its `with` first")
        self._begin = time.perf_counter()
        Profile.span = self._span
        return self

    def __exit__(self, *_: object) -> None:
        Profile.span = nullcontext

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        place, depth = len(self.spans), self._depth
        self._depth += 1
        self._step += depth == 0
        self.spans.append(Span(name, 0.0, 0.0, depth, self._step))
        with record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext():
            begin = time.perf_counter()
            try:
                yield
            finally:
                seconds = time.perf_counter() - begin
                self._depth = depth
                self.spans[place] = self.spans[place]._replace(start=begin - self._begin, seconds=seconds)

    def by_name(self) -> dict[str, Total]:
        """Return the total of each name, in the order in which names first began."""
        totals: dict[str, Total] = {}
        enclosing: list[str] = []
        for name, _, seconds, depth, _ in self.spans:
            count, whole, own = totals.get(name, (0, 0.0, 0.0))
            totals[name] = Total(count + 1, whole + seconds, own + seconds)
            enclosing[depth:] = [name]
            if depth:
                outer = enclosing[depth - 1]
                totals[outer] = totals[outer]._replace(own=totals[outer].own - seconds)
        return totals
