"""Figures of online softmax: what shrinks is drawn as shrinking, what is held as held."""

import drawn
import torch
from matplotlib.colors import to_hex

from pagewise.figures import merges
from pagewise.figures.palette import BLUE, SAND
from pagewise.online_softmax import Partial


def test_naive_attention_holds_all_scores_and_online_attention_one_tile(shown):
    merges.tiles_held(torch.ones(6, 7, dtype=torch.bool).tril(1), 3, 1, title="Which scores exist?")
    naive, online = (
        [(p.get_x(), p.get_width(), to_hex(p.get_facecolor())) for p in ax.patches if not p.get_hatch()]
        for ax in shown[0].axes
    )
    assert naive == [(0, 7, BLUE)]
    assert online == [(0, 3, SAND), (3, 3, BLUE), (6, 1, "#ffffff")]
    titles = drawn.titles(shown[0])
    assert titles == ["naive: 42 scores", "online: 18 scores,\n(m, l, acc) of 6 queries"]
    hidden = [patch for patch in shown[0].axes[0].patches if patch.get_hatch()]
    assert len(hidden) == 42 - int(torch.ones(6, 7).tril(1).sum())


def test_each_box_of_a_tree_shows_the_summary_of_what_is_above_it(shown):
    leaves = [(f"score {s:.0f}", Partial.of(torch.tensor([s]), torch.tensor([[10 * s]]))) for s in (1.0, 2.0, 3.0)]
    trees = {"in a row": ((leaves[0], leaves[1]), leaves[2]), "the other way": (leaves[0], (leaves[1], leaves[2]))}
    merges.merge_trees(trees, Partial.merge, title="Does the order matter?")
    whole = Partial.of(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[10.0], [20.0], [30.0]]))
    root = f"m {whole.m:.2f}\nl {whole.l:.3f}\nacc {whole.acc.item():.3f}"
    assert [drawn.texts(ax).count(root) for ax in shown[0].axes] == [1, 1]


def test_each_edge_of_a_tree_shows_how_much_its_part_shrinks(shown):
    leaves = [(f"score {s:.0f}", Partial.of(torch.tensor([s]), torch.tensor([[s]]))) for s in (1.0, 3.0, 2.0)]
    merges.merge_trees({"in a row": ((leaves[0], leaves[1]), leaves[2])}, Partial.merge, title="How much?")
    factors = [text for text in drawn.texts(shown[0].axes[0]) if text.startswith("×")]
    assert sorted(factors) == ["×$e^{-1}$", "×$e^{-2}$", "×1", "×1"]
