"""Words in a paged cache: what a table reads is what the cache holds, before a copy and after it."""

from pagewise.experiments.words_in_blocks import read_words, spelled, write_words
from pagewise.paged_blocks import BlockManager, PagedKVCache


def test_a_fork_reads_its_own_words_only_after_the_copy():
    manager, cache = BlockManager(num_blocks=3, block_size=2), PagedKVCache(1, 3, 2, 1, 1)
    cache.k[0].zero_()
    manager.allocate("A", [1, 2, 3])
    write_words(manager, cache, "A", 0)
    manager.fork("A", "B")
    manager.append("B", 4)
    assert read_words(manager, cache, "B") == "the cat  "
    assert spelled(manager, cache).contents == ["the", "cat", "sat", "", "", ""]
    assert spelled(manager).contents == ["the", "cat", "sat", "", "sat", "on"]
    cache.copy_blocks(manager.take_copies())
    write_words(manager, cache, "B", 3)
    assert [read_words(manager, cache, name) for name in "AB"] == ["the cat sat", "the cat sat on"]
