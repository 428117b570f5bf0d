"""The benchmark of products with few rows: it compares before it times, and its records give inflection points."""

from functools import partial

import pytest
import torch
from in_process import InProcess

from pagewise.experiments import flat_gemm_speed, speed
from pagewise.experiments.flat_gemm_speed import (
    LLAMA_2_7B,
    METHODS,
    SHAPES,
    Shape,
    Trials,
    draw,
    recorded_inflections,
    recorded_times,
)
from pagewise.flash_decoding_plus_plus.dataflow import NUM_ROWS, PRODUCTS, product_for
from pagewise.tools.benchmark import Timing
from pagewise.tools.timing import Spread

records = partial(speed.records, Trials)
TINY = Shape(9, 32, 64)
CPU = torch.device("cpu")


@pytest.fixture
def trials(kernel_device):
    return Trials(kernel_device, {"repeats": 1, "warmup": 0})


@pytest.mark.slow
def test_every_method_is_right_and_timed(trials):
    assert set(METHODS) >= {"gemv", "flat_gemm", "matmul", "flat_gemm, 2 stages", "flat_gemm, 8 stages"}
    for method in METHODS:
        assert isinstance(trials(TINY, method), Timing), method


def test_a_wrong_method_is_not_timed(trials, monkeypatch):
    monkeypatch.setitem(METHODS, "flat_gemm", lambda x, w: 1.01 * (x @ w.T))
    assert trials(TINY, "flat_gemm").startswith("wrong: relative error 0.01")
    assert isinstance(trials(TINY, "matmul"), Timing)


def test_the_shapes_are_llamas_and_begin_with_those_that_have_targets():
    assert {(s.N, s.K) for s in SHAPES} == set(LLAMA_2_7B)
    assert {s.M for s in SHAPES} == set(NUM_ROWS)
    assert len(set(SHAPES)) == len(SHAPES)
    assert max(s.M for s in SHAPES[:16]) == 8
    assert Shape(2, 3, 5).flops == 60
    assert Shape(2, 3, 5).bytes(2) == 2 * (10 + 15 + 6)


@pytest.fixture
def planted(monkeypatch):
    """Known crossings: the product of the rule takes 1 s, every other 2 s."""

    class Planted(InProcess):
        def __init__(self, *_):
            pass

        def __call__(self, shape, method, *, limit):
            seconds = 1.0 if method == product_for(shape.M, 3, 17) else 2.0
            return Timing(Spread(seconds, seconds, seconds), "planted")

    monkeypatch.setattr(speed, "Worker", Planted)


def test_records_give_inflection_points(planted):
    shapes = [Shape(M, N, 8) for M in NUM_ROWS for N in (16, 24)]
    found = list(records(shapes, device=CPU, rate=1e9))
    assert len(found) == len(shapes) * len(METHODS)
    assert found[0].fraction == pytest.approx(shapes[0].bytes(2) / 1e9)
    device = found[0].device
    assert recorded_inflections(found) == {device: {(16, 8): (3, 17), (24, 8): (3, 17)}}
    times = recorded_times(found)[device][16, 8]
    assert set(times) == set(PRODUCTS)
    assert times["gemv"] == {M: 1.0 if M < 3 else 2.0 for M in NUM_ROWS}


def test_a_shape_without_matmul_has_no_inflection_points(planted):
    found = list(records([Shape(1, 16, 8)], device=CPU))
    refused = [r._replace(seconds=None, spread=None, refused="no") if r.what == "matmul" else r for r in found]
    assert recorded_inflections(refused) == {found[0].device: {}}
    assert recorded_inflections([]) == {}


def test_times_can_be_drawn(planted, shown):
    found = list(records([Shape(M, 16, 8) for M in NUM_ROWS], device=CPU))
    (times,) = recorded_times(found)[found[0].device].values()
    del times["gemv"][64]  # too slow to be timed
    draw(times, title="weights [16, 8]", caption="planted")
    (ax,) = shown[0].axes
    assert ax.get_title(loc="left") == "weights [16, 8]: M1 = 3, M2 = 17"
    assert set(ax.get_legend_handles_labels()[1]) == set(PRODUCTS)
    assert sorted(line.get_xdata()[0] for line in ax.lines[3:]) == [3, 17]


def test_the_command_prints_tables_and_inflection_points(planted, monkeypatch, capsys):
    monkeypatch.setattr(speed, "best_device", lambda: CPU)
    monkeypatch.setattr(Trials, "smallest", [Shape(M, 16, 8) for M in NUM_ROWS])
    monkeypatch.setattr("sys.argv", ["flat_gemm_speed"])
    flat_gemm_speed.main()
    out = capsys.readouterr().out
    assert "these times say nothing about a GPU" in out
    assert out.count("\nflat_gemm, 4 stages ") == len(NUM_ROWS)
    assert out.endswith("weights [16, 8]: M1 = 3, M2 = 17\n")
