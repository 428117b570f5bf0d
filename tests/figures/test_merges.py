"""Figures of online softmax: what shrinks is drawn as shrinking, what is held as held."""

import matplotlib as mpl

mpl.use("Agg")

import math

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from pagewise.figures import merges
from pagewise.figures.palette import BLUE, ORANGE, SAND
from pagewise.online_softmax import Partial

pytestmark = pytest.mark.usefixtures("shown")  # every figure here is rendered


def states_of(scores, values):
    states = [Partial.empty(head_size=values.shape[1])]
    for i in range(len(scores)):
        states.append(states[-1].merge(Partial.of(scores[i : i + 1], values[i : i + 1])))
    return states


def test_a_rise_of_m_is_drawn_as_a_fall_of_l_and_then_a_rise(shown):
    scores, values = torch.tensor([-math.inf, 0.0, -1.0, 0.5, -2.0]), torch.tensor([[9.0], [1.0], [-3.0], [2.0], [1.0]])
    merges.streaming(scores.tolist(), states_of(scores, values), title="What happens?")
    _, middle, bottom = shown[0].axes
    old, shrunk = 1 + math.exp(-1), (1 + math.exp(-1)) * math.exp(-0.5)
    (fall,) = [line for line in middle.lines if line.get_color() == ORANGE and len(line.get_xdata())]
    np.testing.assert_allclose(fall.get_ydata(), [old, shrunk], rtol=1e-6)  # at the one key that raised m
    path = middle.lines[0].get_ydata()
    np.testing.assert_allclose(path[12:16], [old, shrunk, shrunk, shrunk + 1], rtol=1e-6)
    (fall,) = [line for line in bottom.lines if line.get_color() == ORANGE]
    before, after = fall.get_ydata()
    assert abs(after) < abs(before)  # acc shrinks towards 0, whatever its sign


def test_naive_attention_holds_all_scores_and_online_attention_one_tile(shown):
    merges.tiles_held(torch.ones(6, 7, dtype=torch.bool).tril(1), 3, 1, title="Which scores exist?")
    naive, online = (
        [(p.get_x(), p.get_width(), to_hex(p.get_facecolor())) for p in ax.patches if not p.get_hatch()]
        for ax in shown[0].axes
    )
    assert naive == [(0, 7, BLUE)]
    assert online == [(0, 3, SAND), (3, 3, BLUE), (6, 1, "#ffffff")]
    titles = [ax.get_title(loc="left") for ax in shown[0].axes]
    assert titles == ["naive: 42 scores", "online: 18 scores,\n(m, l, acc) of 6 queries"]
    hidden = [patch for patch in shown[0].axes[0].patches if patch.get_hatch()]
    assert len(hidden) == 42 - int(torch.ones(6, 7).tril(1).sum())


def test_each_box_of_a_tree_shows_the_summary_of_what_is_above_it(shown):
    leaves = [(f"score {s:.0f}", Partial.of(torch.tensor([s]), torch.tensor([[10 * s]]))) for s in (1.0, 2.0, 3.0)]
    trees = {"in a row": ((leaves[0], leaves[1]), leaves[2]), "the other way": (leaves[0], (leaves[1], leaves[2]))}
    merges.merge_trees(trees, Partial.merge, title="Does the order matter?")
    whole = Partial.of(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[10.0], [20.0], [30.0]]))
    root = f"m {whole.m:.2f}\nl {whole.l:.3f}\nacc {whole.acc.item():.3f}"
    assert [sum(text.get_text() == root for text in ax.texts) for ax in shown[0].axes] == [1, 1]
