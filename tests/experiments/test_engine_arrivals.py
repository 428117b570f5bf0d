"""Requests that arrive over time: the arrivals, the times of their tokens, and the summary."""

import itertools
import statistics

import pytest
import torch
from serving import serving

from pagewise.engine import LLM, SamplingParams
from pagewise.experiments.engine_arrivals import (
    Arrival,
    Objectives,
    Point,
    Served,
    calibrated,
    main,
    poisson_arrivals,
    serve_arrivals,
    serve_over_http,
    sweep,
)
from pagewise.models.load import TINY

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def test_arrivals_are_a_poisson_process():
    """Gaps have mean and standard deviation 1 / rate, and a seed decides them."""
    prompts, sampling = [[1]] * 4000, [GREEDY] * 4000
    arrivals = poisson_arrivals(5.0, prompts, sampling, seed=1)
    times = [0.0, *(arrival.seconds for arrival in arrivals)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    assert arrivals == poisson_arrivals(5.0, prompts, sampling, seed=1)
    assert arrivals[0] != poisson_arrivals(5.0, prompts, sampling, seed=2)[0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_above_0(rate):
    with pytest.raises(ValueError, match=r"rate = .* must be above 0"):
        poisson_arrivals(rate, [[1]], [GREEDY], seed=0)


def some_arrivals():
    sampling = [SamplingParams(max_tokens=3 + i, temperature=0.0, ignore_eos=True) for i in range(4)]
    return [Arrival(0.05 * i, list(range(1, 9 + 4 * i)), sampling[i]) for i in range(4)]


def check(served):
    for i, one in enumerate(served):
        assert one.arrival == pytest.approx(0.05 * i)
        assert one.first_token > 0
        assert one.tokens == sorted(one.tokens)
        assert len(one.gaps) == len(one.tokens) - 1


@pytest.mark.parametrize("scheduler", ["naive", "static", "continuous"])
def test_no_request_is_served_before_it_arrives_and_all_are_served(scheduler):
    served = serve_arrivals(LLM(TINY, num_blocks=64, scheduler=scheduler), some_arrivals())
    check(served)
    assert [len(one.tokens) for one in served] == [3, 4, 5, 6]


def test_a_server_is_measured_by_its_client():
    with serving(LLM(TINY, num_blocks=64)) as server:
        check(serve_over_http(server.url, some_arrivals()))
        with pytest.raises(RuntimeError, match=r"the server answered 400: .*maximum context length"):
            serve_over_http(server.url, [Arrival(0.0, [1], SamplingParams(max_tokens=10**6))])


def test_goodput_counts_requests_that_meet_both_objectives():
    runs = [[Served(0.0, [0.1, 0.2, 0.3]), Served(1.0, [1.5, 1.6]), Served(1.0, [1.1, 2.0])], [Served(0.0, [0.1])]]
    point = Point.of("ours", 2.0, runs, Objectives(first_token=0.2, gap=0.5))
    assert point.goodput == pytest.approx(2 / 2.1)  # late first, and long gap; the two runs took 2.0 and 0.1 seconds
    assert point.tokens_per_second == pytest.approx(8 / 2.1)
    assert point.first_token == pytest.approx([0.1, 0.5, 0.1, 0.1])
    assert point.percentiles("gaps")[0] == pytest.approx(0.1)


def test_servers_take_turns_on_the_same_arrivals():
    turns = []

    def server(name):
        def serve(arrivals):
            turns.append((name, [arrival.seconds for arrival in arrivals]))
            return [Served(arrival.seconds, [arrival.seconds + 1]) for arrival in arrivals]

        return serve

    def draw(run):
        return [[run]] * 3, [GREEDY] * 3

    points = sweep({"a": server("a"), "b": server("b")}, [1.0, 2.0], draw, Objectives(2.0, 1.0), repeats=2)
    assert [name for name, _ in turns] == ["a", "b"] * 4
    assert turns[0][1] == turns[1][1] != turns[2][1]
    assert [(point.engine, point.rate, len(point.first_token)) for point in points] == [
        ("a", 1.0, 6), ("b", 1.0, 6), ("a", 2.0, 6), ("b", 2.0, 6)
    ]  # fmt: skip


def test_objectives_come_from_requests_that_are_served_alone():
    def serve(arrivals):  # a token each 0.1 s; requests wait for each other
        return [Served(0.0, [i + 0.3, i + 0.4]) for i in range(len(arrivals))]

    rate, objectives = calibrated(serve, [[1]] * 5, [GREEDY] * 5)
    assert rate == pytest.approx(5 / 4.4)
    assert objectives == pytest.approx((3.0, 1.0))


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws_a_plot(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = ["--requests", "3", "--prompt-tokens", "16", "--new-tokens", "8", "--rates", "40", "80"]
    main([*sizes, "--plot", str(tmp_path / "arrivals.png")])
    out = capsys.readouterr().out
    assert out.count("continuous, chunked") == 2
    assert "All at once: " in out
    assert (tmp_path / "arrivals.png").stat().st_size > 10_000
