"""Figures of a kernel at work: their cells show the values of the trace."""

import drawn
import numpy as np
import pytest
from paged_launch import paged_launch

from pagewise.figures import threads as kernel_figures


def cells(figure) -> dict[tuple[float, float], str]:
    """Return the text of each box by the middle of the box."""
    return {text.get_position(): text.get_text() for text in figure.axes[0].texts}


@pytest.mark.slow
def test_sectors_are_counted_as_the_launch_counts_them_and_a_gap_separates_them(shown):
    trace = paged_launch().accesses("k_cache")
    request = trace[(trace["warp"] == 1) & (trace["execution"] == 2)]
    far = request.copy()
    far["element"] = np.arange(len(request)) * 64
    kernel_figures.sectors_of_request({"packed": request, "far": far}, 2, title="?")
    packed, far_apart = drawn.titles(shown[0])
    assert packed.startswith("packed: 8 sectors touched, 100%")
    assert far_apart.startswith("far: 32 sectors touched, 25%")
    assert shown[0].axes[1].get_xlim()[1] == pytest.approx(32.1)  # the sectors between them are left out
    widths = [{patch.get_width() for patch in ax.patches if patch.get_height() == 1} for ax in shown[0].axes]
    assert widths == [{1, 1 - kernel_figures.GAP}, {1 - kernel_figures.GAP}]  # the last sector ends a run, too


@pytest.mark.slow
def test_a_butterfly_says_how_many_lanes_agree(shown):
    kernel_figures.butterfly([("thread group", [1]), ("warp", [16, 8, 4, 2])], title="?")
    texts = list(cells(shown[0]).values())
    assert texts[0] == "thread group: lane ^ 1, then 2 lanes agree"
    assert texts[-1] == "warp: lane ^ 2, then 32 lanes agree"


def test_the_first_screen_of_lesson_5_shows_the_shares_that_its_kernels_have(shown):
    kernel_figures.three_reads_of_keys()
    said = [title.split(": ")[1] for title in drawn.titles(shown[0])]
    assert said == [
        "32 sectors touched, 6% of their bytes used",
        "16 sectors touched, 50% of their bytes used",
        "8 sectors touched, 100% of their bytes used",
    ]


def test_lanes_in_a_block_are_where_the_trace_has_them(shown):
    trace = np.zeros(64, dtype=[("element", "i8"), ("bytes", "u1"), ("lane", "i8"), ("execution", "u4")])
    trace["lane"], trace["bytes"] = np.tile(np.arange(32), 2), 16
    trace["execution"] = np.repeat([3, 4], 32)
    trace["element"] = 4096 + trace["lane"] // 2 * 128 + trace["lane"] % 2 * 8 + 16 * (trace["execution"] == 4)
    kernel_figures.lanes_in_block({"two threads per key": trace}, 4096)
    found = cells(shown[0])
    assert found[8.0, 0.55] == "0"
    assert found[24.0, 15.55] == "31"
    assert len(found) == 32  # the second request has no numbers


@pytest.mark.slow
def test_reads_before_the_write_are_marked(shown):
    kernel_figures.accesses_of_vec({"v1": paged_launch().accesses("q_vecs")}, "q_vecs", 6)
    assert drawn.titles(shown[0]) == ["v1: 0 of 96 reads come too early"]
