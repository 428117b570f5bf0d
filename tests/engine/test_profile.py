"""Spans have the right parents, steps and times, and cost nothing while no profile runs."""

import gzip
import json
import time
from contextlib import nullcontext

import pytest
import torch

from pagewise.engine import LLM, SamplingParams
from pagewise.engine import profile as profile_module
from pagewise.engine.profile import Profile, Span, Total
from pagewise.models import tiny_model


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that shows clock[0] seconds."""
    now = [100.0]
    monkeypatch.setattr(profile_module.time, "perf_counter", lambda: now[0])
    return now


def passes(clock, seconds):
    clock[0] += seconds


def two_steps(clock):
    """A prefill takes 1 + 2 + 1 seconds, with the attention of two layers. Then a decode step takes 5 seconds."""
    with Profile.span("step"):
        passes(clock, 1)
        with Profile.span("prefill"):
            for _ in range(2):
                with Profile.span("attention"):
                    passes(clock, 0.75)
            passes(clock, 0.5)
        with Profile.span("sampling"):
            passes(clock, 1)
    passes(clock, 10)  # between steps: nobody's
    with Profile.span("step"), Profile.span("decode"):
        passes(clock, 5)


def test_spans_lie_inside_one_another_in_the_order_in_which_they_began(clock):
    with Profile() as profile:
        passes(clock, 3)
        two_steps(clock)
    assert profile.spans == [
        Span("step", 3.0, 4.0, 0, 0),
        Span("prefill", 4.0, 2.0, 1, 0),
        Span("attention", 4.0, 0.75, 2, 0),
        Span("attention", 4.75, 0.75, 2, 0),
        Span("sampling", 6.0, 1.0, 1, 0),
        Span("step", 17.0, 5.0, 0, 1),
        Span("decode", 17.0, 5.0, 1, 1),
    ]


def test_own_seconds_add_up_to_the_steps(clock):
    with Profile() as profile:
        two_steps(clock)
    totals = profile.by_name()
    assert totals == {
        "step": Total(2, 9.0, 1.0),
        "prefill": Total(1, 2.0, 0.5),
        "attention": Total(2, 1.5, 1.5),
        "sampling": Total(1, 1.0, 1.0),
        "decode": Total(1, 5.0, 5.0),
    }
    assert sum(total.own for total in totals.values()) == totals["step"].seconds


def test_a_name_inside_itself_keeps_its_own_seconds_right(clock):
    with Profile() as profile, Profile.span("a"):
        passes(clock, 1)
        with Profile.span("a"):
            passes(clock, 2)
    assert profile.by_name()["a"].own == 3.0


def test_without_a_profile_nothing_is_marked(clock):
    with Profile() as profile:
        pass
    two_steps(clock)
    assert profile.spans == []
    assert Profile.span is nullcontext


def test_an_exception_ends_its_spans_and_leaves_the_next_ones_where_they_belong(clock):
    def fails():
        with Profile.span("step"), Profile.span("prefill"):
            passes(clock, 1)
            raise ZeroDivisionError

    with Profile() as profile:
        with pytest.raises(ZeroDivisionError):
            fails()
        with Profile.span("step"):
            passes(clock, 2)
    assert [(s.name, s.seconds, s.depth, s.step) for s in profile.spans] == [
        ("step", 1.0, 0, 0), ("prefill", 1.0, 1, 0), ("step", 2.0, 0, 1),
    ]  # fmt: skip


def test_one_profile_at_a_time():
    with Profile(), pytest.raises(RuntimeError, match="a profile is running already"), Profile():
        pass
    with Profile() as profile, Profile.span("step"):  # and the first has ended
        pass
    assert len(profile.spans) == 1


def test_torchs_trace_has_the_spans_among_the_operations(tmp_path):
    with torch.profiler.profile() as trace, Profile() as profile, Profile.span("step"), Profile.span("attention"):
        torch.ones(3, 3) @ torch.ones(3, 3)
        time.sleep(0.002)
    trace.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = {e["name"]: e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"}
    attention, product = events["attention"], events["aten::mm"]
    assert attention["ts"] <= product["ts"] <= attention["ts"] + attention["dur"]
    assert attention["dur"] == pytest.approx(1e6 * profile.by_name()["attention"].seconds, rel=0.5)


# ------------------------------------------------------------------------------------------------ of an engine


def spans_by_step(attention):
    """Return [{name: (count, names of the parent spans)}] of two requests of 5 tokens, each with 3 new tokens."""
    model, _ = tiny_model(device="cpu")
    llm = LLM(model, num_blocks=4, attention=attention)
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with llm.profile() as profile:
        llm.generate([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], greedy)
    steps, enclosing = [], []
    for one in profile.spans:
        enclosing[one.depth :] = [one.name]
        if one.depth == 0:
            steps.append({})
        count, _ = steps[one.step].get(one.name, (0, ()))
        steps[one.step][one.name] = (count + 1, tuple(enclosing[:-1]))
    return steps


@pytest.mark.parametrize("attention", ["paged", "dense"])
def test_an_engine_says_what_each_step_does(attention):
    steps = spans_by_step(attention)
    assert len(steps) == 3
    for number, found in enumerate(steps):
        kind = "decode" if number else "prefill"
        model = ("step", kind, "model")
        assert found["step"] == (1, ())
        assert found["schedule"] == found["sampling"] == found[kind] == (1, ("step",))
        assert found["model"] == (1, ("step", kind))
        assert found["cache write"] == (4, model)  # once per layer
        if attention == "paged":
            assert found["attention"] == (4, model)
            assert found["build batch"] == (1, ("step",))
            assert "block tables" in found
        else:  # prompts are attended to one by one, decoding sequences as a batch that each layer copies together
            assert found["attention"] == ((4, model) if number else (2 * 4, model))
            assert found["build batch"] == ((1 + 4, model) if number else (1, ("step",)))
            assert "block tables" not in found


def test_profiling_changes_no_token():
    model, _ = tiny_model(device="cpu")
    llm = LLM(model, num_blocks=4)
    sampling = SamplingParams(max_tokens=4, seed=3)
    (alone,) = llm.generate([[1, 2, 3]], sampling)
    with llm.profile():
        (profiled,) = llm.generate([[1, 2, 3]], sampling)
    assert alone.token_ids == profiled.token_ids
