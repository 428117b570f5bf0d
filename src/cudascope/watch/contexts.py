"""The contexts that launches on the CPU run in: `observe`, `check`, `schedule`, `time_limit`.

with cudascope.observe() as report:          # counts and a trace, without a change to the kernel
    kernel[grid, block](x, out)
print(report)

with cudascope.check(outputs=[out]):         # raises Finding that names line, thread, tensor and element
    kernel[grid, block](x, out)
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from cudascope.arguments.arrays import Array, as_array
from cudascope.cpu.abi import Mode
from cudascope.watch.report import Report
from cudascope.watch.rules import ignored


class Run(NamedTuple):
    """How launches run here and now."""

    mode: Mode = Mode.PLAIN
    seed: int | None = None
    report: Report | None = None
    outputs: Sequence[Array] = ()
    trace_limit: int = 0
    stop: bool = True
    ignored: int = 0  # findings, bit by bit
    time_limit: float = 30.0


current_run: ContextVar[Run] = ContextVar("cudascope_run", default=Run())  # noqa: B039  a NamedTuple is immutable


@contextlib.contextmanager
def _within(run: Run) -> Iterator[Report | None]:
    outer = current_run.get().mode
    if Mode.PLAIN != outer != run.mode:
        raise RuntimeError("cudascope.observe() and cudascope.check() cannot be nested: use one after the other")
    token = current_run.set(run)
    try:
        yield run.report
    finally:
        current_run.reset(token)


def _watching(mode: Mode, seed: int | None) -> Run:
    """A run whose seed, unless given, and whose time limit are those of the context around it."""
    outer = current_run.get()
    return Run(mode, outer.seed if seed is None else seed, Report(), time_limit=outer.time_limit)


def time_limit(seconds: float = 30.0) -> contextlib.AbstractContextManager[None]:
    """End a launch inside if no thread has ended or passed a barrier for `seconds`, or has ended for 10 × `seconds`."""
    if not seconds > 0:
        raise ValueError(f"seconds must be more than 0, got {seconds}")
    return _within(current_run.get()._replace(time_limit=seconds))


def schedule(seed: int | None) -> contextlib.AbstractContextManager[None]:
    """Run the threads and the thread blocks of launches inside in the order that `seed` gives."""
    return _within(current_run.get()._replace(seed=seed))


def observe(*, schedule: int | None = None, trace_limit: int = 1_000_000) -> contextlib.AbstractContextManager[Report]:
    """Count what CPU launches inside do. Yields the Report; a launch's trace keeps its first `trace_limit` accesses."""
    return _within(_watching(Mode.OBSERVE, schedule)._replace(trace_limit=trace_limit))


def check(
    *,
    outputs: Sequence[object] = (),
    schedule: int | None = None,
    stop: bool = True,
    ignore: Sequence[str] = (),
    also: Sequence[str] = (),
) -> contextlib.AbstractContextManager[Report]:
    """Hold every access of CPU launches inside against the rules; the first that breaks one raises Finding.

    With `stop=False` a launch goes on: a bad access is dropped, and `report.findings` lists what was found, each pair
    of lines once. A hang or a fault ends the launch, as the last finding. `ignore` names rules, or families of rules,
    that shall find nothing, `also` those that are off unless asked for (rules.py).

    Reading an element of `outputs` before a launch inside has written it is an error too. The kernel works on copies of
    its tensors, each with empty space round it. When a launch ends or fails, the changed elements are copied back.
    `report.unwritten(tensor)` lists the elements that were never written.

    Limits: lanes of one warp that pass values on in volatile shared memory are reported as a race; an access narrower
    than an element of its tensor is held against the bounds only; a cast of a number that its type cannot hold gives
    what it gives on the host; up to 3 unwritten bytes of a word of shared memory count as padding.
    """
    arrays = tuple(map(as_array, outputs))
    if None in arrays:
        raise TypeError(f"outputs must be tensors or arrays, got {type(outputs[arrays.index(None)]).__name__}")
    run = _watching(Mode.CHECK, schedule)
    return _within(run._replace(outputs=arrays, stop=stop, ignored=ignored(ignore, also)))
