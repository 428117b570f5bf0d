"""The figure of a launch's levels shows the numbers that it was given."""

import drawn
import pytest

from pagewise.figures import nested_levels


def test_every_level_is_a_strip_with_its_marked_cell(shown):
    nested_levels([("grid", 3, 2), ("warps", 4, 0)], title="What?")
    (ax,) = shown[0].axes
    cells = [text for text in drawn.texts(ax) if text]
    assert cells == ["grid", "0", "1", "2", "warps", "0", "1", "2", "3"]
    marked = [patch.get_x() for patch in ax.patches if patch.get_facecolor()[:3] != (1, 1, 1)]
    assert marked == pytest.approx([20 / 3, 0])
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([20 / 3, 10])  # the cell below is enlarged
