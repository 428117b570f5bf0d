"""What the tests of paged blocks share: all that can be seen of a manager, its invariants, the bits of a tensor."""

from collections import Counter

import torch

from pagewise.paged_blocks import BlockManager


def snapshot(manager: BlockManager) -> dict:
    """Everything a caller can see, eviction order and pending copies included (which are not drained)."""
    ids = manager.sequences
    return {
        "tables": {i: manager.block_table(i) for i in ids},
        "tokens": {i: manager.tokens(i) for i in ids},
        "refs": [manager.ref_count(b) for b in range(manager.num_blocks)],
        "free": manager.free_blocks,
        "prefixes": [manager.prefix(b) for b in range(manager.num_blocks)],
        "stats": manager.stats(),
        "copies": dict(manager._copies),
    }


def check_invariants(manager: BlockManager) -> None:
    tables = {i: manager.block_table(i) for i in manager.sequences}
    counts = Counter(block for table in tables.values() for block in table)
    assert [counts[b] for b in range(manager.num_blocks)] == [manager.ref_count(b) for b in range(manager.num_blocks)]
    free, used = manager.free_blocks, {b for table in tables.values() for b in table}
    assert len(set(free)) == len(free) == manager.num_free_blocks
    assert not used & set(free)
    assert used | set(free) == set(range(manager.num_blocks))
    P = manager.block_size
    for seq_id, table in tables.items():
        assert len(table) == -(-manager.num_tokens(seq_id) // P)
        assert len(set(table)) == len(table)
    places = {}  # of each block: in which tables it stands, and where
    for seq_id, table in tables.items():
        for place, block in enumerate(table):
            places.setdefault(block, []).append((seq_id, place))
    for holders in places.values():  # what shares a block stands at the same place after the same tokens
        assert len({place for _, place in holders}) == 1
        if len(holders) > 1:
            place = holders[0][1]
            assert len({tuple(manager.tokens(i)[: (place + 1) * P]) for i, _ in holders}) == 1
    stats = manager.stats()
    assert (stats.used, stats.free) == (len(used), len(free))
    assert stats.cached == sum(manager.prefix(b) is not None for b in range(manager.num_blocks))


def bits(t):
    """Comparable whatever the dtype; NaN equals itself."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize])
