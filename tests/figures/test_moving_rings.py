"""The steppers of a ring: every score once, by the process that has both, and waiting that adds up."""

import drawn
import pytest
from matplotlib.colors import to_rgb
from stepped import captions, figures_drawn

from pagewise.figures import balance_steps, moving_rings, ring_steps
from pagewise.figures.moving_rings import PROCESSES, ring_tiles

CONTIGUOUS = [[0], [1], [2]]
ZIGZAG = [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("shares", [CONTIGUOUS, ZIGZAG])
def test_every_tile_is_computed_once_by_the_process_that_has_its_queries(shares):
    tiles, pieces = ring_tiles(shares, causal=False), sum(map(len, shares))
    assert sorted((tile.row, tile.column) for tile in tiles) == [(i, j) for i in range(pieces) for j in range(pieces)]
    assert all(tile.row in shares[tile.process] for tile in tiles)
    assert all(tile.column in shares[tile.process] for tile in tiles if tile.step == 0)


def test_a_causal_tile_counts_what_is_visible():
    works = {(tile.row, tile.column): tile.work for tile in ring_tiles(CONTIGUOUS, causal=True)}
    assert [works[1, column] for column in range(3)] == [1.0, 0.5, 0.0]


@pytest.mark.slow
def test_the_captions_say_who_has_what_and_who_works():
    steps = captions(ring_steps(CONTIGUOUS, title="Who has what?", alt="A ring."))
    held = "process 0 attends to K, V 2, process 1 attends to K, V 0, process 2 attends to K, V 1"
    assert steps[1] == f"Step 1: {held}. Each process passes its K, V on."
    assert steps[2].endswith("Each process has seen all keys.")
    orders = {"contiguous": CONTIGUOUS, "zigzag": ZIGZAG}
    steps = captions(balance_steps(orders, title="Who waits?", alt="Two rings."))
    assert steps[1] == "Step 1. Work of the processes in order. contiguous: 0, 4, 4; zigzag: 2, 2, 2."


def figures(make, *args):
    with figures_drawn(moving_rings) as found:
        make(*args, title="Who?", alt="A ring.")
    return found


def fills(ax):
    return [patch.get_facecolor()[:3] for patch in ax.patches]


def test_scores_are_white_before_their_step_and_strong_in_it():
    first, _, last = figures(ring_steps, CONTIGUOUS)
    colours = list(map(to_rgb, PROCESSES[:3]))
    assert fills(first.axes[1]) == [*colours, *[(1.0, 1.0, 1.0)] * 6]
    assert fills(last.axes[1])[6:] == colours
    assert not set(fills(last.axes[1])[:6]) & {*colours, (1.0, 1.0, 1.0)}


def test_the_ring_shows_the_blocks_after_their_moves_and_no_arrow_at_the_end():
    steps = figures(ring_steps, CONTIGUOUS)
    texts = [drawn.texts(figure.axes[0]) for figure in steps]
    assert [text for text in texts[1] if text.startswith("K, V")] == ["K, V 2", "K, V 0", "K, V 1"]
    arrows = [len(drawn.arrows(figure.axes[0])) for figure in steps]
    assert arrows == [3, 3, 0]


def test_a_step_lasts_as_long_as_its_slowest_process():
    *_, last = figures(balance_steps, {"contiguous": CONTIGUOUS, "zigzag": ZIGZAG})
    ends = [max(patch.get_x() + patch.get_width() for patch in ax.patches) for ax in (last.axes[1], last.axes[3])]
    assert ends == [10, 6]
    waits = [sum(patch.get_width() for patch in last.axes[1].patches if patch.get_y() == r + 0.1) for r in range(3)]
    done = [2, 2 + 4, 2 + 4 + 4]
    assert waits == [10 + of for of in done]  # each step has a hatched box, and a box over its working part


def test_more_processes_than_colours_are_refused():
    with pytest.raises(ValueError, match="1 to 4 processes, got 5"):
        ring_steps([[r] for r in range(5)], title="Who?", alt="A ring.")
    with pytest.raises(ValueError, match="1 to 4 processes, got 5"):
        balance_steps({"contiguous": [[r] for r in range(5)]}, title="Who?", alt="A ring.")
