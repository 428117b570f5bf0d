"""Figures of a kernel's levels and stages: what stands in them is what was handed in."""

import pytest

from pagewise.figures import kept_between_reads, memory_flow, nested_levels


def test_every_level_is_a_strip_with_its_marked_cell(shown):
    nested_levels([("grid", 3, 2), ("warps", 4, 0)], title="What?")
    (ax,) = shown[0].axes
    assert [text.get_text() for text in ax.texts if text.get_text()] == [
        "0",
        "1",
        "2",
        "0",
        "1",
        "2",
        "3",
        "grid",
        "warps",
    ]
    marked = [patch.get_x() for patch in ax.patches if patch.get_facecolor()[:3] != (1, 1, 1)]
    assert marked == pytest.approx([20 / 3, 0])
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([20 / 3, 10])  # the cell below is enlarged


def test_arrows_point_the_way_the_bytes_go(shown):
    memory_flow({"load": {("read", "global"): 64, ("write", "shared"): 32}, "use": {("read", "shared"): 7}}, title="?")
    (ax,) = shown[0].axes
    arrows = [(a.xyann[0], a.xy[0]) for a in ax.texts if getattr(a, "arrow_patch", None)]
    assert [(round(start), round(stop)) for start, stop in arrows] == [(0, 1), (1, 2), (2, 1)]
    assert {"64 B", "32 B", "7 B", "load", "use"} <= {text.get_text() for text in ax.texts}


def test_both_ways_between_two_memories_do_not_cover_each_other(shown):
    memory_flow({"add": {("write", "shared"): 8, ("read", "shared"): 16}}, title="?")
    heights = [a.xy[1] for a in shown[0].axes[0].texts if getattr(a, "arrow_patch", None)]
    assert heights[0] - heights[1] > 0.3


def test_bars_say_what_is_kept_after_each_read(shown):
    kept_between_reads({"two": [("K0", 16), ("V0", 48)], "one": [("K0", 20)]}, title="?", ylabel="numbers")
    assert [[bar.get_height() for bar in ax.patches] for ax in shown[0].axes] == [[16, 48], [20]]
    first, second = (bar.get_facecolor() for bar in shown[0].axes[0].patches)
    assert first != second  # K and V
    assert shown[0].axes[1].patches[0].get_facecolor() == first
