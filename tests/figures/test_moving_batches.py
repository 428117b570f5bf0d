"""The batch over time: the seats of requests, the caption of each step, and the owners of blocks."""

import pytest
from matplotlib.colors import to_rgb, to_rgba
from stepped import captions, figures_drawn, shown_without_scripts

from pagewise.figures import Moment, batch_steps, blocks_over_time, moving_batches
from pagewise.figures.blocks import OWNERS, SHARED
from pagewise.figures.moving_batches import seats

PROMPTS = {0: ("prompt", 5), 1: ("prompt", 4)}
MOMENTS = [
    Moment(PROMPTS, [0, 1], [2], [], {0: 2, 1: 1}),
    Moment({0: ("decode", 1), 1: ("decode", 1)}, [0, 1], [2], [], {0: 2, 1: 2}),
    Moment({1: ("decode", 1), 2: ("prompt", 3)}, [1, 2], [], [], {1: 2, 2: 1, -1: 1}),
    Moment({1: ("decode", 1)}, [1], [2], [2], {1: 3}),
    Moment({2: ("again", 3)}, [2], [], [], {2: 1}),
]


def test_a_newcomer_takes_the_first_free_seat_and_keeps_it():
    assert seats(MOMENTS)[:3] == [{0: 0, 1: 1}, {0: 0, 1: 1}, {1: 1, 2: 0}]


def test_who_runs_without_a_token_keeps_its_seat():
    nothing = [Moment({0: ("prompt", 5)}, [0, 1], [], [], {}), Moment({1: ("prompt", 4)}, [0, 1], [], [], {})]
    assert seats(nothing) == [{0: 0, 1: 1}, {0: 0, 1: 1}]


def both(**options):
    return batch_steps({"static": MOMENTS, "other": MOMENTS[:2]}, 2, title="Who?", alt="Seats.", **options)


@pytest.mark.slow
def test_each_step_says_who_computes_how_much_and_who_waits():
    said = captions(both())
    assert len(said) == 5
    assert said[0] == "Step 0. static: A, B compute 9 tokens; C waits. other: A, B compute 9 tokens; C waits."
    assert said[3] == "Step 3. static: B computes 1 token; C preempted; C waits. other: done."


def test_later_steps_are_white_and_not_empty_seats():
    with figures_drawn(moving_batches) as figures:
        batch_steps({"run": MOMENTS}, 2, title="Which?", alt="Seats.")
    empty = to_rgba(moving_batches.EMPTY["fc"])
    for time in (0, 2, 4):
        grey = [patch for patch in figures[time].axes[0].patches if patch.get_facecolor() == empty]
        assert [patch.get_bbox().x1 for patch in grey] == [time + 1]


def test_fewer_steps_may_be_shown_and_preemptions_and_the_last_always_are(unrendered):
    assert [text.split(".")[0] for text in captions(both(every=9))] == ["Step 0", "Step 3", "Step 4"]


def test_blocks_are_stacked_in_their_owners_colours_and_shared_ones_apart(shown):
    blocks_over_time({"run": MOMENTS}, 4, title="Whose are the blocks?")
    (ax,) = shown[0].axes
    bars = {(round(b.get_x()), b.get_facecolor()[:3]): (b.get_y(), b.get_height()) for b in ax.patches}
    assert bars[1, to_rgb(OWNERS[0])] == (0, 2)
    assert bars[1, to_rgb(OWNERS[1])] == (2, 2)
    assert bars[2, to_rgb(SHARED)] == (0, 1)
    letters = {text.get_text(): text.get_position() for text in ax.texts}
    assert letters["B"] == (0.5, 2.5)
    crosses = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "X"]
    assert crosses == [3]
    assert [text.get_text() for text in shown[0].legends[0].get_texts()] == [
        "all blocks",
        "in several tables",
        "preempted",
    ]


def test_without_scripts_a_preemption_is_shown_or_the_step_in_which_the_panels_differ_most(unrendered):
    assert shown_without_scripts(both()) == 3
    panels = {"long": MOMENTS[:3], "short": MOMENTS[:2]}
    assert shown_without_scripts(batch_steps(panels, 2, title="Who?", alt="Seats.")) == 2
