"""The prefix cache: full blocks found again by what they hold (lesson 4).

K and V of a token depend on every token before it, so a block may serve another sequence only if the whole prefix
up to its end is the same. Each full block is therefore named by a chain of hashes,

    digest_i = sha256(digest_{i−1} ‖ tokens of block i),        digest_{−1} = empty

The digest finds a candidate, equality decides: a hit compares the block's tokens and demands that its parent is the
very prefix matched just before, so by induction the whole prefix is equal and a collision of digests is a miss.
"""

import hashlib
import operator
from array import array
from collections.abc import Sequence


class Prefix:
    """Everything from the first token to the end of one full block, and the physical blocks that hold that end."""

    __slots__ = ("blocks", "digest", "parent", "tokens")

    def __init__(self, digest: bytes, parent: "Prefix | None", tokens: tuple[int, ...]) -> None:
        self.digest, self.parent, self.tokens = digest, parent, tokens
        self.blocks: dict[int, None] = {}  # in order of registration; more than one where equal prompts met unshared

    def continues(self, parent: "Prefix", tokens: tuple[int, ...]) -> bool:
        """Whether this is `parent` followed by `tokens`. No hash is trusted here."""
        return self.parent is parent and self.tokens == tokens

    def __repr__(self) -> str:
        return f"Prefix({self.digest.hex()[:8]}, tokens={list(self.tokens)}, blocks={list(self.blocks)})"


ROOT = Prefix(b"", None, ())  # the empty prefix, parent of every first block


class PrefixCache:
    """Which physical blocks hold which prefix. It knows nothing of sequences, reference counts or free lists."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def of_block(self, block: int) -> Prefix | None:
        """The prefix that ends in `block`, if it is cached."""
        return self._by_block.get(block)

    def find(self, parent: Prefix | None, tokens: Sequence[int]) -> Prefix | None:
        """The cached prefix that continues `parent` by these tokens, both verified, or None."""
        if parent is None:
            return None
        prefix = self._by_digest.get(block_digest(parent.digest, tokens))
        return prefix if prefix is not None and prefix.continues(parent, tuple(tokens)) else None

    def register(self, block: int, parent: Prefix | None, tokens: Sequence[int]) -> Prefix | None:
        """From now on `block` holds `parent` continued by `tokens`; returns that prefix.

        Equal content in several blocks is kept under one prefix. None, and the block stays unshared, if the digest
        belongs to other content (a collision) or the parent itself could not be shared.
        """
        if block in self._by_block or parent is None:
            return self._by_block.get(block)
        digest, tokens = block_digest(parent.digest, tokens), tuple(tokens)
        prefix = self._by_digest.setdefault(digest, Prefix(digest, parent, tokens))
        if not prefix.continues(parent, tokens):
            return None
        prefix.blocks[block] = None
        self._by_block[block] = prefix
        return prefix

    def forget(self, block: int) -> None:
        """`block` is about to be overwritten. A prefix that no block holds any more is gone."""
        prefix = self._by_block.pop(block)
        del prefix.blocks[block]
        if not prefix.blocks:
            del self._by_digest[prefix.digest]


def block_digest(parent_digest: bytes, tokens: Sequence[int]) -> bytes:
    """sha256 over the parent's digest and the tokens as 64-bit integers: fixed width, so no two inputs look alike."""
    return hashlib.sha256(parent_digest + array("q", tokens).tobytes()).digest()


def as_token(token: object) -> int:
    """The token as an int. numpy's and torch's integers are taken too."""
    try:
        value = operator.index(token)
    except TypeError:
        value = None
    if value is None or isinstance(token, bool):
        raise TypeError(f"tokens must be ints, got {token!r} ({type(token).__name__})")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"tokens must fit in 64 bits, got {value}")
    return value
