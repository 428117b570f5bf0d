"""Diagrams: every box and label that was recorded is drawn, and nothing else."""

import drawn
from matplotlib.colors import to_hex

from pagewise.figures import dataflow as diagrams
from pagewise.figures.palette import BLUE, SAND


def test_each_panel_of_the_decoder_shows_its_own_labels(shown):
    panels = {"Prefill": {"q": "q [1, 8, 6, 32]", "KV cache": "length 6"}, "Decode": {"q": "q [1, 8, 1, 32]"}}
    diagrams.decoder_flow(panels, title="What travels where?")
    texts = [drawn.texts(ax) for ax in shown[0].axes]
    assert {"q [1, 8, 6, 32]", "length 6"} <= set(texts[0])
    assert {"q [1, 8, 1, 32]", "KV cache"} <= set(texts[1])
    assert "q [1, 8, 6, 32]" not in texts[1]


def test_an_arrow_between_overlapping_boxes_is_vertical(shown):
    boxes = {"wide": (1.0, 1.0, 4.0, "wide"), "narrow": (2.5, 0.0, 0.5, "narrow"), "far": (9.0, 0.0, 1.0, "far")}
    diagrams.flow({"one": {}}, boxes, [("wide", "narrow", "a"), ("wide", "far", "b")], title="Which way?", size=(4, 3))
    arrows = drawn.arrows(shown[0].axes[0])
    down, across = ((a.xyann[0], a.xy[0]) for a in arrows)
    assert down == (2.5, 2.5)
    assert across == (1.0, 9.0)


def test_the_timeline_colours_every_token_of_every_call(shown):
    panels = {"without": [(0, 3), (0, 4)], "with": [(0, 3), (3, 4)]}
    diagrams.cache_timeline(panels, max_len=6, title="What does each call do?")
    without, with_cache = ([to_hex(patch.get_facecolor()) for patch in ax.patches] for ax in shown[0].axes)
    assert len(without) == len(with_cache) == 12
    assert (without.count(BLUE), without.count(SAND)) == (3 + 4, 0)
    assert (with_cache.count(BLUE), with_cache.count(SAND)) == (3 + 1, 0 + 3)
