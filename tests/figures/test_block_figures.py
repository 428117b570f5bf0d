"""Figures of paged memory: every slot in its owner's colour, every table entry with an arrow to its own block."""

import matplotlib as mpl

mpl.use("Agg")

import pytest
from matplotlib.colors import to_hex

from pagewise.figures import blocks as block_figures
from pagewise.figures.blocks import NOBODY, OWNERS, SHARED, chains, pool_over_time, snapshot, tables_and_pool
from pagewise.figures.charts import PALETTE, SAND
from pagewise.paged_blocks import BlockManager

P = 4


pytestmark = pytest.mark.usefixtures("shown")  # every figure here is rendered


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


def test_pool_has_shared_slots_dark_and_the_others_in_their_owners_colour(shown, forked):
    tables_and_pool({"now": snapshot(forked)}, title="Who holds what?")
    pool = fills(shown[0].axes[0])[: 4 * P]
    assert pool == [SHARED] * 4 + [OWNERS[0]] * 2 + [NOBODY] * 2 + [OWNERS[1]] * 3 + [NOBODY] * 5


def test_each_entry_of_a_table_points_at_its_block(shown, forked):
    tables_and_pool({"now": snapshot(forked)}, title="Where?")
    tips = [text.xy[0] for text in shown[0].axes[0].texts if getattr(text, "arrow_patch", None)]
    middles = [block * (P + 0.8) + P / 2 for block in range(4)]
    assert tips == [middles[block] for block in (0, 1, 0, 2)]


def test_reference_counts_stand_under_the_blocks(shown, forked):
    tables_and_pool({"now": snapshot(forked)}, title="Who holds what?")
    texts = [text.get_text() for text in shown[0].axes[0].texts]
    assert {"block 0\nheld by 2", "block 1\nheld by 1", "block 3\nfree"} <= set(texts)


def test_owner_keeps_its_colour_from_moment_to_moment(shown, forked):
    both = snapshot(forked)
    forked.free("A")
    pool_over_time({"both": both, "B alone": snapshot(forked)}, title="When?")
    first, second = (fills(shown[0].axes[0])[i * 4 * P :][: 4 * P] for i in (0, 1))
    assert first[:4] == [SHARED] * 4
    assert second == [OWNERS[1]] * 4 + [NOBODY] * 4 + [OWNERS[1]] * 3 + [NOBODY] * 5
    texts = [text.get_text() for text in shown[0].axes[0].texts]
    assert {"A: [0, 1]\nB: [0, 2]", "B: [0, 2]"} <= set(texts)
    assert [tick.get_text() for tick in shown[0].axes[0].get_yticklabels()] == ["both", "B alone"]


def test_chains_point_from_parent_to_child_and_fill_what_is_in_use(shown):
    manager = BlockManager(8, P, prefix_cache=True)
    for name, tokens in {"A": [1] * 8, "B": [1] * 4 + [2] * 4}.items():
        manager.allocate(name, [*tokens, 0])
        manager.commit(name, 9)
    manager.free("A")
    prefixes = [p for block in range(8) if (p := manager.prefix(block))]
    used = set(manager.block_table("B"))
    chains(prefixes, used, {p: str(p.tokens) for p in prefixes}, title="Which?")
    ax = shown[0].axes[0]
    assert len(prefixes) == 3
    assert fills(ax).count(SAND) == 2
    assert fills(ax).count(NOBODY) == 1
    labels = [text for text in ax.texts if "block" in text.get_text()]
    assert all(f"block {next(iter(p.blocks))}" in text.get_text() for p, text in zip(prefixes, labels, strict=True))
    root = labels[0].get_position()[0]
    assert all(text.get_position()[0] > root for text in labels[1:])
    assert len({text.get_position()[1] for text in labels[1:]}) == 2


def test_no_prefixes_make_an_empty_figure(shown):
    chains([], [], {}, title="Which?")
    assert fills(shown[0].axes[0]) == []


def test_memory_map_colours_every_slot_and_names_each_piece_once(shown):
    rows = {
        "pieces": [("used", "a"), ("used", "a"), ("reserved", "a"), ("free", ""), ("used", "b")],
        "blocks": [("used", "a"), ("used", "b"), ("used", "a"), ("internal", "a"), ("free", "")],
    }
    block_figures.memory_map(rows, title="What is where?")
    ax = shown[0].axes[0]
    of = {"used": PALETTE[0], "reserved": PALETTE[1], "internal": PALETTE[2], "free": NOBODY}
    assert fills(ax) == [of[state] for slots in rows.values() for state, _ in slots]
    assert [text.get_text() for text in ax.texts] == ["a", "b", "a", "b", "a"]


def test_stacks_add_up_and_print_what_has_room(shown):
    block_figures.stacks(["one", "two"], {"a": [0.5, 0.98], "b": [0.5, 0.02]}, title="Where?", xlabel="share (%)")
    ax = shown[0].axes[0]
    bars = [patch for patch in ax.patches if patch.get_width()]
    assert [bar.get_width() for bar in bars] == pytest.approx([50, 98, 50, 2])
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 0, 50, 98])
    assert [text.get_text() for text in ax.texts] == ["50", "98", "50"]
