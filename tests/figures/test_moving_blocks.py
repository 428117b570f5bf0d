"""The stepper of the block manager: every call is made, said and drawn; copies, refusals and cached blocks show."""

import drawn
from matplotlib.colors import to_hex
from stepped import captions, figures_drawn

from pagewise.figures import moving_blocks as module
from pagewise.figures.blocks import OWNERS, owner_colours
from pagewise.figures.moving_blocks import block_steps
from pagewise.paged_blocks import BlockManager

CALLS = [
    ("A arrives", "allocate", "A", range(1, 7)),
    ("Its K and V are written", "commit", "A", 6),
    ("A splits", "fork", "A", "B"),
    ("B writes", "append", "B", 8),
    ("C arrives", "allocate", "C", [1, 2, 3, 4, 5]),
    ("D arrives", "allocate", "D", range(50, 60)),
    ("C is preempted", "free", "C"),
    ("B ends", "free", "B"),
    ("A ends", "free", "A"),
]


def film(monkeypatch, **options):
    """(captions, moments drawn, the colours of each) of the script above."""
    seen = []
    monkeypatch.setattr(module, "_draw", lambda figure, moment, colours: seen.append((moment, colours)))
    manager = BlockManager(5, 4, prefix_cache=True)
    steps = block_steps(manager, CALLS, title="Who owns what?", alt="Tables and pool.", **options)
    return captions(steps), *zip(*seen, strict=True)


def test_each_call_is_a_step_that_says_what_came_back(monkeypatch):
    said, moments, _ = film(monkeypatch)
    assert len(said) == len(moments) == 1 + len(CALLS)
    assert said[1] == "A arrives: allocate('A', [1, 2, …, 6]) returns 0."
    assert said[3] == "A splits: fork('A', 'B')."
    assert said[4] == "B writes: append('B', 8) returns 10, and block 1 is copied to block 2 first."
    assert said[5] == "C arrives: allocate('C', [1, 2, 3, 4, 5]) returns 4."  # found in the prefix cache
    assert said[6] == "D arrives: allocate('D', [50, 51, …, 59]) is refused: OutOfBlocks."


def test_a_moment_keeps_what_was_when_the_manager_moves_on(monkeypatch):
    _, moments, _ = film(monkeypatch)
    assert moments[3].shot.tables == {"A": [0, 1], "B": [0, 1]}
    assert moments[4].shot.tables == {"A": [0, 1], "B": [0, 2]}
    assert [moment.copies for moment in moments].count([]) == len(moments) - 1
    assert moments[4].copies == [(1, 2)]
    assert moments[6].shot == moments[5].shot  # a refused call changes nothing


def test_free_blocks_that_can_be_found_keep_their_tokens(monkeypatch):
    _, moments, _ = film(monkeypatch)
    assert moments[-1].cached == [0]
    assert moments[-1].shot.contents[:4] == ["1", "2", "3", "4"]
    assert moments[-2].cached == []


def test_a_sequence_keeps_its_colour_over_steps_and_figures(monkeypatch):
    _, _, colours = film(monkeypatch, colours=owner_colours("Z", "C", "B", "A"))
    assert colours[1]["A"] == colours[-1]["A"] == OWNERS[3]
    assert colours[1]["C"] == OWNERS[1]


def test_the_copy_is_an_arrow_from_block_to_block():
    calls = [("", "allocate", "A", [1, 2]), ("", "fork", "A", "B"), ("", "append", "B", 3)]
    with figures_drawn(module) as figures:
        block_steps(BlockManager(3, 4), calls, title="Who owns what?", alt="Tables and pool.")
    arrows = drawn.arrows(figures[-1].axes[0])
    (copy,) = (t for t in arrows if to_hex(t.arrow_patch.get_edgecolor()) == module.ORANGE)
    assert (copy.xyann[0], copy.xy[0]) == (2.0, 6.8)  # the middles of blocks 0 and 1
