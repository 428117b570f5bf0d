"""The figure of `report.limits`: a bar for each unit and GPU, and none where a unit has no time."""

import math

import drawn
import pytest

from cudascope.watch.least_time import Limits
from pagewise.figures import unit_times


def limits(gpu, **seconds):
    return Limits("kernel", gpu, seconds, dict.fromkeys(seconds, ""), {}, None)


def test_each_unit_has_a_bar_for_each_gpu_in_microseconds(shown):
    unit_times([limits("A100", DRAM=2e-6, L2=1e-6), limits("H100", DRAM=1e-6)], title="What limits the copy?")
    (ax,) = shown[0].axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["DRAM", "L2"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["A100", "H100"]
    widths = [patch.get_width() for patch in ax.patches]
    assert widths[:3] == pytest.approx([2, 1, 1])
    assert math.isnan(widths[3])
    assert "nan" not in drawn.texts(ax)
