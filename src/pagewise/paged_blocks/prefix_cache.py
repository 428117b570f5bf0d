"""The prefix cache finds full blocks by their content (lesson 4).

K and V of a token depend on every token before it, so a block may serve another sequence only if the whole prefix
up to its end is the same. Each full block is therefore named by a chain of hashes,

    digest_i = sha256(digest_{i−1} ‖ tokens of block i),        digest_{−1} = empty

The digest finds a candidate, equality decides. A hit compares the tokens of the block. It also requires that the
parent of the block is the prefix that was matched just before. By induction, the whole prefix is equal, and two
contents with the same digest are a miss.
"""

import hashlib
import operator
from array import array
from collections.abc import Iterable, Sequence


class Prefix:
    """Everything from the first token to the end of one full block, and the physical blocks that hold that end.

    A cache gives every prefix a number of its own, and never the same number twice. `parent` is the number of the
    prefix before the last block. Numbers, unlike objects, are still equal in a copy of the cache.
    """

    __slots__ = ("blocks", "digest", "number", "parent", "tokens")

    def __init__(self, number: int, digest: bytes, parent: int, tokens: tuple[int, ...]) -> None:
        self.number, self.digest, self.parent, self.tokens = number, digest, parent, tokens
        self.blocks: dict[int, None] = {}  # in order of registration; several if equal prompts ran side by side

    def continues(self, parent: "Prefix", tokens: tuple[int, ...]) -> bool:
        """Return whether this is `parent` followed by `tokens`, without trusting any hash."""
        return self.parent == parent.number and self.tokens == tokens

    def __repr__(self) -> str:
        return f"Prefix({self.digest.hex()[:8]}, tokens={list(self.tokens)}, blocks={list(self.blocks)})"


ROOT = Prefix(0, b"", -1, ())  # the empty prefix, parent of every first block


class TokenBlocks:
    """Tokens that are checked already, and the digests of their full blocks, each computed once and only when needed.

    A prompt that waits for free blocks is looked up in the cache at every step. Without this it would be hashed at
    every step too.
    """

    def __init__(self, tokens: list[int], block_size: int) -> None:
        self.tokens, self.block_size = tokens, block_size
        self._blocks: list[tuple[tuple[int, ...], bytes]] = []  # tokens and digest of the first blocks

    @classmethod
    def of(cls, tokens: "Iterable[int] | TokenBlocks", block_size: int) -> "TokenBlocks":
        """Return the tokens themselves if they are blocks already, else new blocks of them, which are checked."""
        return tokens if isinstance(tokens, cls) else cls([as_token(token) for token in tokens], block_size)

    def __len__(self) -> int:
        return len(self.tokens)

    def block(self, i: int) -> tuple[tuple[int, ...], bytes]:
        """Return the tokens of full block i, and the digest of everything up to its end."""
        while len(self._blocks) <= i:
            start = len(self._blocks) * self.block_size
            tokens = tuple(self.tokens[start : start + self.block_size])
            parent = self._blocks[-1][1] if self._blocks else ROOT.digest
            self._blocks.append((tokens, block_digest(parent, tokens)))
        return self._blocks[i]


class PrefixCache:
    """A table of prefixes and the physical blocks that hold them. It has no notion of sequences or free blocks."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}
        self._numbers = 0  # given so far

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def of_block(self, block: int) -> Prefix | None:
        """Return the cached prefix that ends with `block`, or None."""
        return self._by_block.get(block)

    def find(self, parent: Prefix | None, tokens: Sequence[int], digest: bytes | None = None) -> Prefix | None:
        """Return the cached prefix that continues `parent` by these tokens, or None. Both are compared.

        `digest` saves computing `block_digest(parent.digest, tokens)` again.
        """
        if parent is None:
            return None
        prefix = self._by_digest.get(digest or block_digest(parent.digest, tokens))
        return prefix if prefix is not None and prefix.continues(parent, tuple(tokens)) else None

    def chain(self, tokens: TokenBlocks) -> list[Prefix]:
        """Return the longest chain of cached prefixes that leaves at least the last token to compute."""
        found = [ROOT]
        for i in range((len(tokens) - 1) // tokens.block_size if self._by_block else 0):
            prefix = self.find(found[-1], *tokens.block(i))
            if prefix is None:
                break
            found.append(prefix)
        return found[1:]

    def register(self, block: int, parent: Prefix | None, tokens: Sequence[int]) -> Prefix | None:
        """Remember that `block` holds `parent` continued by `tokens`, and return that prefix.

        Several blocks with equal content belong to one prefix. The result is None, and the block is not shared, if the
        digest belongs to other content (a collision) or if the parent could not be shared.
        """
        if block in self._by_block or parent is None:
            return self._by_block.get(block)
        digest, tokens = block_digest(parent.digest, tokens), tuple(tokens)
        prefix = self._by_digest.get(digest)
        if prefix is None:
            self._numbers += 1
            prefix = self._by_digest[digest] = Prefix(self._numbers, digest, parent.number, tokens)
        if not prefix.continues(parent, tokens):
            return None
        prefix.blocks[block] = None
        self._by_block[block] = prefix
        return prefix

    def forget(self, block: int) -> None:
        """Forget what `block` holds, because it will be overwritten. A prefix without blocks goes too."""
        prefix = self._by_block.pop(block)
        del prefix.blocks[block]
        if not prefix.blocks:
            del self._by_digest[prefix.digest]


def block_digest(parent_digest: bytes, tokens: Sequence[int]) -> bytes:
    """Return sha256 over the parent's digest and the tokens as 64-bit integers.

    The fixed width makes sure that different tokens are different bytes.
    """
    return hashlib.sha256(parent_digest + array("q", tokens).tobytes()).digest()


def as_token(token: object) -> int:
    """Return the token as an int. Integers of numpy and torch are accepted too."""
    try:
        value = operator.index(token)
    except TypeError:
        value = None
    if value is None or isinstance(token, bool):
        raise TypeError(f"tokens must be ints, got {token!r} ({type(token).__name__})")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"tokens must fit in 64 bits, got {value}")
    return value
