"""How often a prefix cache finds a prompt, by the order in which its blocks are evicted (lesson 4 in depth).

Requests begin with one of 16 instructions of six blocks, the popular ones more often, and go on with a question of
their own, which fills one block and a half. Four requests run at a time. K and V are not computed: only block tables,
reference counts and the cache are.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagewise.paged_blocks import BlockManager
from pagewise.paged_blocks.pool import PagedSequence
from pagewise.paged_blocks.prefix_cache import ROOT, Prefix, PrefixCache, block_digest

BLOCK_SIZE, INSTRUCTIONS, INSTRUCTION, QUESTION, RUNNING = 16, 16, 96, 24, 4
POOLS = (32, 48, 64, 96, 128, 192, 256, 512)


class BeginningFirst(BlockManager):
    """Frees the blocks of a sequence from its first to its last, so that beginnings are evicted before ends."""

    def release(self, sequence: PagedSequence) -> None:
        """Take all blocks from a sequence, the first block first."""
        sequence.block_table.reverse()
        super().release(sequence)


class NewestFirst(BlockManager):
    """Evicts the cached block that became free last."""

    def _take(self) -> int:
        if not self._blank:
            self._evictable.move_to_end(next(reversed(self._evictable)), last=False)
        return super()._take()


class NamesDecide(PrefixCache):
    """Trusts digests: a block can be found again as soon as the blocks before it are computed again."""

    def find(self, parent: Prefix | None, tokens: Sequence[int], digest: bytes | None = None) -> Prefix | None:
        """Return the cached prefix with the digest of `parent` and these tokens, or None. Nothing is compared."""
        if parent is None:
            return None
        prefix = self._by_digest.get(digest or block_digest(parent.digest, tokens))
        if prefix is not None:
            prefix.parent = parent.number
        return prefix

    def register(self, block: int, parent: Prefix | None, tokens: Sequence[int]) -> Prefix | None:
        """Remember that `block` holds `parent` continued by `tokens`, whichever past it had before."""
        self.find(parent, tokens)
        return super().register(block, parent, tokens)


class NewestFirstByName(NewestFirst):
    """Evicts the cached block that became free last, and finds blocks by their digests alone."""

    def __init__(self, *args: int, **options: bool) -> None:
        super().__init__(*args, **options)
        self._cache = NamesDecide()


def evicting(choose: Callable[[list[tuple[int, int]]], tuple[int, int]]) -> type[BlockManager]:
    """Return a manager that evicts the block which `choose` picks.

    `choose` gets (block, number of blocks before it in its chain) of each block that may go, the block that became free
    first at the front. It returns one of these pairs. Anything else raises ValueError when a block is evicted.
    """

    class Chosen(BlockManager):
        def __init__(self, *args: int, **options: bool) -> None:
            super().__init__(*args, **options)
            self._places: dict[int, int] = {}

        def release(self, sequence: PagedSequence) -> None:
            self._places |= {block: place for place, block in enumerate(sequence.block_table)}
            super().release(sequence)

        def _take(self) -> int:
            if not self._blank:
                free = [(block, self._places[block]) for block in self._evictable]
                if (chosen := choose(free)) not in free:
                    raise ValueError(f"choose must return one of the pairs that it gets, got {chosen!r}")
                self._evictable.move_to_end(chosen[0], last=False)
            return super()._take()

    return Chosen


POLICIES: Mapping[str, type[BlockManager]] = {
    "oldest chain, its end first": BlockManager,
    "oldest chain, its beginning first": BeginningFirst,
    "newest block first": NewestFirst,
}


def run(policy: type[BlockManager], num_blocks: int, *, num_requests: int = 300, seed: int = 0) -> BlockManager:
    """Serve the requests, and return the manager after the last one. Its `stats` count what was found."""
    manager = policy(num_blocks, BLOCK_SIZE, prefix_cache=True)
    draw = np.random.default_rng(seed)
    popularity = 1 / np.arange(1.0, INSTRUCTIONS + 1)
    for i in range(num_requests):
        if i >= RUNNING:
            manager.free(i - RUNNING)
        kind = int(draw.choice(INSTRUCTIONS, p=popularity / popularity.sum()))
        question = draw.integers(1000, size=QUESTION).tolist()
        manager.allocate(i, [kind] * INSTRUCTION + question)
        manager.commit(i, INSTRUCTION + QUESTION)
    return manager


def found(manager: BlockManager) -> float:
    """Return the percentage of full prompt blocks that were found in the cache."""
    stats = manager.stats()
    return 100 * stats.hits / (stats.hits + stats.misses)


def out_of_reach(manager: BlockManager) -> int:
    """Return how many cached blocks no prompt can find, because a block before them is gone."""
    parents = {prefix.number: prefix.parent for block in range(manager.num_blocks) if (prefix := manager.prefix(block))}

    def is_complete(number: int) -> bool:
        return number == ROOT.number or (number in parents and is_complete(parents[number]))

    return sum(not is_complete(number) for number in parents)
