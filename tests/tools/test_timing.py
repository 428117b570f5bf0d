"""Timing, on a clock that only the measured functions move, and on a GPU that only exists here."""

import pytest
import torch

from pagewise.tools import timing
from pagewise.tools.timing import ColdTimer, Spread, compare, copy_bandwidth, in_turns, matmul_rate, measure


class Clock:
    """Time passes only in the functions it makes: call number i of one takes seconds[i]."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def takes(self, name, seconds):
        remaining = iter(seconds)

        def function():
            self.calls.append(name)
            self.now += next(remaining)

        return function


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    return Clock(monkeypatch)


# ------------------------------------------------------------------------------------------------ measure


def test_functions_are_timed_in_turns(clock):
    measure({n: clock.takes(n, [1.0] * 5) for n in "abc"}, repeats=3, warmup=2)
    assert "".join(clock.calls) == "aabbcc" + "abc" * 3


def test_results_are_medians_in_the_order_of_the_functions(clock):
    functions = {"steady": clock.takes("steady", [2.0] * 3), "disturbed": clock.takes("disturbed", [1.0, 100.0, 3.0])}
    assert list(measure(functions, repeats=3, warmup=0).items()) == [("steady", 2.0), ("disturbed", 3.0)]


@pytest.mark.parametrize("cold", [False, True])
def test_warmup_is_not_timed_and_cold_is_for_a_gpu_alone(cold, clock):
    assert measure({"a": clock.takes("a", [50.0, 60.0, 1.0])}, repeats=1, warmup=2, cold=cold) == {"a": 1.0}


def test_gpu_is_waited_for_before_and_after_each_timed_call(clock, monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: clock.calls.append("wait"))
    measure({"a": clock.takes("a", [1.0] * 2)}, repeats=2, warmup=0)
    assert clock.calls == ["wait", "a", "wait"] * 2


def test_rounds_go_on_until_the_seconds_have_passed(clock):
    taken = in_turns({"a": clock.takes("a", [0.5] * 9)}, timing.host_seconds, repeats=2, warmup=0, seconds=3.0)
    assert taken == {"a": [0.5] * 6}


def test_a_test_of_the_lessons_takes_one_round(clock, monkeypatch):
    monkeypatch.setenv("PAGEWISE_ROUNDS", "1")
    assert in_turns({"a": clock.takes("a", [0.5] * 9)}, timing.host_seconds, seconds=3.0) == {"a": [0.5]}
    ratios = compare({"a": clock.takes("a", [1.0] * 9), "b": clock.takes("b", [2.0] * 9)})
    assert ratios["b"] == Spread(2.0, 2.0, 2.0)


def test_the_environment_does_not_raise_the_number_of_rounds(clock, monkeypatch):
    for most in ("3", "0", ""):
        monkeypatch.setenv("PAGEWISE_ROUNDS", most)
        taken = in_turns({"a": clock.takes("a", [0.5] * 4)}, timing.host_seconds, repeats=2)
        assert taken == {"a": [0.5] * 2}


# ------------------------------------------------------------------------------------------------ compare


def test_a_ratio_is_the_median_of_neighbours_so_a_slow_spell_does_no_harm(clock):
    slow_spell = [1.0, 7.0, 7.0, 7.0, 1.0]  # of the machine: it meets both
    functions = {
        "a": clock.takes("a", [t for t in slow_spell for _ in range(4)]),
        "b": clock.takes("b", [3 * t for t in slow_spell for _ in range(2)]),
    }
    found = compare(functions, seconds=0.0, repeats=5, warmup=0)
    assert found == {"a": Spread(1, 1, 1), "b": Spread(3, 3, 3), "a, again": Spread(1, 1, 1)}


def test_each_timed_call_follows_one_of_the_same_function(clock):
    functions = {"a": clock.takes("a", [9.0, 1.0] * 4), "b": clock.takes("b", [9.0, 2.0] * 2)}
    assert compare(functions, seconds=0.0, repeats=2, warmup=0)["b"] == Spread(2, 2, 2)
    assert "".join(clock.calls) == "aabbaa" * 2


def test_a_spread_is_the_median_and_the_quartiles():
    assert Spread.of([4.0, 0.0, 3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)


def test_core_time_has_no_waiting_in_it():
    assert (
        timing.cpu_seconds(lambda: timing.time.sleep(0.2)) < 0.1 < timing.host_seconds(lambda: timing.time.sleep(0.2))
    )


# ------------------------------------------------------------------------------------------------ on a GPU


class Gpu:
    """A stream that works off what was queued, beside a host whose own time each call costs; both in seconds."""

    CLOCK = 1e9  # cycles a second

    def __init__(self, monkeypatch):
        self.host = self.done = 0.0
        self.log, gpu = [], self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                gpu.log.append("event")
                self.at = gpu.queue(0.0)

            def query(self):
                return self.at <= gpu.host

            def synchronize(self):
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, end):
                return 1e3 * (end.at - self.at)

        properties = type("Properties", (), {"L2_cache_size": 2**20})
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        self.timer = ColdTimer(torch.device("cpu"))
        self.timer._written = Buffer(self, zero_="write")
        self.timer._read = Buffer(self, max="read")

    def queue(self, seconds):
        """When work that is queued now will be done."""
        self.done = max(self.done, self.host) + seconds
        return self.done

    def sleep(self, cycles):
        self.log.append("sleep")
        self.queue(cycles / self.CLOCK)

    def kernel(self, seconds, *, host=0.0, waits=False):
        def launch():
            self.log.append("kernel")
            self.host += host
            self.queue(seconds)
            if waits:
                self.host = self.done

        return launch


class Buffer:
    """Notes in the log how it is used; nothing else may be done with it."""

    def __init__(self, gpu, **names):
        for method, name in names.items():
            setattr(self, method, lambda name=name: gpu.log.append(name) or gpu.queue(1e-4))


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_the_cache_is_emptied_and_cleaned_before_the_gpu_sleeps(gpu):
    gpu.timer(gpu.kernel(1e-5))
    assert gpu.log == ["write", "read", "sleep", "event", "kernel", "event"]


@pytest.mark.parametrize(("host", "launches"), [(5e-4, 1), (9e-3, 3)])
def test_what_launching_costs_on_the_host_is_hidden_by_a_sleep_that_is_long_enough(host, launches, gpu):
    assert gpu.timer(gpu.kernel(1e-5, host=host)) == pytest.approx(1e-5)
    assert gpu.timer.hidden
    assert gpu.log.count("kernel") == launches


def test_a_call_that_waits_for_the_gpu_is_timed_and_said_not_to_be_hidden(gpu):
    assert gpu.timer(gpu.kernel(1e-5, waits=True)) == pytest.approx(1e-5)
    assert not gpu.timer.hidden
    gpu.timer(gpu.kernel(1e-5))
    assert not gpu.timer.hidden  # of all calls so far


def test_the_buffers_are_larger_than_the_cache(monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 2**25})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    timer = ColdTimer(torch.device("cpu"))
    assert timer._written.nbytes == timer._read.nbytes == 4 * 2**25
    assert timer._written.data_ptr() != timer._read.data_ptr()


# ------------------------------------------------------------------------------------------------ what can be reached


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda functions, cold: {name: 0.5 for name in functions if cold})
    assert copy_bandwidth(torch.device("cpu"), 1000) == 2 * 1000 / 0.5
    assert matmul_rate(torch.device("cpu"), torch.float32, 16) == 2 * 16**3 / 0.5


def test_rates_are_measured(device):
    assert copy_bandwidth(device, 2**20) > 0
    assert matmul_rate(device, torch.float32, 64) > 0
