"""The pool of physical blocks: how often each is used, and which free one is taken next (lesson 4).

A block is used while some table holds it (its reference count), free otherwise; a free one may still hold content that
the prefix cache can find. Every operation is O(1): a stack for free blocks without content, an ordered dictionary (a
doubly linked list with an index) for those with content, so that a hit takes a block out of the middle.
"""

from collections import OrderedDict
from collections.abc import Sequence

from pagewise.paged_blocks.prefix_cache import Prefix, PrefixCache


class OutOfBlocks(RuntimeError):
    """The call needs more free blocks than there are. Nothing was changed: free a sequence and call again."""


class BlockPool:
    """`num_blocks` blocks, all free at first. The caller makes sure of free ones (`check_free`) before it takes any."""

    def __init__(self, num_blocks: int, *, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.cache = PrefixCache() if prefix_cache else None
        self.evictions = 0
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, nothing to find in them; taken from the end
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, cached; the next victim first

    @property
    def num_free(self) -> int:
        """Blocks in no table, whether or not they hold cached content."""
        return len(self._blank) + len(self._evictable)

    @property
    def free_blocks(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        return [*reversed(self._blank), *self._evictable]

    def check_free(self, needed: int, *, revived: int = 0, who: str) -> None:
        """Raise OutOfBlocks unless `needed` blocks are free besides `revived` free ones about to be shared."""
        free = self.num_free - revived
        if needed > free:
            remedy = "free a sequence" if needed <= self.num_blocks else f"make a pool of more than {self.num_blocks}"
            raise OutOfBlocks(f"{who} needs {needed} more blocks and {free} are free: {remedy}")

    def take(self) -> int:
        """A free block, to be overwritten, with one reference: a blank one, else the next victim of eviction."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self.cache.forget(block)
            self.evictions += 1
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; a free cached block is revived by its first."""
        if self.ref_counts[block] == 0:
            del self._evictable[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One reference less. Without any the block is free: evicted last if it alone holds cached content."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return
        prefix = self.prefix(block)
        if prefix is not None and len(prefix.blocks) > 1:  # others hold the same: this copy of it is worth nothing
            self.cache.forget(block)
            prefix = None
        if prefix is None:
            self._blank.append(block)
        else:
            self._evictable[block] = None

    def prefix(self, block: int) -> Prefix | None:
        """What `block` is cached as, or None."""
        return None if self.cache is None else self.cache.of_block(block)

    def find(self, parent: Prefix | None, tokens: Sequence[int]) -> Prefix | None:
        """The cached prefix that continues `parent` by `tokens`, or None."""
        return None if self.cache is None else self.cache.find(parent, tokens)

    def register(self, block: int, parent: Prefix | None, tokens: Sequence[int]) -> Prefix | None:
        """Let `block`, now computed, be found as `parent` continued by `tokens` (see `PrefixCache.register`)."""
        return None if self.cache is None else self.cache.register(block, parent, tokens)
