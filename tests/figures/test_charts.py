"""Figures: they draw whatever attention has in it, and say what they show."""

from itertools import pairwise

import drawn
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from pagewise.figures.charts import bars, heatmap, heatmaps, lines, roofline
from pagewise.figures.drawing import box
from pagewise.figures.palette import PALETTE
from pagewise.tools.roofline import GPUS, H100

# Plain lists of whole numbers are welcome, and beartype takes no int for a float.
pytestmark = pytest.mark.usefixtures("shown", "shapes_unchecked")

INF = float("inf")
SCORES = torch.tensor([[0.5, -INF, -INF], [-1.5, 2.0, -INF]])
NAMES = {"title": "How long does it take?", "ylabel": "time (ms)"}
CURVES = {"naive": [1.0, 2.0, -INF], "cached": torch.tensor([1.0, 1.5, 2.0])}

DRAWINGS = {
    "heatmaps": lambda: heatmaps({"scores": SCORES, "weights": SCORES.exp()}, xlabel="key", ylabel="query"),
    "annotated heatmaps": lambda: heatmaps(
        {"scores": SCORES}, xlabel="key", ylabel="query", annotate=".2f", xticks=list("abc"), yticks=list("de"),
        suptitle="Which keys count?",
    ),
    "heatmap of nothing visible": lambda: heatmaps({"scores": SCORES - INF}, xlabel="key", ylabel="query"),
    "lines": lambda: lines([1, 2, 3], CURVES, xlabel="tokens", **NAMES),
    "logarithmic lines": lambda: lines([1, 2, 4], CURVES, xlabel="tokens", logx=True, logy=True, **NAMES),
    "one line": lambda: lines([1, 2], {"naive": [1, 2]}, xlabel="tokens", caption="H100, 2026-11-21", **NAMES),
    "bars": lambda: bars(["A100", "H100"], {"used": torch.tensor([1, 2]), "wasted": [0.5, 0.0]}, **NAMES),
    "stacked bars": lambda: bars(["A100", "H100"], {"used": [1, 2], "wasted": [3, 4]}, stacked=True, **NAMES),
    "horizontal bars": lambda: bars(["A100", "H100"], {"used": [1, 2]}, horizontal=True, values=".1f", **NAMES),
    "roofline": lambda: roofline(GPUS, {"prefill": 800.0, "decode": 4.0, "copy": 0.5}, title="What is the limit?"),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS.keys())
def test_one_figure_is_shown_whose_panels_have_titles_and_named_axes(draw, shown):
    assert draw() is None  # a returned object would be printed below the cell
    assert len(shown) == len(plt.get_fignums()) == 1
    panels = [ax for ax in shown[0].axes if ax.get_label() != "<colorbar>"]
    assert all(ax.get_title(loc="left") for ax in panels)
    for ax in panels:
        named_groups = {t.get_text() for axis in (ax.xaxis, ax.yaxis) for t in axis.get_ticklabels()} & {"A100", "H100"}
        names = [ax.get_xlabel(), panels[0].get_ylabel()]  # panels side by side share the first one's ylabel
        assert sum(map(bool, names)) == (1 if named_groups else 2)


def test_caption_stands_under_the_axis(shown):
    DRAWINGS["one line"]()
    assert shown[0].axes[0].get_xlabel() == "tokens\nH100, 2026-11-21"


def test_legend_names_the_curves_if_there_are_several(shown):
    DRAWINGS["lines"]()
    assert [t.get_text() for t in shown[0].axes[0].get_legend().get_texts()] == ["naive", "cached"]
    DRAWINGS["one line"]()
    assert shown[1].axes[0].get_legend() is None


# ------------------------------------------------------------------------------------------------ grey-scale


def lightness(colour):
    r, g, b = to_rgb(colour)
    return 0.299 * r + 0.587 * g + 0.114 * b


def test_neighbours_of_the_palette_differ_in_lightness():
    assert [pair for pair in pairwise(PALETTE) if abs(lightness(pair[0]) - lightness(pair[1])) < 0.1] == []


def test_curves_differ_in_dash_and_marker(shown):
    lines([1, 2], {name: [1, 2] for name in "abcde"}, xlabel="tokens", **NAMES)
    curves = shown[0].axes[0].lines
    assert len({(line.get_linestyle(), line._dash_pattern[0], str(line._dash_pattern[1])) for line in curves}) == 5
    assert len({line.get_marker() for line in curves}) == 5


def test_bars_differ_in_hatch(shown):
    bars(["A100"], {name: [1] for name in "abcde"}, **NAMES)
    assert len({patch.get_hatch() or "" for patch in shown[0].axes[0].patches}) == 5


def test_bands_behind_the_bars_differ_in_hatch(shown):
    bars(["A100"], {"saved": [8]}, ranges={"samples": (6, 10), "beams": (38, 55)}, **NAMES)
    bands = [patch for patch in shown[0].axes[0].patches if patch.get_label() in ("samples", "beams")]
    assert len({patch.get_hatch() or "" for patch in bands}) == len(bands) == 2


def text_contrast(text, background):
    return abs(lightness(text.get_color()) - lightness(background))


@pytest.mark.parametrize("fill", ["white", *PALETTE])
def test_text_in_a_box_stands_out(fill):
    _, ax = plt.subplots()
    box(ax, 0, 0, 2, 1, "block 7", fill=fill)
    assert drawn.texts(ax) == ["block 7"]
    assert text_contrast(ax.texts[0], fill) > 0.3


@pytest.mark.parametrize("values", [[[0.0, 0.2, 0.5, 0.8, 1.0]], [[-1.0, -0.5, 0.0, 0.5, 1.0]]], ids=["0…1", "signed"])
def test_numbers_in_a_heatmap_stand_out(values):
    _, ax = plt.subplots()
    heatmap(ax, np.array(values), "weights", annotate=".1f")
    image = ax.images[0]
    assert min(text_contrast(t, image.cmap(image.norm(v))[:3]) for t, v in zip(ax.texts, values[0], strict=True)) > 0.3


# ------------------------------------------------------------------------------------------------ the numbers shown


@pytest.mark.parametrize(
    ("values", "numbers"),
    [(SCORES, ["0.5", "−∞", "−∞", "-1.5", "2.0", "−∞"]), (torch.tensor([[0.5, float("nan")]]), ["0.5", ""])],
    ids=["hidden", "NaN"],
)
def test_hidden_scores_are_marked_and_left_white_and_the_cell_of_nan_is_blank(values, numbers, shown):
    heatmaps({"scores": values}, xlabel="key", ylabel="query", annotate=".1f")
    (ax,) = shown[0].axes
    assert drawn.texts(ax) == numbers
    assert np.ma.getmaskarray(ax.images[0].get_array()).tolist() == (~values.isfinite()).tolist()


def test_frames_are_drawn_around_the_outlined_row_and_column_of_each_matrix(shown):
    heatmaps({"scores": SCORES, "weights": SCORES.exp()}, xlabel="key", ylabel="query", outlined=1)
    for ax in shown[0].axes[:2]:
        assert [frame.get_bbox().bounds for frame in ax.patches] == [(-0.5, 0.5, 3, 1), (0.5, -0.5, 1, len(SCORES))]
        assert all(frame.get_facecolor()[3] == 0 for frame in ax.patches)  # the numbers stay visible


@pytest.mark.parametrize(("values", "limits"), [([[0.25, 0.5]], (0, 0.5)), ([[-3.0, 1.0]], (-3, 3))])
def test_colours_start_at_zero_or_are_centred_there(values, limits):
    _, ax = plt.subplots()
    heatmap(ax, np.array(values), "weights")
    assert ax.images[0].get_clim() == limits


@pytest.mark.parametrize("y", [[1.0, 5.0, 3.0], [-4.0, 2.0, 1.0], [-3.0, -2.0, -1.0]], ids=str)
def test_every_point_of_a_curve_is_inside_the_figure(y, shown):
    """Scores and log-sum-exps are negative."""
    lines([1, 2, 3], {"lse": y}, xlabel="keys seen", **NAMES)
    bottom, top = shown[0].axes[0].get_ylim()
    assert bottom <= min(y)
    assert max(y) <= top


def test_positive_curves_are_drawn_from_zero(shown):
    lines([1, 2], {"naive": [90.0, 100.0]}, xlabel="tokens", **NAMES)
    assert shown[0].axes[0].get_ylim()[0] == 0


def test_lines_can_share_a_figure(shown):
    _, ax = plt.subplots()
    lines([1, 2], {"a": [1, 2]}, xlabel="tokens", ax=ax, **NAMES)
    assert shown == []
    assert len(ax.lines) == 1


def test_a_mark_is_a_line_with_its_number(shown):
    lines([1, 2000], {"a": [1, 2]}, xlabel="tokens", marks=[1099.4], **NAMES)
    ax = shown[0].axes[0]
    assert list(ax.lines[1].get_xdata()) == [1099.4, 1099.4]
    assert [text.get_text().strip() for text in ax.texts] == ["1,099"]


def test_stacked_bars_stand_on_each_other(shown):
    used, wasted = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    bars(["A100", "H100"], {"used": used, "wasted": wasted}, stacked=True, **NAMES)
    assert [(p.get_y(), p.get_height()) for p in shown[0].axes[0].patches] == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert (used.tolist(), wasted.tolist()) == ([1, 2], [3, 4])  # and the caller's numbers stay as they were


def test_bars_beside_each_other_do_not_overlap(shown):
    bars(["A100", "H100"], {"a": [1, 1], "b": [1, 1], "c": [1, 1]}, **NAMES)
    spans = sorted((p.get_x(), p.get_x() + p.get_width()) for p in shown[0].axes[0].patches)
    assert all(right <= left + 1e-9 for (_, right), (left, _) in pairwise(spans))


def test_values_stand_at_the_bars(shown):
    bars(["A100", "H100"], {"speed": [1.25, 10.0]}, values=".1f", **NAMES)
    assert drawn.texts(shown[0].axes[0]) == ["1.2", "10.0"]


@pytest.mark.slow
def test_roofline_points_lie_on_the_roof(shown):
    roofline([H100], {"decode": 4.0}, title="What is the limit?")
    (point,) = (line for line in shown[0].axes[0].lines if line.get_marker() == "o")
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (4.0, pytest.approx(4 * 3.35))
