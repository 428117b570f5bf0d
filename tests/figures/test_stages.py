"""Figures of a kernel's levels and stages show the numbers that they were given."""

import drawn
import pytest

from pagewise.figures import kept_between_reads, memory_flow, nested_levels


def test_every_level_is_a_strip_with_its_marked_cell(shown):
    nested_levels([("grid", 3, 2), ("warps", 4, 0)], title="What?")
    (ax,) = shown[0].axes
    cells = [text for text in drawn.texts(ax) if text]
    assert cells == ["0", "1", "2", "0", "1", "2", "3", "grid", "warps"]
    marked = [patch.get_x() for patch in ax.patches if patch.get_facecolor()[:3] != (1, 1, 1)]
    assert marked == pytest.approx([20 / 3, 0])
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([20 / 3, 10])  # the cell below is enlarged


def test_arrows_point_the_way_the_bytes_go_and_both_ways_do_not_cover_each_other(shown):
    memory_flow({"load": {("read", "global"): 64, ("write", "shared"): 32}, "use": {("read", "shared"): 7}}, title="?")
    (ax,) = shown[0].axes
    assert [(round(a.xyann[0]), round(a.xy[0])) for a in drawn.arrows(ax)] == [(0, 1), (1, 2), (2, 1)]
    assert {"64 B", "32 B", "7 B", "load", "use"} <= set(drawn.texts(ax))
    memory_flow({"add": {("write", "shared"): 8, ("read", "shared"): 16}}, title="?")
    write, read = drawn.arrows(shown[1].axes[0])
    assert write.xy[1] - read.xy[1] > 0.3


def test_bars_say_what_is_kept_after_each_read(shown):
    kept_between_reads({"two": [("K0", 16), ("V0", 48)], "one": [("K0", 20)]}, title="?", ylabel="numbers")
    assert [[bar.get_height() for bar in ax.patches] for ax in shown[0].axes] == [[16, 48], [20]]
    first, second = (bar.get_facecolor() for bar in shown[0].axes[0].patches)
    assert first != second  # K and V
    assert shown[0].axes[1].patches[0].get_facecolor() == first
