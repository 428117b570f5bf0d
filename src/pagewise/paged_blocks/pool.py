"""The blocks of a cache: which are free, how many tables hold each, and what full ones contain (lesson 4).

`BlockPool` knows no sequences by name. Its callers own the state of a sequence: a `PagedSequence` with its tokens, its
block table and the number of its computed tokens. `BlockManager` keeps such objects by the ids of sequences, and the
engine of lesson 9 keeps them in its requests.
"""

from collections import OrderedDict
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from pagewise.paged_blocks.prefix_cache import ROOT, Prefix, PrefixCache, TokenBlocks
from pagewise.tools.checks import check_count, check_counts
from pagewise.tools.sizes import cdiv


class OutOfBlocks(RuntimeError):
    """The call needs more free blocks than there are. Nothing has changed: free a sequence and call again."""


class BlockStats(NamedTuple):
    """The state of the blocks now, and the events since the manager was made."""

    used: int  # blocks in at least one table, each counted once
    free: int  # all other blocks
    cached: int  # blocks that a prompt can find by content, used or free
    hits: int  # full prompt blocks that were found in the cache
    misses: int  # full prompt blocks that were not found
    evictions: int  # cached blocks that were overwritten
    copies: int  # copy-on-write copies that were ordered


@dataclass(eq=False)
class PagedSequence:
    """Tokens, the blocks that hold their K and V, and the number of tokens whose K and V are computed."""

    tokens: list[int]
    _: KW_ONLY
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefix: Prefix | None = ROOT  # ends with the last registered block; None: a digest collided


class BlockPool:
    """Reference counts, free blocks and cached content. It moves numbers only; `PagedKVCache` holds the tensors.

    These statements are true after every call.
    - ref_count(block) is how often the block occurs in tables. A block is free iff that is 0.
    - A block that is in two tables has the same index in both, and the same tokens precede it.
    - A call that raised has changed nothing, not even the order of eviction.

    A new block is a free block without cached content if there is one, first the block that was freed last. Content
    that another block holds too does not count. Otherwise the cached block that has been free for longest is evicted.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = False) -> None:
        check_counts(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks, self.block_size = int(num_blocks), int(block_size)
        self.prefix_cache = prefix_cache
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free blocks without cached content; the last is next
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free blocks with cached content; the first is next
        self._cache = PrefixCache()  # stays empty without prefix_cache
        self._copies: dict[int, int] = {}  # {dst: src} of the copies that `take_copies` will return
        self._hits = self._misses = self._evictions = self._num_copies = 0

    def hold(self, sequence: PagedSequence, tokens: TokenBlocks, spare: int = 0) -> int:
        """Give a sequence blocks for the tokens that it begins with, and return how many of these are cached.

        Cached blocks are shared. Raises OutOfBlocks if fewer than `spare` blocks would stay free.
        """
        P, num_tokens, prefix = self.block_size, len(tokens.tokens), ROOT
        table: list[int] = []
        revived = 0  # blocks that are free now, but not for new content
        for prefix in self._cache.chain(tokens):
            block = next(iter(prefix.blocks))
            table.append(block)
            revived += self._ref_counts[block] == 0
        hits, num_blocks = len(table), cdiv(num_tokens, P)
        free = self.num_free_blocks - revived - spare
        if num_blocks - hits > free:
            raise self._lack(num_blocks - hits, free, f"a prompt of {num_tokens} tokens")
        for block in table:
            self._share(block)
        while len(table) < num_blocks:
            table.append(self._take())
        sequence.block_table, sequence.num_computed, sequence.prefix = table, hits * P, prefix
        if self.prefix_cache:
            self._hits += hits
            self._misses += (num_tokens - 1) // P - hits
        return hits * P

    def num_cached(self, tokens: TokenBlocks) -> int:
        """Return how many of these tokens `hold` would find in the cache now."""
        return len(self._cache.chain(tokens)) * self.block_size

    def resize(self, sequence: PagedSequence, num_tokens: int) -> None:
        """Let a sequence have the blocks of its first `num_tokens` tokens, and write those that are not computed yet.

        A block into which it will write and which others read is copied. Blocks behind the last token are released.
        Raises OutOfBlocks if there are too few free blocks.
        """
        table, P = sequence.block_table, self.block_size
        num_kept = -(-num_tokens // P)  # rounded up
        written = sequence.num_computed // P  # the only block that may be shared: the others are new
        is_shared = sequence.num_computed < num_tokens and written < len(table) and self._ref_counts[table[written]] > 1
        needed = num_kept - len(table) + is_shared
        if needed > 0 and needed > self.num_free_blocks:
            raise self._lack(needed, self.num_free_blocks, f"a sequence of {num_tokens} tokens")
        if is_shared:
            self._copy(table, written)
        while len(table) > num_kept:
            self._release(table.pop())
        while len(table) < num_kept:
            table.append(self._take())

    def register(self, sequence: PagedSequence, num_computed: int) -> None:
        """Note that K and V of the first `num_computed` tokens are written. Full blocks of these become shareable."""
        P = self.block_size
        for i in range(sequence.num_computed // P, num_computed // P if self.prefix_cache else 0):
            tokens = sequence.tokens[i * P : (i + 1) * P]
            sequence.prefix = self._cache.register(sequence.block_table[i], sequence.prefix, tokens)
        sequence.num_computed = num_computed

    def share(self, parent: PagedSequence, child: PagedSequence) -> None:
        """Let a sequence that holds no blocks have those of another one, with the same tokens. Nothing is copied."""
        for block in parent.block_table:
            self._share(block)
        child.block_table, child.num_computed = parent.block_table.copy(), parent.num_computed
        child.prefix = parent.prefix

    def release(self, sequence: PagedSequence) -> None:
        """Take all blocks from a sequence, the last first. Blocks that no other sequence holds become free."""
        self.resize(sequence, 0)
        sequence.num_computed, sequence.prefix = 0, ROOT

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (src, dst) ordered since the last call. Carry them out before anything is written.

        Read all sources before any destination is written, as `PagedKVCache.copy_blocks` does. The content of a source
        lasts until the next write, even if the source is free by now or has a new owner. A source never waits for a
        copy of its own. A copy into a block that was freed meanwhile is dropped.
        """
        if not self._copies:
            return []
        copies, self._copies = self._copies, {}
        return [(src, dst) for dst, src in copies.items() if self._ref_counts[dst] or dst in self._cache.by_block]

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks in no table, with or without cached content."""
        return len(self._blank) + len(self._evictable)

    @property
    def free_blocks(self) -> list[int]:
        """The free blocks, in the order in which they will be taken."""
        return [*reversed(self._blank), *self._evictable]

    def ref_count(self, block: int) -> int:
        """Return how many tables hold `block`."""
        check_count("block", block, minimum=0)
        if block >= self.num_blocks:
            raise ValueError(f"block must be below num_blocks = {self.num_blocks}, got {block}")
        return self._ref_counts[block]

    def prefix(self, block: int) -> Prefix | None:
        """Return the cached prefix that ends with `block`, or None."""
        return self._cache.by_block.get(block)

    def stats(self) -> BlockStats:
        """Return the state of the blocks now, and the events so far."""
        free, events = self.num_free_blocks, (self._hits, self._misses, self._evictions, self._num_copies)
        return BlockStats(self.num_blocks - free, free, len(self._cache.by_block), *events)

    def _lack(self, needed: int, free: int, who: str) -> OutOfBlocks:
        remedy = "free a sequence" if needed <= self.num_blocks else f"make a pool of more than {self.num_blocks}"
        return OutOfBlocks(f"{who} needs {needed} more blocks and {free} are free: {remedy}")

    def _copy(self, table: list[int], i: int) -> None:
        """Order a copy of block i of a table for this table alone."""
        src, table[i] = table[i], self._take()
        self._release(src)
        self._copies[table[i]] = self._copies.get(src, src)  # src itself may still wait for its content
        self._num_copies += 1

    def _take(self) -> int:
        """Take a free block, which the caller will overwrite. Its reference count becomes 1."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._cache.forget(block)
            self._evictions += 1
        self._ref_counts[block] = 1
        self._copies.pop(block, None)  # the copy was ordered for an earlier owner
        return block

    def _share(self, block: int) -> None:
        """Add a reference. The first reference takes a cached block out of the free blocks."""
        if self._ref_counts[block] == 0:
            del self._evictable[block]
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        """Remove a reference. A block without references is free."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        prefix = self._cache.by_block.get(block)
        if prefix is not None and len(prefix.blocks) > 1:  # this copy of the content is worth nothing
            self._cache.forget(block)
        if block in self._cache.by_block:
            self._evictable[block] = None
        else:
            self._blank.append(block)
