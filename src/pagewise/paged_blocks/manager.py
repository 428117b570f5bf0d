"""Paged blocks: who owns which piece of the KV cache (lesson 4).

The cache is cut into N blocks of P token slots. A sequence owns a list of blocks, its block table, which grows one
block at a time; its token i lives in

    slot(i) = block_table[i // P] · P + i % P

so no more than P − 1 slots per sequence are ever allocated and unused, and no two blocks need to be neighbours.
Blocks are shared by reference counts: `fork` copies a table, not the cache. Sharing ends where contents part: the
first `append` into a shared, partly filled block moves the sequence to a copy (copy-on-write). With
`prefix_cache=True` full blocks outlive their sequences and are found again by content (`prefix_cache`).
Kwon et al. 2023 (PagedAttention); the chained hash and the free list follow vLLM's later block pool.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from pagewise.paged_blocks.pool import BlockPool
from pagewise.paged_blocks.prefix_cache import ROOT, Prefix, as_token
from pagewise.tools.checks import check_count
from pagewise.tools.sizes import cdiv


class BlockStats(NamedTuple):
    """Blocks now, and events since the manager was made."""

    used: int  # blocks in some table, each counted once
    free: int  # all others
    cached: int  # blocks findable by content, used or free
    hits: int  # full prompt blocks found in the cache
    misses: int  # full prompt blocks looked for and not found
    evictions: int  # cached blocks overwritten
    copies: int  # copy-on-write copies ordered


class _Sequence:
    __slots__ = ("num_computed", "prefix", "table", "tokens")

    def __init__(self, tokens: list[int], table: list[int], num_computed: int, prefix: Prefix | None) -> None:
        self.tokens, self.table, self.num_computed = tokens, table, num_computed
        self.prefix = prefix  # of the last full block committed; None: a digest collided, nothing more is shared


class BlockManager:
    """Block tables, reference counts, free blocks. It moves numbers only; the tensors are `PagedKVCache`'s.

    Invariants, after every call:
    - ref_count(block) = how often block occurs in tables; a block is free iff that is 0;
    - a block in two tables stands at the same place in both, after the same tokens;
    - a block that is not full is written by one sequence only (copy-on-write), a committed one never again.
    Every call is all-or-nothing: a refused one changes nothing, not even the eviction order. Appending costs O(1).

    Which free block is taken next: one without cached content (or with content that another block holds too), the
    last freed first. When there is none, the cached block unused for longest is evicted, and of those freed together
    the deepest: `free` releases a table from its end, so a chain loses its tail before its parents.
        A holds blocks [0, 1, 2], B holds [0, 3]; all are full and committed. free(A), free(B) leave the order
        2, 1, 3, 0: block 0 is the root of both chains, was used last and goes last. Were A allocated again now, it
        would take blocks 0 and 1 out of the free list (hits) and a new block for its last token.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = False) -> None:
        check_count("num_blocks", num_blocks)
        check_count("block_size", block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self._pool = BlockPool(num_blocks, prefix_cache=prefix_cache)
        self._sequences: dict[Hashable, _Sequence] = {}
        self._copies: dict[int, int] = {}  # dst → src, not yet taken
        self._hits = self._misses = self._num_copies = 0

    def allocate(self, seq_id: Hashable, tokens: Iterable[int]) -> int:
        """Begin a sequence with its prompt; return how many of its tokens are in the cache already.

        That number is a multiple of block_size and at most len(tokens) − 1: the last token must be computed, or
        there would be no query. The caller computes and writes `slots(seq_id, cached, len(tokens))`, then commits.

        Raises:
            OutOfBlocks: too few free blocks.
            ValueError, TypeError: seq_id in use or unhashable, no tokens, or tokens that are not 64-bit ints.
        """
        if seq_id in self._sequences:
            raise ValueError(f"seq_id {seq_id!r} is in use: free it first, or choose another")
        tokens = [as_token(token) for token in tokens]
        if not tokens:
            raise ValueError("tokens must hold at least 1 token, got none")
        P, hits = self.block_size, self._find_prefixes(tokens)
        shared = [next(iter(prefix.blocks)) for prefix in hits]
        num_new = cdiv(len(tokens), P) - len(shared)
        revived = sum(self._pool.ref_counts[block] == 0 for block in shared)
        self._pool.check_free(num_new, revived=revived, who=f"a prompt of {len(tokens)} tokens")
        for block in shared:
            self._pool.share(block)
        table = shared + [self._take() for _ in range(num_new)]
        self._sequences[seq_id] = _Sequence(tokens, table, len(shared) * P, hits[-1] if hits else ROOT)
        if self._pool.cache is not None:
            self._hits += len(hits)
            self._misses += (len(tokens) - 1) // P - len(hits)
        return len(shared) * P

    def cached_prefix(self, tokens: Iterable[int]) -> int:
        """How many of these tokens `allocate` would find in the cache now."""
        return len(self._find_prefixes([as_token(token) for token in tokens])) * self.block_size

    def append(self, seq_id: Hashable, token: int) -> int:
        """Add one token; return the slot where its K and V go.

        A full last block, shared or not, is followed by a new one. A partly filled one that is shared is left to the
        others: the sequence gets a block of its own, and the copy of the old content is ordered (`take_copies`).
        """
        seq, token = self._sequence(seq_id), as_token(token)
        offset = len(seq.tokens) % self.block_size
        if offset == 0:
            self._pool.check_free(1, who=f"sequence {seq_id!r}, whose blocks are full,")
            seq.table.append(self._take())
        elif self._pool.ref_counts[src := seq.table[-1]] > 1:
            self._pool.check_free(1, who=f"sequence {seq_id!r}, whose last block is shared,")
            seq.table[-1] = dst = self._take()
            self._pool.release(src)
            self._copies[dst] = self._copies.get(src, src)  # src may itself still wait for its content
            self._num_copies += 1
        seq.tokens.append(token)
        return seq.table[-1] * self.block_size + offset

    def commit(self, seq_id: Hashable, num_computed: int) -> None:
        """K and V of the first `num_computed` tokens are written: the full blocks among them become shareable.

        Raises ValueError if that is more tokens than there are, or fewer than were committed (or cached) before.
        """
        seq = self._sequence(seq_id)
        check_count("num_computed", num_computed, minimum=0)
        if not seq.num_computed <= num_computed <= len(seq.tokens):
            raise ValueError(
                f"num_computed must be from {seq.num_computed}, the tokens computed before, to {len(seq.tokens)}, "
                f"the tokens of sequence {seq_id!r}; got {num_computed}"
            )
        P = self.block_size
        for i in range(seq.num_computed // P, num_computed // P):
            seq.prefix = self._pool.register(seq.table[i], seq.prefix, seq.tokens[i * P : (i + 1) * P])
        seq.num_computed = num_computed

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Begin `child_id` as a twin of `parent_id`: the same tokens in the same blocks, nothing copied.

        What the parent has not written when one of the two appends into their last block, each writes for itself.
        """
        parent = self._sequence(parent_id)
        if child_id in self._sequences:
            raise ValueError(f"child_id {child_id!r} is in use: free it first, or choose another")
        child = _Sequence(parent.tokens.copy(), parent.table.copy(), parent.num_computed, parent.prefix)
        self._sequences[child_id] = child
        for block in child.table:
            self._pool.share(block)

    def free(self, seq_id: Hashable) -> None:
        """End a sequence. Blocks that no other one holds become free, the last one first; cached content stays."""
        seq = self._sequence(seq_id)
        del self._sequences[seq_id]
        for block in reversed(seq.table):
            self._pool.release(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies (src, dst) ordered since the last call, to be carried out before anything is written.

        All sources are read before any destination is written (`PagedKVCache.copy_blocks` does so). A source is a
        block whose content exists, never one that waits for its own copy; it may have been freed or handed out anew,
        its content lasts until the next write. A copy into a block that was freed meanwhile is dropped.
        """
        ref_counts, prefix = self._pool.ref_counts, self._pool.prefix
        copies = [(src, dst) for dst, src in self._copies.items() if ref_counts[dst] or prefix(dst)]
        self._copies.clear()
        return copies

    def block_table(self, seq_id: Hashable) -> list[int]:
        """The physical blocks of a sequence, in the order of its tokens (a copy)."""
        return self._sequence(seq_id).table.copy()

    def slots(self, seq_id: Hashable, start: int, stop: int) -> list[int]:
        """The slots of tokens start … stop − 1."""
        seq, P = self._sequence(seq_id), self.block_size
        check_count("start", start, minimum=0)
        check_count("stop", stop, minimum=start)
        if stop > len(seq.tokens):
            raise ValueError(f"stop must be at most {len(seq.tokens)}, the tokens of sequence {seq_id!r}, got {stop}")
        return [seq.table[i // P] * P + i % P for i in range(start, stop)]

    def num_tokens(self, seq_id: Hashable) -> int:
        """How many tokens a sequence has, computed or not."""
        return len(self._sequence(seq_id).tokens)

    def tokens(self, seq_id: Hashable) -> list[int]:
        """The tokens of a sequence (a copy)."""
        return self._sequence(seq_id).tokens.copy()

    @property
    def sequences(self) -> list[Hashable]:
        """The ids of all sequences, oldest first."""
        return list(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table, whether or not they hold cached content."""
        return self._pool.num_free

    @property
    def free_blocks(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        return self._pool.free_blocks

    def ref_count(self, block: int) -> int:
        """How many tables hold `block`."""
        self._check_block(block)
        return self._pool.ref_counts[block]

    def prefix(self, block: int) -> Prefix | None:
        """What `block` is cached as, or None."""
        self._check_block(block)
        return self._pool.prefix(block)

    def stats(self) -> BlockStats:
        """Blocks now, and events so far."""
        free, cached = self.num_free_blocks, len(self._pool.cache or ())
        events = (self._hits, self._misses, self._pool.evictions, self._num_copies)
        return BlockStats(self.num_blocks - free, free, cached, *events)

    def _find_prefixes(self, tokens: list[int]) -> list[Prefix]:
        """The longest chain of cached prefixes that leaves at least the last token to compute."""
        found = [ROOT]
        for i in range((len(tokens) - 1) // self.block_size):
            prefix = self._pool.find(found[-1], tokens[i * self.block_size : (i + 1) * self.block_size])
            if prefix is None:
                break
            found.append(prefix)
        return found[1:]

    def _take(self) -> int:
        block = self._pool.take()
        self._copies.pop(block, None)  # ordered for an owner that is gone
        return block

    def _sequence(self, seq_id: Hashable) -> _Sequence:
        seq = self._sequences.get(seq_id)
        if seq is None:
            raise ValueError(f"no sequence {seq_id!r}: allocate or fork it first")
        return seq

    def _check_block(self, block: int) -> None:
        check_count("block", block, minimum=0)
        if block >= self.num_blocks:
            raise ValueError(f"block must be below num_blocks = {self.num_blocks}, got {block}")
