"""Paged blocks: which sequence owns which blocks of the KV cache (lesson 4).

The cache consists of N blocks with P token slots each. A sequence owns a list of blocks, its block table, which grows
by one block at a time. At most P − 1 of its slots are allocated and unused, and blocks need not be neighbours:

    slot(i) = block_table[i // P] · P + i % P        is the slot of token i

Reference counts let sequences share blocks: `fork` copies a table and not the cache. The first `append` into a shared,
partly filled block gives the sequence a copy of that block (copy-on-write). With `prefix_cache=True`, full blocks keep
their content after their sequences end, and a new prompt can find them by content (see `prefix_cache`).
Kwon et al. 2023 (PagedAttention). The chained hash and the list of free blocks follow vLLM's later block pool.
"""

from collections.abc import Hashable, Iterable

from pagewise.paged_blocks.pool import BlockPool, PagedSequence
from pagewise.paged_blocks.prefix_cache import TokenBlocks, as_token
from pagewise.tools.checks import check_count


class BlockManager(BlockPool):
    """A `BlockPool` that keeps the sequences too, by their ids. Every argument is checked.

    These statements are true after every call. `append` takes O(1) time.
    - ref_count(block) is how often the block occurs in tables. A block is free iff that is 0.
    - A block that is in two tables has the same index in both, and the same tokens precede it.
    - Only one sequence writes into a block that is not full (copy-on-write). No one writes into a committed block.
    - A call that raised has changed nothing, not even the order of eviction.

    `free` releases a table from its last block to its first, so that the end of a chain is evicted before its parents.
        A holds blocks [0, 1, 2] and B holds [0, 3]; all are full and committed. After free(A) and free(B), the order
        of eviction is 2, 1, 3, 0. Block 0 begins both chains, so it is evicted last. A new A would hit blocks 0 and 1.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = False) -> None:
        super().__init__(num_blocks, block_size, prefix_cache=prefix_cache)
        self._sequences: dict[Hashable, PagedSequence] = {}

    def allocate(self, seq_id: Hashable, tokens: Iterable[int]) -> int:
        """Begin a sequence with its prompt, and return how many of its tokens are already in the cache.

        The result is a multiple of block_size and at most len(tokens) − 1, because the query of the last token is
        needed. The caller computes and writes `slots(seq_id, cached, len(tokens))`, then commits.

        Raises OutOfBlocks if there are too few free blocks. Raises ValueError or TypeError if seq_id is in use or not
        hashable, or if tokens is empty or does not hold 64-bit ints.
        """
        if seq_id in self._sequences:
            raise ValueError(f"seq_id {seq_id!r} is in use: free it first, or choose another")
        tokens = [as_token(token) for token in tokens]
        if not tokens:
            raise ValueError("tokens must hold at least 1 token, got none")
        sequence = PagedSequence(tokens)
        num_cached = self.hold(sequence, TokenBlocks(tokens, self.block_size))
        self._sequences[seq_id] = sequence
        return num_cached

    def append(self, seq_id: Hashable, token: int) -> int:
        """Add one token, and return the slot for its K and V.

        If the last block is full, the sequence gets another block. If the last block is partly filled and shared, the
        sequence gets a block of its own, and the copy of the old content is ordered (see `take_copies`).
        """
        seq, token = self._sequence(seq_id), as_token(token)
        offset = len(seq.tokens) % self.block_size
        is_shared = offset > 0 and self._ref_counts[seq.block_table[-1]] > 1
        if (offset == 0 or is_shared) and not self.num_free_blocks:
            reason = "last block is shared" if is_shared else "blocks are full"
            raise self._lack(1, 0, f"sequence {seq_id!r}, whose {reason},")
        if offset == 0:
            seq.block_table.append(self._take())
        elif is_shared:
            self._copy(seq.block_table, len(seq.block_table) - 1)
        seq.tokens.append(token)
        return seq.block_table[-1] * self.block_size + offset

    def commit(self, seq_id: Hashable, num_computed: int) -> None:
        """Make full blocks shareable, now that K and V of the first `num_computed` tokens are written.

        Raises ValueError if the sequence has fewer tokens, or if more were committed (or found in the cache) before.
        """
        seq = self._sequence(seq_id)
        check_count("num_computed", num_computed, minimum=0)
        if not seq.num_computed <= num_computed <= len(seq.tokens):
            limits = f"{seq.num_computed}, the tokens computed before, to {len(seq.tokens)}, the tokens of {seq_id!r}"
            raise ValueError(f"num_computed must be from {limits}; got {num_computed}")
        self.register(seq, num_computed)

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Begin `child_id` as a twin of `parent_id`: the same tokens in the same blocks. Nothing is copied.

        If K and V of some tokens are not yet written when the last block is copied, each twin writes them itself.
        """
        parent = self._sequence(parent_id)
        if child_id in self._sequences:
            raise ValueError(f"child_id {child_id!r} is in use: free it first, or choose another")
        child = PagedSequence(parent.tokens.copy())
        self.share(parent, child)
        self._sequences[child_id] = child

    def free(self, seq_id: Hashable) -> None:
        """End a sequence. Blocks that no other sequence holds become free, the last first; cached content stays."""
        self.release(self._sequence(seq_id))
        del self._sequences[seq_id]

    def block_table(self, seq_id: Hashable) -> list[int]:
        """Return the physical blocks of a sequence, in the order of its tokens (a copy)."""
        return self._sequence(seq_id).block_table.copy()

    def slots(self, seq_id: Hashable, start: int, stop: int) -> list[int]:
        """Return the slots of tokens start … stop − 1."""
        seq, P = self._sequence(seq_id), self.block_size
        check_count("start", start, minimum=0)
        check_count("stop", stop, minimum=start)
        if stop > len(seq.tokens):
            raise ValueError(f"stop must be at most {len(seq.tokens)}, the tokens of sequence {seq_id!r}, got {stop}")
        return [seq.block_table[i // P] * P + i % P for i in range(start, stop)]

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

    def _sequence(self, seq_id: Hashable) -> PagedSequence:
        if seq_id not in self._sequences:
            raise ValueError(f"no sequence {seq_id!r}: allocate or fork it first")
        return self._sequences[seq_id]
