"""A sequence's bits depend on its batch exactly where its cut does."""

import pytest

from pagewise.experiments.decode_schedules import BATCHES, SCHEDULES, TILE
from pagewise.experiments.neighbours import cut_of, same_bits


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_cut_holds_every_tile_once(name, batch):
    lengths = BATCHES[batch]
    for sequence in (0, len(lengths) - 1):
        assert sum(cut_of(name, lengths, sequence)) == -(-lengths[sequence] // TILE)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("not split", True),
        ("FlashAttention-2's heuristic", False),
        ("splits of 512 keys", True),
        ("FlashAttention-3's rule", False),
        ("equal ranges", False),
    ],
)
def test_only_fixed_cuts_keep_the_bits_of_a_short_chat(name, same):
    assert same_bits(name, [131072] + [1024] * 31, 1) is same
