"""Timing, on a clock that only the measured functions move."""

import pytest

from pagewise.tools import benchmark
from pagewise.tools.benchmark import measure


class Clock:
    """Time passes only in the functions it makes: call number i of one takes seconds[i]."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(benchmark.time, "perf_counter", lambda: self.now)

    def takes(self, name, seconds):
        remaining = iter(seconds)

        def function():
            self.calls.append(name)
            self.now += next(remaining)

        return function


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_each_function_is_called_warmup_and_repeats_times(clock):
    measure({n: clock.takes(n, [1.0] * 5) for n in "ab"}, repeats=3, warmup=2)
    assert [clock.calls.count(n) for n in "ab"] == [5, 5]


def test_functions_are_timed_in_turns(clock):
    measure({n: clock.takes(n, [1.0] * 4) for n in "abc"}, repeats=3, warmup=1)
    assert "".join(clock.calls) == "abc" + "abc" * 3


def test_result_is_the_median_of_each_function(clock):
    functions = {"steady": clock.takes("steady", [2.0] * 3), "disturbed": clock.takes("disturbed", [1.0, 100.0, 3.0])}
    assert measure(functions, repeats=3, warmup=0) == {"steady": 2.0, "disturbed": 3.0}


def test_warmup_is_not_timed(clock):
    assert measure({"a": clock.takes("a", [50.0, 60.0, 1.0])}, repeats=1, warmup=2) == {"a": 1.0}


def test_results_come_in_the_order_of_the_functions(clock):
    assert list(measure({n: clock.takes(n, [1.0] * 9) for n in "zab"})) == ["z", "a", "b"]


def test_gpu_is_waited_for_before_and_after_each_timed_call(clock, monkeypatch):
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark.torch.cuda, "synchronize", lambda: clock.calls.append("wait"))
    measure({"a": clock.takes("a", [1.0] * 2)}, repeats=2, warmup=0)
    assert clock.calls == ["wait", "a", "wait"] * 2


def test_cold_is_for_a_gpu_alone(clock):
    assert measure({"a": clock.takes("a", [1.0] * 3)}, repeats=2, warmup=1, cold=True) == {"a": 1.0}
