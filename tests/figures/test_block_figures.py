"""Figures of paged memory: every slot in its owner's colour, every table entry with an arrow to its own block."""

import drawn
import pytest
from matplotlib.colors import to_hex

from pagewise.figures import blocks as block_figures
from pagewise.figures.blocks import NOBODY, OWNERS, SHARED, chains, memory_map, snapshot, tables_and_pool
from pagewise.figures.charts import stacks
from pagewise.paged_blocks import BlockManager

P = 4


@pytest.fixture
def forked():
    """A and B share block 0 and part in block 1 (A's) and 2 (B's)."""
    manager = BlockManager(4, P)
    manager.allocate("A", [1, 2, 3, 4, 5, 6])
    manager.fork("A", "B")
    manager.append("B", 7)
    return manager


def fills(ax):
    return [to_hex(patch.get_facecolor()) for patch in ax.patches if hasattr(patch, "get_width")]


def test_snapshot_keeps_what_was_when_the_manager_moves_on(forked):
    before = snapshot(forked)
    forked.free("A")
    assert before.tables == {"A": [0, 1], "B": [0, 2]}
    assert before.lengths == {"A": 6, "B": 7}
    assert before.ref_counts == [2, 1, 1, 0]
    assert before.contents == ["1", "2", "3", "4", "5", "6", "", "", "5", "6", "7", "", "", "", "", ""]


def test_snapshot_takes_contents_from_elsewhere(forked):
    assert snapshot(forked, list("abcdefghijklmnop")).contents[8] == "i"


def test_owners_of_a_slot_are_those_with_a_token_there(forked):
    shot = snapshot(forked)
    assert [shot.owners(slot) for slot in (0, 5, 6, 10, 11, 12)] == [["A", "B"], ["A"], [], ["B"], [], []]


@pytest.fixture
def now(shown, forked):
    """A figure of the tables and the pool."""
    tables_and_pool({"now": snapshot(forked)}, title="Who holds what?")
    return shown[0].axes[0]


def test_slots_are_dark_if_shared_in_their_owners_colour_if_held_and_hatched_if_given_and_empty(now):
    assert fills(now)[: 4 * P] == [SHARED] * 4 + [OWNERS[0]] * 2 + [NOBODY] * 2 + [OWNERS[1]] * 3 + [NOBODY] * 5
    hatches = [patch.get_hatch() for patch in now.patches if hasattr(patch, "get_width")][: 4 * P]
    assert hatches == [None] * 6 + ["////"] * 2 + [None] * 3 + ["////"] + [None] * 4


def test_each_entry_of_a_table_points_at_its_block(now):
    assert [arrow.xy[0] for arrow in drawn.arrows(now)] == [block * (P + 0.8) + P / 2 for block in (0, 1, 0, 2)]


def test_reference_counts_stand_under_the_blocks(now):
    assert {"block 0\nin 2 tables", "block 1\nin 1 table", "block 3\nfree"} <= set(drawn.texts(now))


def test_owner_keeps_its_colour_from_moment_to_moment(shown, forked):
    both = snapshot(forked)
    forked.free("A")
    tables_and_pool({"both": both, "B alone": snapshot(forked)}, title="When?")
    first, second = (fills(ax)[: 4 * P] for ax in shown[0].axes)
    assert first[:4] == [SHARED] * 4
    assert second == [OWNERS[1]] * 4 + [NOBODY] * 4 + [OWNERS[1]] * 3 + [NOBODY] * 5


def test_a_copy_is_an_arrow_from_block_to_block_in_its_own_panel(shown, forked):
    shot = snapshot(forked)
    tables_and_pool({"before": shot, "now": shot}, title="What is copied?", copies={"now": [(1, 2)]})
    before, now = shown[0].axes
    assert "copy" not in drawn.texts(before)
    assert drawn.texts(now).count("copy") == 1
    tips = [text.xy[0] for text in drawn.arrows(now)]
    assert tips[-1] == 2 * (P + 0.8) + P / 2


def test_a_query_points_at_its_blocks_in_the_order_of_the_table(shown, forked):
    block_figures.query_over_blocks(snapshot(forked), "B", [0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.3], title="Where?")
    ax = shown[0].axes[0]
    tips = [text.xy[0] for text in drawn.arrows(ax)]
    assert tips == [block * (P + 0.8) + P / 2 for block in (0, 2)]
    assert {"entry 0: tokens 0–3", "entry 1: tokens 4–6"} <= set(drawn.texts(ax))
    bars = [patch for patch in ax.patches if hasattr(patch, "get_width") and patch.get_width() == 0.7]
    assert [bar.get_height() for bar in bars] == pytest.approx([0.5, 1, 0.5, 0.5, 0.5, 0.5, 1.5])
    assert [bar.get_x() for bar in bars[4:]] == pytest.approx([2 * (P + 0.8) + 0.15 + i for i in range(3)])


def test_chains_point_from_parent_to_child_and_are_filled_in_their_owners_colour(shown):
    manager = BlockManager(8, P, prefix_cache=True)
    for name, tokens in {"A": [1] * 8, "B": [1] * 4 + [2] * 4, "C": [1] * 4}.items():
        manager.allocate(name, [*tokens, 0])
        manager.commit(name, len(tokens) + 1)
    manager.free("A")
    prefixes = [p for block in range(8) if (p := manager.prefix(block))]
    owners = {block: [name for name in "BC" if block in manager.block_table(name)] for block in range(8)}
    chains(prefixes, owners, {p: str(p.tokens) for p in prefixes}, title="Which?", colours={"B": "#123456"})
    ax = shown[0].axes[0]
    assert len(prefixes) == 3
    assert fills(ax) == [SHARED, NOBODY, "#123456"]
    labels = [text for text in ax.texts if "block" in text.get_text()]
    assert all(f"block {next(iter(p.blocks))}" in text.get_text() for p, text in zip(prefixes, labels, strict=True))
    root = labels[0].get_position()[0]
    assert all(text.get_position()[0] > root for text in labels[1:])
    assert len({text.get_position()[1] for text in labels[1:]}) == 2


def test_no_prefixes_make_an_empty_figure(shown):
    chains([], {}, {}, title="Which?")
    assert fills(shown[0].axes[0]) == []


def test_memory_map_draws_each_piece_once_in_its_owners_colour(shown):
    rows = {
        "pieces": [("used", "a"), ("used", "a"), ("reserved", "a"), ("external", None), ("used", "b")],
        "blocks": [("used", "a"), ("used", "b"), ("used", "a"), ("internal", "a"), ("idle", None)],
    }
    memory_map(rows, title="What is where?")
    ax = shown[0].axes[0]
    a, b, white, grey = *OWNERS[:2], NOBODY, "#d3d3da"
    assert fills(ax) == [a, white, grey, b, a, b, a, white, white]
    assert [patch.get_width() for patch in ax.patches] == [2] + [1] * 8
    assert [bool(patch.get_hatch()) for patch in ax.patches] == [0, 1, 1, 0, 0, 0, 0, 1, 0]
    assert drawn.texts(ax) == ["a", "b", "a", "b", "a"]


def test_memory_map_names_no_piece_that_is_narrower_than_its_name(shown):
    memory_map({"pieces": [("used", "a")] * 78 + [("used", "b")] * 2}, title="What is where?")
    assert drawn.texts(shown[0].axes[0]) == ["a"]


def test_stacks_add_up_and_print_what_has_room(shown):
    stacks(["one", "two"], {"a": [0.5, 0.98], "b": [0.5, 0.02]}, title="Where?", xlabel="share (%)")
    ax = shown[0].axes[0]
    bars = [patch for patch in ax.patches if patch.get_width()]
    assert [bar.get_width() for bar in bars] == pytest.approx([50, 98, 50, 2])
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 0, 50, 98])
    assert [text for text in drawn.texts(ax) if text] == ["50", "98", "50"]
