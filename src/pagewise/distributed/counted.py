"""The bytes that each method sends and the pairs that each process computes, as formulas (lesson 10).

For n processes with equal shares, and b bytes per number, each process sends

    ring, forward      n − 1 times   2 · B · Hkv · S/n · D · b                   k and v of one share
    ring, backward     the same, and n times the gradients of k and v of one share, in float32
    all-to-all         (n − 1)/n · B · (2 H · T/n + 2 Hkv · S/n) · D · b         q, out, k and v
    decode             (n − 1) · B · H · T · (D + 1) · 4                         independent of S

The functions below are exact for unequal shares, too. `communication.count_bytes` counts what is really sent.
"""

from typing import NamedTuple

from pagewise.distributed.blocks import blocks_of_ring
from pagewise.distributed.communication import Sent
from pagewise.distributed.sequence import Order, share_lengths


class Sizes(NamedTuple):
    """The sizes of one call, for the whole sequence: `itemsize` is the number of bytes of an element of q."""

    B: int
    H: int
    Hkv: int
    T: int
    S: int
    D: int
    itemsize: int

    @property
    def wide(self) -> int:
        """The number of bytes of an element of lse and of a sum of gradients."""
        return max(4, self.itemsize)


def ring_bytes(sizes: Sizes, count: int, rank: int, order: Order = "zigzag") -> list[Sent]:
    """Return what process `rank` of `count` sends in the forward of `ring_attention`, step by step.

    In step i it passes on the share of process rank − i.
    """
    B, _, Hkv, _, S, D, itemsize = sizes
    lengths = share_lengths(S, count, order)
    shares = [lengths[(rank - step) % count] for step in range(count - 1)]
    return [Sent("keys and values", 2 * B * Hkv * share * D * itemsize) for share in shares]


def ring_backward_bytes(sizes: Sizes, count: int, rank: int, order: Order = "zigzag") -> list[Sent]:
    """Return what process `rank` of `count` sends in the backward of `ring_attention`, in the order of the transfers.

    Keys and values travel as in the forward. The gradients of each share follow one step later, and travel n times.
    """
    B, _, Hkv, _, S, D, _ = sizes
    if count == 1:
        return []
    lengths = share_lengths(S, count, order)
    shares = [lengths[(rank - step) % count] for step in range(count)]
    gradients = [Sent("gradients of keys and values", 2 * B * Hkv * share * D * sizes.wide) for share in shares]
    keys = ring_bytes(sizes, count, rank, order)
    both = [sent for step in zip(keys, gradients, strict=False) for sent in step]
    return [*both, gradients[-1]]


def all_to_all_bytes(sizes: Sizes, count: int, rank: int) -> list[Sent]:
    """Return what process `rank` of `count` sends in the forward of `all_to_all_attention`, tensor by tensor.

    It sends q, k and v of its own tokens and of the other processes' heads. It sends out of its own heads and of the
    other processes' tokens.
    """
    queries, keys = _other_heads(sizes, count, rank)
    outs, _ = _other_tokens(sizes, count, rank)
    return [Sent("q", queries), Sent("k", keys), Sent("v", keys), Sent("out", outs)]


def all_to_all_backward_bytes(sizes: Sizes, count: int, rank: int) -> list[Sent]:
    """Return what process `rank` of `count` sends in the backward of `all_to_all_attention`, tensor by tensor.

    Each gradient takes the way of its tensor in the opposite direction.
    """
    outs, _ = _other_heads(sizes, count, rank)
    queries, keys = _other_tokens(sizes, count, rank)
    sent = {"out": outs, "v": keys, "k": keys, "q": queries}
    return [Sent(f"gradient of {name}", number) for name, number in sent.items()]


def _other_heads(sizes: Sizes, count: int, rank: int) -> tuple[int, int]:
    """Return the bytes of the other processes' heads for the own tokens: of q or out, and of k or v."""
    B, H, Hkv, T, S, D, itemsize = sizes
    queries, keys = (share_lengths(length, count, "contiguous")[rank] for length in (T, S))
    return B * (H - H // count) * queries * D * itemsize, B * (Hkv - Hkv // count) * keys * D * itemsize


def _other_tokens(sizes: Sizes, count: int, rank: int) -> tuple[int, int]:
    """Return the bytes of the own heads for the other processes' tokens: of q or out, and of k or v."""
    B, H, Hkv, T, S, D, itemsize = sizes
    queries, keys = (length - share_lengths(length, count, "contiguous")[rank] for length in (T, S))
    return B * H // count * queries * D * itemsize, B * Hkv // count * keys * D * itemsize


def decode_bytes(sizes: Sizes, count: int) -> list[Sent]:
    """Return what each of `count` processes sends in `decode_attention`: its out and lse, to every other process."""
    B, H, _, T, _, D, _ = sizes
    return [Sent("out and lse", (count - 1) * B * H * T * (D + 1) * sizes.wide)]


def visible_pairs(T: int, S: int, count: int, *, causal: bool = True, order: Order = "zigzag") -> list[list[int]]:
    """Return how many pairs of query and key each process computes in each step of `ring_attention`, for one head.

    All processes wait for the slowest process of a step. The time of a call is therefore the sum over the steps of the
    largest number in each step.

    Returns:
        a row for each process, with a number for each step. 0: no query sees any of the keys, and nothing is computed.
    """
    table = []
    for rank in range(count):
        of_owner = blocks_of_ring((T, S), count, rank, causal=causal, order=order)
        table.append([sum(block.pairs for block in of_owner[(rank - step) % count]) for step in range(count)])
    return table
