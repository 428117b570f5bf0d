"""Attention in pictures: a figure shows every shape, number, head and byte that it is given."""

import drawn
import pytest
import torch
from matplotlib.colors import to_hex

from pagewise.figures.attention import equations, head_maps
from pagewise.figures.charts import heatmaps
from pagewise.figures.dataflow import flow, three_kernels
from pagewise.figures.palette import BLUE, SAND
from pagewise.tools.roofline import standard_attention_bytes

pytestmark = pytest.mark.usefixtures("shown", "shapes_unchecked")


def test_equations_show_each_matrix_with_its_shape_and_numbers(shown):
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    equations([[("a", a), "×", ("b", b), "=", ("ab", a @ b)], [("half", a / 4)]], title="What comes out?")
    first, second = (drawn.texts(ax) for ax in shown[0].axes)
    assert {"a  [1, 2]", "b  [2, 1]", "ab  [1, 1]", "×", "=", "1", "2", "3", "4", "11"} == set(first)
    assert {"half  [1, 2]", "0.25", "0.50"} == set(second)


def test_rows_and_columns_of_an_equation_have_the_names_of_the_tokens(shown):
    a = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    equations([[("a", a), "×", ("b", a.T)]], title="What comes out?", names=["on", "mat"])
    (ax,) = shown[0].axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["on", "mat"]
    columns = {t.get_text(): t.get_position()[0] for t in ax.texts if t.get_text() in ("on", "mat")}
    left = ax.images[1].get_extent()[0]
    assert columns == {"on": left + 0.5, "mat": left + 1.5}


def test_matrices_of_an_equation_do_not_overlap(shown):
    a = torch.ones(2, 3)
    equations([[("a", a), "/ √D =", ("b", a)], [("c", a)]], title="Side by side?")
    left, right = (image.get_extent() for image in shown[0].axes[0].images)
    assert left[1] < right[0]
    assert right[1] - right[0] == pytest.approx(3)


def test_a_head_has_the_colour_of_the_kv_head_it_reads(shown):
    head_maps({"GQA": [0, 0, 1, 1]}, title="Who reads what?")
    texts = drawn.texts(shown[0].axes[0])
    fills = [to_hex(patch.get_facecolor()) for patch in shown[0].axes[0].patches]
    assert dict(zip(texts, fills, strict=True)) == {
        "q0": BLUE, "q1": BLUE, "q2": SAND, "q3": SAND, "kv0": BLUE, "kv1": SAND,
    }  # fmt: skip
    ends = [tuple(line.get_xdata()) for line in shown[0].axes[0].lines]
    assert ends == [(0, 0.5), (1, 0.5), (2, 2.5), (3, 2.5)]


def test_three_kernels_have_eight_arrows_as_thick_as_their_bytes(shown):
    moved = standard_attention_bytes(B=1, H=1, Hkv=1, T=1000, S=1000, D=100, itemsize=1)
    three_kernels(moved, title="What moves?")
    found = drawn.arrows(shown[0].axes[0])
    assert len(found) == 8
    widths = [arrow.arrow_patch.get_linewidth() for arrow in found]
    assert len(set(widths)) == 2
    assert [w == max(widths) for w in widths] == [move[-1] in "SP" for move in moved]
    up = [arrow.xy[1] > arrow.xyann[1] for arrow in found]
    assert up == [move.startswith("write") for move in moved]
    texts = drawn.texts(shown[0].axes[0])
    assert texts.count("read\n1.0 MB") == 2
    assert texts.count("write\n0.1 MB") == 1


def test_an_arrow_ends_at_the_edges_of_its_boxes_whichever_is_above(shown):
    boxes = {"high": (0.0, 2.0, 1.0, "high"), "low": (0.0, 0.0, 1.0, "low")}
    flow({"one": {}}, boxes, [("high", "low", "down"), ("low", "high", "up")], title="Which way?", size=(3, 3))
    down, up = drawn.arrows(shown[0].axes[0])
    assert (down.xyann[1], down.xy[1]) == (1.75, 0.25)
    assert (up.xyann[1], up.xy[1]) == (0.25, 1.75)


def test_heatmaps_can_share_one_scale(shown):
    matrices = {"small": torch.tensor([[0.0, 1.0]]), "large": torch.tensor([[0.0, 4.0]])}
    heatmaps(matrices, xlabel="key", ylabel="query", shared="weight")
    panels = [ax for ax in shown[0].axes if ax.get_label() != "<colorbar>"]
    assert [ax.images[0].get_clim() for ax in panels] == [(0, 4), (0, 4)]
    (bar,) = (ax for ax in shown[0].axes if ax not in panels)
    assert bar.get_ylabel() == "weight"
