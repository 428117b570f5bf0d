"""The pytest plugin `cudascope`: tests whose kernels are checked, or observed, on the CPU. README.md has an example.

A test marked with `@pytest.mark.cudascope(schedules=3)` runs three times: in the threads' own order, with seed 0 and
with seed 1. It fails if `cudascope.check` finds something in a launch of the test function; fixtures are not checked.
`ignore` and `also` name rules, as for `check`, and `outputs` the parameters whose tensors the kernels write. A launch
continues after a finding where it can, so the failure lists all findings. The fixture `cudascope_observe` is a Report
of the launches so far.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import pytest

from cudascope.watch.contexts import check, observe
from cudascope.watch.report import Report

_SCHEDULE = "cudascope_schedule"  # the parameter that a marked test gets


class _Options(NamedTuple):
    """What a marker says."""

    schedules: int = 3
    ignore: Sequence[str] = ()
    also: Sequence[str] = ()
    outputs: Sequence[str] = ()  # names of parameters


def _options(marker: pytest.Mark) -> _Options:
    """The options of a marker. Raises TypeError or ValueError."""
    if unknown := [name for name in marker.kwargs if name not in _Options._fields]:
        raise TypeError(f"its options are {', '.join(_Options._fields)}, got {unknown[0]!r}")
    options = _Options(*marker.args, **marker.kwargs)
    if type(options.schedules) is not int or options.schedules < 1:
        raise ValueError(f"schedules must be an integer of at least 1, got {options.schedules!r}")
    names = options.outputs
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f'outputs must be a tuple of names of parameters, as in ("out",), got {names!r}')
    return options


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    about = "check every kernel launch of the test on the CPU, in as many orders of threads as schedules says"
    config.addinivalue_line("markers", f"cudascope(schedules=3, ignore=(), also=(), outputs=()): {about}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a marked test once per schedule. A test with a wrong marker runs once, and fails."""
    marker = metafunc.definition.get_closest_marker("cudascope")
    if marker is None:
        return
    try:
        schedules = _options(marker).schedules
    except (TypeError, ValueError):
        schedules = 1
    metafunc.fixturenames.append(_SCHEDULE)
    seeds = range(schedules - 1)
    metafunc.parametrize(_SCHEDULE, [None, *seeds], ids=["in_order", *(f"seed{seed}" for seed in seeds)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Check the launches of a marked test, and fail the test if there are findings."""
    marker = item.get_closest_marker("cudascope")
    if marker is None:
        return (yield)
    try:
        options = _options(marker)
    except (TypeError, ValueError) as error:
        pytest.fail(f"marker cudascope: {error}", pytrace=False)
    if not hasattr(item, "callspec"):
        raise TypeError("the marker cudascope needs a test function: pytest runs this test once only")
    seed = item.callspec.params[_SCHEDULE]
    rules = {"ignore": options.ignore, "also": options.also}
    with check(outputs=options.outputs, schedule=seed, stop=False, **rules) as report:
        try:
            result = yield
        except Exception as error:
            if report.findings:
                error.add_note(f"cudascope found in this test:\n{report}")
            raise
    if report.findings:
        pytest.fail(f"cudascope found:\n{report}", pytrace=False)
    if not report.num_checked:
        item.warn(pytest.PytestWarning("the marker cudascope checked nothing: the test launched no kernel on the CPU"))
    return result


@pytest.fixture
def cudascope_observe() -> Iterator[Report]:
    """Observe the CPU launches of a test: a `Report` with their counts and traces."""
    with observe() as report:
        yield report
