"""Results are checked before they are timed, failures become rows, and a planted slowdown is measured."""

import math

import pytest
import torch

from pagewise.tools import benchmark
from pagewise.tools.benchmark import Timing, ratios, relative_error, trial
from pagewise.tools.timing import ColdTimer, Spread

EXACT = torch.tensor([[3.0, 4.0], [0.03, 0.04]])


def steps(count):
    """A call that takes a time in proportion to `count`, and little memory."""

    def run():
        for _ in range(count):
            pass

    return run


# ------------------------------------------------------------------------------------------------ ratios


@pytest.mark.slow
def test_a_slowdown_of_two_is_reported_as_two_within_a_tenth():
    found = ratios({"once": steps(5_000), "twice": steps(10_000)}, seconds=2.0)
    assert found["twice"].median == pytest.approx(2.0, rel=0.1)
    assert found["once, again"].median == pytest.approx(1.0, rel=0.1)


def test_ratios_leave_out_what_is_wrong_and_say_why():
    def raising():
        raise RuntimeError("planted\nand more")

    right = {"first": EXACT.clone, "also right": EXACT.clone}
    found = ratios({**right, "wrong": lambda: EXACT * 1.5, "raising": raising}, EXACT, seconds=0.0, repeats=2)
    assert {name for name, ratio in found.items() if isinstance(ratio, Spread)} == {*right, "first, again"}
    assert found["wrong"] == "wrong: relative error 0.5, allowed 0.0001"
    assert found["raising"] == "RuntimeError: planted"


def test_nothing_is_compared_with_a_wrong_first():
    found = ratios({"first": EXACT.neg, "second": EXACT.clone}, EXACT)
    assert found == {"first": "wrong: relative error 2, allowed 0.0001", "second": "not compared: first failed"}


# ------------------------------------------------------------------------------------------------ one candidate


def fake_timer(seconds):
    """Calls the function, and says that it took the next of these."""
    taken = iter(seconds)

    def timer(function):
        function()
        return next(taken)

    return timer


def test_a_trial_gives_median_quartiles_and_conditions():
    found = trial([EXACT.clone], [EXACT], timer=fake_timer([5.0, 1.0, 2.0, 3.0, 4.0]), repeats=5)
    assert found == Timing(Spread(3.0, 2.0, 4.0), "host clock, launch included, 5 calls, inputs in rotation: 1")


def test_every_input_is_checked_and_then_called_in_rotation():
    calls = []
    runs = [lambda i=i: calls.append(i) or EXACT for i in range(3)]
    assert isinstance(trial(runs, [EXACT] * 3, repeats=4, warmup=2), Timing)
    assert calls == [0, 1, 2, *[0, 1], *[2, 0, 1, 2]]


def test_a_wrong_result_on_any_input_is_not_timed():
    timed = []
    found = trial([EXACT.clone, lambda: EXACT * 1.01], [EXACT, EXACT], timer=timed.append)
    assert found == "wrong: relative error 0.01, allowed 0.0001"
    assert not timed


@pytest.mark.parametrize("error", [ValueError, RuntimeError, AssertionError, NotImplementedError, KeyError])
@pytest.mark.parametrize("good_calls", [0, 5])
def test_whatever_a_candidate_raises_when_it_is_checked_or_timed_is_its_row(error, good_calls):
    calls = iter([EXACT] * good_calls)

    def breaks():
        for out in calls:
            return out
        raise error("planted")

    assert trial([breaks], [EXACT], repeats=7).startswith(f"{error.__name__}: ")


@pytest.mark.parametrize(("hidden", "launch"), [(True, "launch hidden"), (False, "launch included")])
def test_a_trial_says_whether_launching_was_hidden(hidden, launch):
    class Timer(ColdTimer):
        def __init__(self):
            self.hidden = hidden

        def __call__(self, function):
            return 1.0

    assert trial([EXACT.clone], [EXACT], timer=Timer()).how.startswith(f"cold L2, {launch}, ")


# ------------------------------------------------------------------------------------------------ relative error


def test_error_is_relative_to_each_row():
    assert relative_error(EXACT * 1.25, EXACT) == pytest.approx(0.25)
    small_row_wrong = EXACT + torch.tensor([[0.0, 0.0], [0.05, 0.0]])
    assert relative_error(small_row_wrong, EXACT) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_allowed_and_zeros_are_not(dtype):
    assert benchmark.fault(lambda: EXACT.double().to(dtype), EXACT.double().to(dtype).double()) is None
    assert "wrong" in benchmark.fault(lambda: torch.zeros_like(EXACT, dtype=dtype), EXACT)


def test_nan_is_an_infinite_error_and_a_row_of_zeros_can_be_right():
    assert relative_error(EXACT * math.nan, EXACT) == math.inf
    assert relative_error(EXACT / 0, EXACT) == math.inf
    assert relative_error(torch.zeros(1, 2), torch.zeros(1, 2)) == 0
    assert relative_error(torch.ones(1, 2), torch.zeros(1, 2)) > 1
    assert relative_error(torch.zeros(0, 2), torch.zeros(0, 2)) == 0


def test_another_shape_is_a_row():
    assert "shape [1, 2]" in trial([lambda: EXACT[:1]], [EXACT])
