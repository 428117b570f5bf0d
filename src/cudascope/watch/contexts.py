"""The contexts that launches on the CPU run in: `observe`, `check`, `schedule`, `time_limit`."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

from cudascope.arguments.arrays import Array, array_of
from cudascope.cpu.abi import Mode
from cudascope.cpu.rules import NEVER_WRITTEN, RULES, WITHOUT_THREAD
from cudascope.watch.report import Report


class Run(NamedTuple):
    """How launches run here and now."""

    mode: Mode = Mode.PLAIN
    seed: int | None = None
    report: Report | None = None
    outputs: Sequence[Array] = ()
    output_names: frozenset[str] = frozenset()  # of parameters, whose arrays are outputs
    trace_limit: int = 0
    stop: bool = True
    ignored: int = 0  # findings of the runtime, bit by bit
    off: frozenset[str] = frozenset()  # rules that are not of the runtime
    time_limit: float = 30.0
    outer: "Run | None" = None  # of the `observe` or `check` around this one

    @property
    def watching(self) -> "list[Run]":
        """This run and those around it, whose reports get the same launches. The innermost comes first."""
        return [self, *(self.outer.watching if self.outer else [])]

    def with_outputs(self, arrays: Mapping[str, Array]) -> "Run":
        """This run for a launch with these arrays: those that `output_names` name are outputs, here and around."""
        if self.report is None and self.outer is None:  # a plain launch
            return self
        outer = self.outer and self.outer.with_outputs(arrays)
        named = {name: arrays[name] for name in self.output_names & arrays.keys()}
        if self.report is not None and self.mode == Mode.CHECK:
            self.report.add_arrays(arrays, named)
        return self._replace(outputs=(*self.outputs, *named.values()), outer=outer)


current_run: ContextVar[Run] = ContextVar("cudascope_run", default=Run())  # noqa: B039  a NamedTuple is immutable


@contextlib.contextmanager
def _within(inner: Callable[[Run], Run]) -> Iterator[Report | None]:
    run = inner(current_run.get())
    token = current_run.set(run)
    try:
        yield run.report
    finally:
        current_run.reset(token)


def _watch(outer: Run, mode: Mode, seed: int | None) -> Run:
    """A run whose seed, unless given, and whose time limit are those of the context around it."""
    if Mode.PLAIN != outer.mode != mode:
        raise RuntimeError("cudascope.observe() and cudascope.check() cannot be nested: use one after the other")
    around = outer if outer.mode == mode else None
    return Run(mode, outer.seed if seed is None else seed, Report(), time_limit=outer.time_limit, outer=around)


def _integer(name: str, value: object) -> int:
    """`value` as an int that the runtime's 64 bits hold. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} must be from 0 to 2**63 - 1, got {value}")
    return int(value)


def _seed(value: object) -> int | None:
    return None if value is None else _integer("a schedule, which is the seed of an order of threads,", value)


_LONGEST = 1e9  # seconds; the runtime counts ten times as many nanoseconds in 64 bits


def time_limit(seconds: float = 30.0) -> contextlib.AbstractContextManager[None]:
    """End a launch inside if no thread has ended or passed a barrier for `seconds`, or has ended for 10 × `seconds`.

    A barrier does not count in a loop of which every step begins in the same state, as in a poll.

    Raises:
        TypeError, ValueError: `seconds` is not a number of more than 0 and at most 1e9.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"seconds must be a number, got {seconds!r}")
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"seconds must be more than 0 and at most {_LONGEST:.0e}, got {seconds}")
    return _within(lambda outer: outer._replace(time_limit=float(seconds)))


def schedule(seed: int | None) -> contextlib.AbstractContextManager[None]:
    """Run the threads and the thread blocks of launches inside in the order that `seed` gives, None: in their own.

    Raises:
        TypeError, ValueError: `seed` is neither None nor an int from 0 to 2**63 - 1.
    """
    seed = _seed(seed)
    return _within(lambda outer: outer._replace(seed=seed))


def observe(*, schedule: int | None = None, trace_limit: int = 1_000_000) -> contextlib.AbstractContextManager[Report]:
    """Count what CPU launches inside do. Yields the Report; a launch's trace keeps its first `trace_limit` accesses.

    An `observe` inside another one chooses the order and the trace's limit, and both reports get its launches.

    Raises:
        TypeError, ValueError: `schedule` or `trace_limit` is not an int from 0 to 2**63 - 1.
        RuntimeError: it is inside of a `check`.
    """
    seed, trace_limit = _seed(schedule), _integer("trace_limit", trace_limit)
    return _within(lambda outer: _watch(outer, Mode.OBSERVE, seed)._replace(trace_limit=trace_limit))


def check(
    *,
    outputs: Sequence[object] = (),
    schedule: int | None = None,
    stop: bool = True,
    ignore: Sequence[str] = (),
    also: Sequence[str] = (),
) -> contextlib.AbstractContextManager[Report]:
    """Hold every access of CPU launches inside against the rules; the first that breaks one raises Finding.

    `outputs` are tensors that the launches inside write, all of them, or names of the parameters that get such tensors.
    Reading an element before a launch has written it is an error. If the check ends without a finding, an element that
    nobody has written is one.

    With `stop=False` a launch goes on: a bad access is dropped, and `report.findings` lists what was found, each pair
    of lines once. A hang or a fault ends the launch, as the last finding. `ignore` names rules, or families of rules,
    that shall find nothing, `also` those that are off unless asked for (cpu/rules.py).

    The kernel works on copies of its tensors, each with empty space round it. When a launch ends or fails, the changed
    elements are copied back. `report.unwritten(tensor)` lists the elements that were never written.

    A check inside another one chooses how its launches run: `schedule`, `stop` and `ignore`. The reports of both get
    these launches, without the findings that they ignore themselves, and the `outputs` of both hold.

    Raises:
        Finding: a launch inside, if `stop`.
        TypeError, ValueError: an argument is of the wrong kind, or names a rule that cannot be switched.
        RuntimeError: it is inside of an `observe`.

    The README says what a check cannot find.
    """
    seed, (arrays, names) = _seed(schedule), _outputs(outputs)
    ignored, off = _switched(_names("ignore", ignore), _names("also", also))
    if not isinstance(stop, bool | np.bool_):
        raise TypeError(f"stop must be True or False, got {stop!r}")
    options = {"outputs": arrays, "output_names": names, "stop": bool(stop), "ignored": ignored, "off": off}
    return _checked(lambda outer: _watch(outer, Mode.CHECK, seed)._replace(**options))


@contextlib.contextmanager
def _checked(inner: Callable[[Run], Run]) -> Iterator[Report]:
    """Check what is inside, and at the end that all outputs are written."""
    with _within(inner) as report:
        run = current_run.get()
        yield report
    if report.findings or not report.num_checked:
        return
    never = report.never_written(run.outputs, run.output_names)
    if never is None:
        return
    for each in run.watching:
        if NEVER_WRITTEN.name not in each.off:
            each.report.findings.append(never)
    if run.stop and report.findings:
        raise never


def _outputs(outputs: object) -> tuple[tuple[Array, ...], frozenset[str]]:
    """The arrays and the names in `outputs`."""
    if not isinstance(outputs, Iterable) or isinstance(outputs, str | Mapping) or hasattr(outputs, "__dlpack__"):
        raise TypeError(f"outputs must be a list of tensors or arrays, as in [out], got {type(outputs).__name__}")
    must, given = "outputs must be tensors or arrays", [*enumerate(outputs)]
    names = frozenset(output for _, output in given if isinstance(output, str))
    arrays = (array_of(output, f"outputs[{i}]", must=must) for i, output in given if not isinstance(output, str))
    return tuple(arrays), names


@functools.cache
def _switched(ignore: frozenset[str], also: frozenset[str]) -> tuple[int, frozenset[str]]:
    """What is not reported with `ignore` off and `also` on: findings of the runtime as bits, other rules."""
    off = {finding for finding, names in _NAMED.items() if names & ignore}
    off |= {finding for finding, names in _NAMED.items() if not RULES[finding].is_on and not names & also}
    names = {rule.name for rule in WITHOUT_THREAD if {rule.what, rule.name} & ignore}
    names |= {rule.name for rule in WITHOUT_THREAD if not rule.is_on and not {rule.what, rule.name} & also}
    return sum(1 << finding for finding in off), frozenset(names)


_NAMED = {finding: {rule.what, rule.name} for finding, rule in RULES.items() if not rule.ends}
_SWITCHABLE = sorted(set().union(*_NAMED.values(), *({rule.what, rule.name} for rule in WITHOUT_THREAD)))


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    """The names as a set. ValueError for one that no rule and no family has, or after which a launch cannot go on."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        example = names if isinstance(names, str) else "race"
        raise TypeError(f'{argument} must be a tuple of names, as in ("{example}",), got {names!r}')
    names = [*names]
    if unknown := [name for name in names if name not in _SWITCHABLE]:
        raise ValueError(f"{argument} must name what can be switched, {_SWITCHABLE}, got {unknown[0]!r}")
    return frozenset(names)
