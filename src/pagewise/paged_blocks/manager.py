"""Paged blocks: which sequence owns which blocks of the KV cache (lesson 4).

The cache consists of N blocks with P token slots each. A sequence owns a list of blocks, its block table, which grows
by one block at a time. At most P − 1 of its slots are allocated and unused, and blocks need not be neighbours:

    slot(i) = block_table[i // P] · P + i % P        is the slot of token i

Reference counts let sequences share blocks: `fork` copies a table and not the cache. The first `append` into a shared,
partly filled block gives the sequence a copy of that block (copy-on-write). With `prefix_cache=True`, full blocks keep
their content after their sequences end, and a new prompt can find them by content (see `prefix_cache`).
Kwon et al. 2023 (PagedAttention). The chained hash and the list of free blocks follow vLLM's later block pool.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from pagewise.paged_blocks.prefix_cache import ROOT, Prefix, PrefixCache, TokenBlocks, as_token
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


class _Sequence:
    def __init__(self, tokens: list[int], table: list[int], num_computed: int, prefix: Prefix | None) -> None:
        self.tokens, self.table, self.num_computed = tokens, table, num_computed
        self.prefix = prefix  # ends with the last committed block; None: a digest collided, nothing more is shared


class BlockManager:
    """Block tables, reference counts and free blocks. It moves numbers only; `PagedKVCache` holds the tensors.

    These statements are true after every call. `append` takes O(1) time.
    - ref_count(block) is how often the block occurs in tables. A block is free iff that is 0.
    - A block that is in two tables has the same index in both, and the same tokens precede it.
    - Only one sequence writes into a block that is not full (copy-on-write). No one writes into a committed block.
    - A call that raised has changed nothing, not even the order of eviction.

    A new block is a free block without cached content if there is one, first the block that was freed last. Content
    that another block holds too does not count. Otherwise the cached block that has been free for longest is evicted.
    `free` releases a table from its last block to its first, so that the end of a chain is evicted before its parents.
        A holds blocks [0, 1, 2] and B holds [0, 3]; all are full and committed. After free(A) and free(B), the order
        of eviction is 2, 1, 3, 0. Block 0 begins both chains, so it is evicted last. A new A would hit blocks 0 and 1.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = False) -> None:
        check_counts(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self._sequences: dict[Hashable, _Sequence] = {}
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free blocks without cached content; the last is next
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free blocks with cached content; the first is next
        self._cache = PrefixCache()  # stays empty without prefix_cache
        self._copies: dict[int, int] = {}  # {dst: src} of the copies that `take_copies` will return
        self._hits = self._misses = self._evictions = self._num_copies = 0

    def allocate(self, seq_id: Hashable, tokens: Iterable[int] | TokenBlocks) -> int:
        """Begin a sequence with its prompt, and return how many of its tokens are already in the cache.

        The result is a multiple of block_size and at most len(tokens) − 1, because the query of the last token is
        needed. The caller computes and writes `slots(seq_id, cached, len(tokens))`, then commits.

        Raises OutOfBlocks if there are too few free blocks. Raises ValueError or TypeError if seq_id is in use or not
        hashable, or if tokens is empty or does not hold 64-bit ints.
        """
        if seq_id in self._sequences:
            raise ValueError(f"seq_id {seq_id!r} is in use: free it first, or choose another")
        tokens = TokenBlocks.of(tokens, self.block_size)
        if not len(tokens):
            raise ValueError("tokens must hold at least 1 token, got none")
        P, hits = self.block_size, self._cache.chain(tokens)
        shared = [next(iter(prefix.blocks)) for prefix in hits]
        num_new = cdiv(len(tokens), P) - len(shared)
        revived = sum(self._ref_counts[block] == 0 for block in shared)  # free now, but not for new content
        self._check_free(num_new, self.num_free_blocks - revived, f"a prompt of {len(tokens)} tokens")
        for block in shared:
            self._share(block)
        table = shared + [self._take() for _ in range(num_new)]
        self._sequences[seq_id] = _Sequence(tokens.tokens.copy(), table, len(shared) * P, hits[-1] if hits else ROOT)
        if self.prefix_cache:
            self._hits += len(hits)
            self._misses += (len(tokens) - 1) // P - len(hits)
        return len(shared) * P

    def cached_prefix(self, tokens: Iterable[int] | TokenBlocks) -> int:
        """Return how many of these tokens `allocate` would find in the cache now."""
        return len(self._cache.chain(TokenBlocks.of(tokens, self.block_size))) * self.block_size

    def append(self, seq_id: Hashable, token: int) -> int:
        """Add one token, and return the slot for its K and V.

        If the last block is full, the sequence gets another block. If the last block is partly filled and shared, the
        sequence gets a block of its own, and the copy of the old content is ordered (see `take_copies`).
        """
        seq, token = self._sequence(seq_id), as_token(token)
        offset = len(seq.tokens) % self.block_size
        if offset == 0:
            self._check_free(1, self.num_free_blocks, f"sequence {seq_id!r}, whose blocks are full,")
            seq.table.append(self._take())
        elif self._ref_counts[src := seq.table[-1]] > 1:
            self._check_free(1, self.num_free_blocks, f"sequence {seq_id!r}, whose last block is shared,")
            seq.table[-1] = dst = self._take()
            self._release(src)
            self._copies[dst] = self._copies.get(src, src)  # src itself may still wait for its content
            self._num_copies += 1
        seq.tokens.append(token)
        return seq.table[-1] * self.block_size + offset

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, 1 at least, and release the blocks that hold none of these.

        Raises ValueError if more tokens were committed, or if the cut is inside a block that is shared or cached.
        """
        seq, P = self._sequence(seq_id), self.block_size
        check_count("num_tokens", num_tokens, minimum=max(1, seq.num_computed))
        cut = seq.table[num_tokens // P : cdiv(num_tokens, P)] if num_tokens < len(seq.tokens) else []
        if any(self._ref_counts[block] > 1 or block in self._cache for block in cut):
            raise ValueError(f"num_tokens = {num_tokens} cuts block {cut[0]}, which others read: cut between blocks")
        for block in reversed(seq.table[cdiv(num_tokens, P) :]):
            self._release(block)
        del seq.table[cdiv(num_tokens, P) :], seq.tokens[num_tokens:]

    def commit(self, seq_id: Hashable, num_computed: int) -> None:
        """Make full blocks shareable, now that K and V of the first `num_computed` tokens are written.

        Raises ValueError if the sequence has fewer tokens, or if more were committed (or found in the cache) before.
        """
        seq = self._sequence(seq_id)
        check_count("num_computed", num_computed, minimum=0)
        if not seq.num_computed <= num_computed <= len(seq.tokens):
            limits = f"{seq.num_computed}, the tokens computed before, to {len(seq.tokens)}, the tokens of {seq_id!r}"
            raise ValueError(f"num_computed must be from {limits}; got {num_computed}")
        P = self.block_size
        for i in range(seq.num_computed // P, num_computed // P if self.prefix_cache else 0):
            seq.prefix = self._cache.register(seq.table[i], seq.prefix, seq.tokens[i * P : (i + 1) * P])
        seq.num_computed = num_computed

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Begin `child_id` as a twin of `parent_id`: the same tokens in the same blocks. Nothing is copied.

        If K and V of some tokens are not yet written when the last block is copied, each twin writes them itself.
        """
        parent = self._sequence(parent_id)
        if child_id in self._sequences:
            raise ValueError(f"child_id {child_id!r} is in use: free it first, or choose another")
        for block in parent.table:
            self._share(block)
        tokens, table = parent.tokens.copy(), parent.table.copy()
        self._sequences[child_id] = _Sequence(tokens, table, parent.num_computed, parent.prefix)

    def free(self, seq_id: Hashable) -> None:
        """End a sequence. Blocks that no other sequence holds become free, the last first; cached content stays."""
        seq = self._sequence(seq_id)
        del self._sequences[seq_id]
        for block in reversed(seq.table):
            self._release(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (src, dst) ordered since the last call. Carry them out before anything is written.

        Read all sources before any destination is written, as `PagedKVCache.copy_blocks` does. The content of a source
        lasts until the next write, even if the source is free by now or has a new owner. A source never waits for a
        copy of its own. A copy into a block that was freed meanwhile is dropped.
        """
        copies = [(src, dst) for dst, src in self._copies.items() if self._ref_counts[dst] or dst in self._cache]
        self._copies.clear()
        return copies

    def block_table(self, seq_id: Hashable) -> list[int]:
        """Return the physical blocks of a sequence, in the order of its tokens (a copy)."""
        return self._sequence(seq_id).table.copy()

    def slots(self, seq_id: Hashable, start: int, stop: int) -> list[int]:
        """Return the slots of tokens start … stop − 1."""
        seq, P = self._sequence(seq_id), self.block_size
        check_count("start", start, minimum=0)
        check_count("stop", stop, minimum=start)
        if stop > len(seq.tokens):
            raise ValueError(f"stop must be at most {len(seq.tokens)}, the tokens of sequence {seq_id!r}, got {stop}")
        return [seq.table[i // P] * P + i % P for i in range(start, stop)]

    def num_tokens(self, seq_id: Hashable) -> int:
        """Return how many tokens a sequence has, computed or not."""
        return len(self._sequence(seq_id).tokens)

    def tokens(self, seq_id: Hashable) -> list[int]:
        """Return the tokens of a sequence (a copy)."""
        return self._sequence(seq_id).tokens.copy()

    @property
    def sequences(self) -> list[Hashable]:
        """The ids of all sequences, oldest first."""
        return list(self._sequences)

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
        return self._cache.of_block(block)

    def stats(self) -> BlockStats:
        """Return the state of the blocks now, and the events so far."""
        events = self._hits, self._misses, self._evictions, self._num_copies
        return BlockStats(self.num_blocks - self.num_free_blocks, self.num_free_blocks, len(self._cache), *events)

    def _check_free(self, needed: int, free: int, who: str) -> None:
        if needed > free:
            remedy = "free a sequence" if needed <= self.num_blocks else f"make a pool of more than {self.num_blocks}"
            raise OutOfBlocks(f"{who} needs {needed} more blocks and {free} are free: {remedy}")

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
        prefix = self._cache.of_block(block)
        if prefix is not None and len(prefix.blocks) > 1:  # this copy of the content is worth nothing
            self._cache.forget(block)
        if block in self._cache:
            self._evictable[block] = None
        else:
            self._blank.append(block)

    def _sequence(self, seq_id: Hashable) -> _Sequence:
        if seq_id not in self._sequences:
            raise ValueError(f"no sequence {seq_id!r}: allocate or fork it first")
        return self._sequences[seq_id]
