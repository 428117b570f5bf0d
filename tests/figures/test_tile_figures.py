"""Tiles of the scores: what is dark, masked or skipped, and whose the gradients are."""

import drawn
import torch
from matplotlib.colors import to_rgb

from pagewise.figures import gradient_owners, visited_tiles
from pagewise.figures.palette import BLUE, ORANGE, SAND, TEAL

CAUSAL = torch.ones(4, 6, dtype=torch.bool).tril(2)
VISITED = [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6))]


def fills(ax, size):
    rectangles = [patch for patch in ax.patches if (patch.get_width(), patch.get_height()) == size]
    return {(int(p.get_y()), int(p.get_x())): p.get_facecolor()[:3] for p in rectangles if p.get_facecolor()[3]}


def test_a_tile_is_dark_if_nothing_in_it_is_hidden_and_white_if_the_loop_skips_it(shown):
    panels = {"causal": (CAUSAL, VISITED[:1] + VISITED[2:]), "all": (torch.ones(4, 6, dtype=torch.bool), VISITED)}
    visited_tiles(panels, (2, 3), title="Which?")
    causal, everything = shown[0].axes
    dark, masked, white = to_rgb(BLUE), to_rgb(SAND), (1, 1, 1)
    assert fills(causal, (3, 2)) == {(0, 0): dark, (0, 3): white, (2, 0): dark, (2, 3): masked}
    assert set(fills(everything, (3, 2)).values()) == {dark}
    assert drawn.titles(shown[0]) == ["causal: 3 of 4", "all: 4 of 4"]


def test_tiles_at_the_edges_are_cut(shown):
    visible = torch.ones(3, 5, dtype=torch.bool)
    visited_tiles({"a": (visible, [((2, 3), (4, 5))]), "b": (visible, [])}, (2, 4), title="Which?")
    assert fills(shown[0].axes[0], (1, 1)) == {(2, 4): to_rgb(BLUE)}
    assert shown[0].axes[1].get_title(loc="left") == "b: 0 of 4"


def test_a_program_goes_down_its_column_and_writes_there(shown):
    programs = {"dK": ("column", ["Q"], ["dK"], ["dQ"]), "dQ": ("row", ["K", "V"], ["dQ"], [])}
    gradient_owners(programs, (2, 3), title="Whose?")
    column, row = shown[0].axes
    mine = [{place for place, fill in fills(ax, (1, 1)).items() if fill == to_rgb(BLUE)} for ax in (column, row)]
    assert mine == [{(0, 1), (1, 1)}, {(1, 0), (1, 1), (1, 2)}]
    written = [[p for p in ax.patches if p.get_facecolor()[:3] == to_rgb(ORANGE)] for ax in (column, row)]
    assert [len(of) for of in written] == [1, 1]
    assert (written[0][0].get_x(), written[1][0].get_y()) == (1, 1)
    added = [[p for p in ax.patches if p.get_facecolor()[:3] == to_rgb(TEAL)] for ax in (column, row)]
    assert [len(of) for of in added] == [2, 0]  # a tile of dQ for each row
    assert {"Q", "dK", "dQ"} <= set(drawn.texts(column))
    assert "K, V" in set(drawn.texts(row))
