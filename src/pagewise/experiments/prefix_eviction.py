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


class NewestCopyNamed(PrefixCache):
    """Lets content that is computed again take its name from an older block, whose own past is gone."""

    def register(self, block: int, parent: Prefix | None, tokens: Sequence[int]) -> Prefix | None:
        """Remember that `block` holds `parent` continued by `tokens`, whichever block had this name before."""
        if parent is not None and block not in self.by_block:
            digest = block_digest(parent.digest, tokens)
            if digest in self._by_digest and self.find(parent, tokens, digest) is None:
                del self._by_digest[digest]
        return super().register(block, parent, tokens)

    def forget(self, block: int) -> None:
        """Forget what `block` holds. A name that another block has taken over stays with it."""
        prefix = self.by_block[block]
        owner = self._by_digest.setdefault(prefix.digest, prefix)
        super().forget(block)
        if owner is not prefix:
            self._by_digest[prefix.digest] = owner


class NewestFirstTakingNames(NewestFirst):
    """Evicts the cached block that became free last, and lets a new copy take the name of an old one."""

    def __init__(self, *args: int, **options: bool) -> None:
        super().__init__(*args, **options)
        self._cache = NewestCopyNamed()


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


def refused(manager: BlockManager) -> float:
    """Return the percentage of computed full blocks that were not cached: another past had their name.

    For managers of `run`, where no prefix has two copies: a computed block that was cached is so still, or was evicted.
    """
    stats = manager.stats()
    return 100 * (1 - (stats.evictions + stats.cached) / stats.misses)


def out_of_reach(manager: BlockManager) -> int:
    """Return how many cached blocks no prompt can find, because a block before them is gone."""
    parents = {prefix.number: prefix.parent for block in range(manager.num_blocks) if (prefix := manager.prefix(block))}

    def is_complete(number: int) -> bool:
        return number == ROOT.number or (number in parents and is_complete(parents[number]))

    return sum(not is_complete(number) for number in parents)
