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
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Prefix:
    """Everything from the first token to the end of one full block, and the physical blocks that hold that end.

    A cache gives every prefix a number of its own, and never the same number twice. `parent` is the number of the
    prefix before the last block. Numbers, unlike objects, are still equal in a copy of the cache.
    """

    number: int
    digest: bytes
    parent: int
    tokens: tuple[int, ...]  # of the last block
    blocks: dict[int, None] = field(default_factory=dict)  # by age; several if equal prompts ran side by side

    def continues(self, parent: "Prefix", tokens: tuple[int, ...]) -> bool:
        """Return whether this is `parent` followed by `tokens`, without trusting any hash."""
        return self.parent == parent.number and self.tokens == tokens


ROOT = Prefix(0, b"", -1, ())  # the empty prefix, parent of every first block


@dataclass(eq=False)
class TokenBlocks:
    """Tokens that are checked already, and the digests of their full blocks, each computed once and only when needed.

    A prompt that waits for free blocks is looked up in the cache at every step. Without this it would be hashed at
    every step too.
    """

    tokens: list[int]
    block_size: int
    _blocks: list[tuple[tuple[int, ...], bytes]] = field(default_factory=list)  # tokens and digest of the first blocks

    def block(self, i: int) -> tuple[tuple[int, ...], bytes]:
        """Return the tokens of full block i, and the digest of everything up to its end."""
        while len(self._blocks) <= i:
            start = len(self._blocks) * self.block_size
            tokens = tuple(self.tokens[start : start + self.block_size])
            parent = self._blocks[-1][1] if self._blocks else ROOT.digest
            self._blocks.append((tokens, block_digest(parent, tokens)))
        return self._blocks[i]


class PrefixCache:
    """A table of prefixes and the physical blocks that hold them. It has no notion of sequences or free blocks.

    `by_block` has the cached prefix that ends with each block. Only `register` and `forget` change it.
    """

    def __init__(self) -> None:
        self.by_block: dict[int, Prefix] = {}
        self._by_digest: dict[bytes, Prefix] = {}
        self._numbers = 0  # given so far

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
        for i in range((len(tokens.tokens) - 1) // tokens.block_size if self.by_block else 0):
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
        if block in self.by_block or parent is None:
            return self.by_block.get(block)
        digest, tokens = block_digest(parent.digest, tokens), tuple(tokens)
        prefix = self._by_digest.get(digest)
        if prefix is None:
            self._numbers += 1
            prefix = self._by_digest[digest] = Prefix(self._numbers, digest, parent.number, tokens)
        elif not prefix.continues(parent, tokens):
            return None
        prefix.blocks[block] = None
        self.by_block[block] = prefix
        return prefix

    def forget(self, block: int) -> None:
        """Forget what `block` holds, because it will be overwritten. A prefix without blocks goes too."""
        prefix = self.by_block.pop(block)
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
