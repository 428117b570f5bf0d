"""Figures of lesson 8: they show what they were given, and the stepper's three schemes end alike."""

import math
from typing import NamedTuple

import drawn
import pytest
import torch
from matplotlib.colors import to_hex
from stepped import captions

from pagewise.figures import ring, score_bands, score_histogram
from pagewise.figures.moving_softmax import scheme_steps
from pagewise.figures.palette import BLUE, ORANGE
from pagewise.online_softmax import Partial

pytestmark = pytest.mark.usefixtures("shown", "shapes_unchecked")

SCORES, VALUES = torch.tensor([3.0, 5.0, 6.0, 9.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])


def said_of(scores=SCORES, band=(-3.0, 3.0), phi=6.0):
    options = {"pieces": [2, 2], "phi": phi, "band": band, "title": "Who waits?", "alt": "Three rows."}
    steps = scheme_steps(Partial, scores, VALUES, **options)
    return captions(steps)


@pytest.mark.slow
def test_only_the_synchronised_scheme_shrinks_when_the_maximum_rises():
    said = said_of()
    assert "Synchronised: m = 5. Unified: adds." in said[1]
    assert f"m rises from 5 to 9, so l and acc shrink by {math.exp(-4):.3f} first" in said[2]
    assert "shrink" not in said_of(SCORES.flip(0))[2]


@pytest.mark.slow
def test_a_row_whose_largest_score_leaves_the_band_is_recomputed(unrendered):
    assert said_of()[-1].endswith("The row is outside, so the rule recomputes it.")
    assert said_of(band=(-3.0, 3.1))[-1].endswith("The row is inside.")
    assert said_of(phi=13.0, band=(-3.0, 3.0))[-1].endswith("recomputes it.")


def test_ranges_that_do_not_fit_are_told_apart(shown):
    ranges, marks = {"narrow": (-3.0, 5.0, -2.0), "wide": (-90.0, 90.0, None)}, {"overflow": 88.7}
    score_bands(ranges, (-57.5, 63.8), marks=marks, title="Who fits?")
    narrow, wide = (bar for bar in shown[0].axes[0].patches if bar.get_height() == pytest.approx(0.55))
    assert (to_hex(narrow.get_facecolor()), to_hex(wide.get_facecolor())) == (BLUE, ORANGE)
    assert [narrow.get_x(), narrow.get_x() + narrow.get_width()] == [-1.0, 7.0]
    assert wide.get_x() + wide.get_width() / 2 == pytest.approx((63.8 - 57.5) / 2)
    assert drawn.texts(shown[0].axes[0]) == ["φ = -2", "too wide"]


def test_the_shares_of_a_histogram_add_up(shown):
    score_histogram({"all": torch.arange(10.0), "few": torch.tensor([1.0])}, title="Where?", xlabel="score")
    outlines = shown[0].axes[0].patches
    assert [round(float(outline.get_xy()[:-1:2, 1].sum()), 3) for outline in outlines] == [1.0, 1.0]


class Event(NamedTuple):
    what: str
    turn: int
    stage: int
    k_tile: int


def events(num_stages, turns):
    """Return the events of a warp whose ring has `num_stages` stages, for every fourth tile."""
    copies = [Event("copy", turn, turn % num_stages, 4 * turn) for turn in range(turns)]
    done = copies[: num_stages - 1]
    for turn in range(turns):
        done += copies[turn + num_stages - 1 : turn + num_stages]
        done.append(Event("multiply", turn, turn % num_stages, 4 * turn))
    return done


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_copy_is_on_its_way_until_its_tile_is_multiplied(num_stages, shown):
    ring({"ring": events(num_stages, 6)}, title="What is on its way?")
    (ax,) = shown[0].axes
    boxes = [(patch.get_x(), patch.get_width(), int(patch.get_y()), patch.get_hatch()) for patch in ax.patches]
    assert [b[:3] for b in boxes if not b[3]] == [(turn, 1, turn % num_stages) for turn in range(6)]
    started = [max(-1, turn - num_stages + 1) for turn in range(6)]
    assert [b[:2] for b in boxes if b[3]] == [(start, turn - start) for turn, start in enumerate(started)]
    assert [text for text in drawn.texts(ax) if text] == [str(4 * turn) for turn in range(6)]
