"""One step as a flat row: each token in its sequence's colour, and an arrow to the slot that it writes."""

import drawn
import pytest
from matplotlib.colors import to_rgba

from pagewise.figures import flat_step
from pagewise.figures.blocks import OWNERS

STEP = {
    "positions": [5, 0, 1],
    "slots": [9, 0, 1],
    "block_tables": [[1, 2], [0, 0]],
    "seq_lens": [6, 2],
    "cu_seqlens_q": [0, 1, 3],
}


@pytest.fixture
def axes(shown):
    flat_step(STEP, ["A", "B"], ["x", "y", "z"], 4, 3, title="Where?", alt="A step.")
    (figure,) = shown
    return figure.axes[0]


def of_pool(axes, colour):
    """Return {left side: whether it is written now} of the slots of a sequence."""
    slots = [p for p in axes.patches if p.get_facecolor() == to_rgba(colour) and p.get_y() == 0]
    return {round(p.get_x(), 1): p.get_hatch() is None for p in slots}


def test_old_keys_and_new_slots_of_a_sequence_differ(axes):
    block = [0.0, 4.8, 9.6]
    old = {block[1] + i: False for i in range(4)} | {block[2]: False}
    assert of_pool(axes, OWNERS[0]) == {round(x, 1): new for x, new in (old | {block[2] + 1: True}).items()}
    assert of_pool(axes, OWNERS[1]) == {0.0: True, 1.0: True}


def test_every_token_has_an_arrow_to_its_slot(axes):
    ends = sorted(round(text.xy[0] - 0.5, 1) for text in axes.texts if hasattr(text, "arrow_patch"))
    assert ends == [0.0, 1.0, 10.6]


def test_the_row_shows_where_sequences_begin_and_what_they_are(axes):
    said = drawn.texts(axes)
    assert [text for text in said if text in ("0", "1", "3", "5")].count("0") == 2  # a position and a beginning
    assert {"x", "y", "z", "3", "cu_seqlens_q", "A\ntable [1, 2]\nseq_len 6"} <= set(said)
