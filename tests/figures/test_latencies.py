"""The latencies of engines over the rate of arrivals."""

import pytest

from pagewise.experiments.engine_arrivals import Objectives, Point
from pagewise.figures import latencies


def test_latencies_and_objectives_are_in_milliseconds(shown):
    points = [Point("naive", rate, [0.04, 0.04], [0.002], 3.0, 50.0) for rate in (1.0, 2.0)]
    latencies(points, Objectives(0.1, 0.01))
    first, gap, good = shown[0].axes
    for ax, latency, objective in ((first, 40, 100), (gap, 2, 10)):
        assert [*ax.lines[0].get_ydata()] == pytest.approx([latency] * 2)
        assert [*ax.lines[2].get_ydata()] == pytest.approx([objective] * 2)
        assert ax.get_ylabel().startswith("ms ")
    assert [*good.lines[0].get_ydata()] == [3.0, 3.0]
