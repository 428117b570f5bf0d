"""The benchmark of products with few rows, and its inflection points. `test_every_experiment` has the common rules."""

import pytest
from in_process import planted, records, run_on_a_cpu

from pagewise.experiments import flat_gemm_speed
from pagewise.experiments.flat_gemm_speed import METHODS, SHAPES, Shape, Trials, draw, recorded_inflections
from pagewise.flash_decoding_plus_plus.dataflow import NUM_ROWS, PRODUCTS, product_for

# Known crossings: the product of the rule takes 1 s, every other 2 s.
PLANTED = planted(Trials, lambda shape, method: 1.0 if method == product_for(shape.M, 3, 17) else 2.0)


def test_the_shapes_are_llamas_and_begin_with_those_that_have_targets():
    assert {(s.N, s.K) for s in SHAPES} == set(flat_gemm_speed.LLAMA_2_7B)
    assert {s.M for s in SHAPES} == set(NUM_ROWS)
    assert len(set(SHAPES)) == len(SHAPES)
    assert max(s.M for s in SHAPES[:16]) == 8
    assert Shape(2, 3, 5).flops == 60
    assert Shape(2, 3, 5).bytes(2) == 2 * (10 + 15 + 6)


def test_records_give_inflection_points():
    shapes = [Shape(M, N, 8) for M in NUM_ROWS for N in (16, 24)]
    found = records(PLANTED, shapes, rate=1e9)
    assert len(found) == len(shapes) * len(METHODS)
    assert found[0].fraction == pytest.approx(shapes[0].bytes(2) / 1e9)
    device = found[0].device
    assert recorded_inflections(found) == {device: {(16, 8): (3, 17), (24, 8): (3, 17)}}
    times = flat_gemm_speed.recorded_times(found)[device][16, 8]
    assert set(times) == set(PRODUCTS)
    assert times["gemv"] == {M: 1.0 if M < 3 else 2.0 for M in NUM_ROWS}


def test_a_shape_without_matmul_has_no_inflection_points():
    found = records(PLANTED, [Shape(1, 16, 8)])
    refused = [r._replace(seconds=None, spread=None, refused="no") if r.what == "matmul" else r for r in found]
    assert recorded_inflections(refused) == {found[0].device: {}}
    assert recorded_inflections([]) == {}


def test_times_can_be_drawn(shown):
    found = records(PLANTED, [Shape(M, 16, 8) for M in NUM_ROWS])
    (times,) = flat_gemm_speed.recorded_times(found)[found[0].device].values()
    del times["gemv"][64]  # too slow to be timed
    draw(times, title="weights [16, 8]", caption="planted")
    (ax,) = shown[0].axes
    assert ax.get_title(loc="left") == "weights [16, 8]: M1 = 3, M2 = 17"
    assert set(ax.get_legend_handles_labels()[1]) == set(PRODUCTS)
    assert sorted(line.get_xdata()[0] for line in ax.lines[3:]) == [3, 17]


def test_the_command_prints_inflection_points_after_its_tables(monkeypatch, capsys):
    monkeypatch.setattr(flat_gemm_speed, "Trials", PLANTED)
    monkeypatch.setattr(PLANTED, "smallest", [Shape(M, 16, 8) for M in NUM_ROWS])
    run_on_a_cpu(flat_gemm_speed.main)
    assert capsys.readouterr().out.endswith("weights [16, 8]: M1 = 3, M2 = 17\n")
