"""Figures of a kernel at work: their cells show the values of the trace."""

import drawn
import numpy as np
import pytest
from paged_launch import D, P, paged_launch

from pagewise.figures import threads as kernel_figures


def cells(figure) -> dict[tuple[float, float], str]:
    """Return the text of each box by the middle of the box."""
    return {text.get_position(): text.get_text() for text in figure.axes[0].texts}


def k_of_block(block):
    """Draw which lanes read a block of K."""
    accesses, sizes = paged_launch().accesses("k_cache"), (D // 8, P * 8)
    kernel_figures.vecs_of_block(
        accesses, sizes, block * D * P, title="?", rows="", columns="", group_size=2, turns="j"
    )


def test_a_block_of_k_is_read_row_by_row(shown):
    k_of_block(4)
    found = cells(shown[0])
    assert [found[c + 0.5, 1.5] for c in range(32)] == [str(64 + c) for c in range(32)]  # warp 2 has this block
    assert sorted(text for text in found.values() if "=" in text) == [f"j = {j}" for j in range(4)]
    assert [tick.get_text() for tick in shown[0].axes[0].get_xticklabels()] == [str(token) for token in range(P)]


def test_the_second_block_of_a_warp_starts_at_turn_0(shown):
    k_of_block(8)
    assert "j = 0" in cells(shown[0]).values()
    assert "j = 4" not in cells(shown[0]).values()


def test_a_block_of_v_is_read_by_lanes_side_by_side(shown):
    kernel_figures.rows_of_block(paged_launch().accesses("v_cache"), (D, P), 4 * D * P, title="?", turns="r")
    panels = shown[0].axes
    assert [ax.get_title(loc="left") for ax in panels] == ["turn r = 0", "turn r = 1"]
    found = [{text.get_position(): text.get_text() for text in ax.texts} for ax in panels]
    # a row of V is a row of the figure: its two halves are read by neighbours
    assert [found[0][0.5 + vec, 0.5] for vec in (0, 1)] == ["64", "65"]
    assert [found[0][0.5, row + 0.5] for row in (1, 15)] == ["66", "94"]
    assert found[1][0.5, 16.5] == "64"


def test_an_address_is_the_sum_of_its_strips(shown):
    levels = [("block", 9, 4, 512), ("row", 4, 2, 128), ("token", 16, 5, 8), ("vec", 2, 1, 4)]
    kernel_figures.address_strips(levels, title="?")
    texts = list(cells(shown[0]).values())
    assert f"together {4 * 512 + 2 * 128 + 5 * 8 + 4:,} elements" in texts
    assert "token 5 · 8 = 40" in texts


def test_sectors_are_counted_as_the_launch_counts_them_and_a_gap_separates_them(shown):
    trace = paged_launch().accesses("k_cache")
    request = trace[(trace["warp"] == 1) & (trace["execution"] == 2)]
    far = request.copy()
    far["element"] = np.arange(len(request)) * 64
    kernel_figures.sectors_of_request({"packed": request, "far": far}, 2, title="?")
    packed, far_apart = drawn.titles(shown[0])
    assert packed.startswith("packed: 8 sectors moved, 100%")
    assert far_apart.startswith("far: 32 sectors moved, 25%")
    assert shown[0].axes[1].get_xlim()[1] == pytest.approx(32.1)  # the sectors between them are left out
    widths = [{patch.get_width() for patch in ax.patches if patch.get_height() == 1} for ax in shown[0].axes]
    assert widths == [{1, 1 - kernel_figures.GAP}, {1 - kernel_figures.GAP}]  # the last sector ends a run, too


def test_banks_show_a_conflict_as_two_words(shown):
    trace = paged_launch().accesses("q_vecs")
    request = trace[(trace["access"] == "read") & (trace["warp"] == 0) & (trace["execution"] == 0)]
    wide = request.copy()
    wide["element"] = np.where(request["lane"] % 2, 32, 0)
    kernel_figures.banks_of_request({"ours": request, "wide": wide}, title="?")
    assert drawn.titles(shown[0]) == ["ours: 1 word per bank", "wide: 2 words per bank"]
    ours, wide_words = ([text for text in drawn.texts(ax) if text] for ax in shown[0].axes)
    assert ours == ["0", "1", "2", "3"]  # two vecs of 8 bytes for all lanes
    assert sorted(map(int, wide_words)) == [0, 1, 32, 33]


def test_the_tree_is_the_order_of_writes_and_reads(shown):
    trace = paged_launch().accesses("scores")
    kernel_figures.handovers(trace[trace["bytes"] == 4][-200:], title="?")
    tail = trace[np.isin(trace["line"], np.unique(trace["line"])[-2:])]
    kernel_figures.handovers(tail, title="?")
    sentences = [text for (x, _), text in cells(shown[1]).items() if x > 6]
    assert sentences == ["hand over their sums", "add them to their own"] * 2
    arrows = drawn.arrows(shown[1].axes[0])
    # from the middle of a warp's box to the middle of another's, 1.5 apart: 2 → 0 and 3 → 1, then 1 → 0
    assert [(a.xyann[0], a.xy[0]) for a in arrows] == [(3.6, 0.6), (5.1, 2.1), (2.1, 0.6)]


def test_a_butterfly_says_how_many_lanes_agree(shown):
    kernel_figures.butterfly([("thread group", [1]), ("warp", [16, 8, 4, 2])], title="?")
    texts = list(cells(shown[0]).values())
    assert texts[0] == "thread group: lane ^ 1, then 2 lanes agree"
    assert texts[-1] == "warp: lane ^ 2, then 32 lanes agree"


def test_the_first_screen_of_lesson_5_shows_the_shares_that_its_kernels_have(shown):
    kernel_figures.four_reads_of_keys()
    said = [title.split(": ")[1] for title in drawn.titles(shown[0])]
    assert said == [
        "32 sectors moved, 6% of their bytes used",
        "16 sectors moved, 50% of their bytes used",
        "8 sectors moved, 100% of their bytes used",
        "16 sectors moved, 100% of their bytes used",
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


def test_reads_before_the_write_are_marked(shown):
    kernel_figures.accesses_of_vec({"v1": paged_launch().accesses("q_vecs")}, "q_vecs", 6)
    assert drawn.titles(shown[0]) == ["v1: 0 of 96 reads come too early"]
