"""The bytes that each method sends and the pairs that each process computes, as formulas (lesson 10).

For n processes with equal shares, and b bytes per number, each process sends

    ring, forward      n − 1 times   2 · B · Hkv · S/n · D · b                   k and v of one share
    ring, backward     the same, and n times the gradients of k and v of one share, in float32
    all-to-all         (n − 1)/n · B · (2 H · T/n + 2 Hkv · S/n) · D · b         q, out, k and v
    decode             (n − 1) · B · H · T · (D + 1) · 4                         independent of S

The functions below are exact for unequal shares, too. `count_bytes` counts what is really sent.
"""

from typing import NamedTuple

import torch

from pagewise.distributed.communication import Sent
from pagewise.distributed.sequence import Order, positions, share_lengths


class Sizes(NamedTuple):
    """The sizes of one call, for the whole sequence: `itemsize` is the number of bytes of an element of q."""

    B: int
    H: int
    Hkv: int
    T: int
    S: int
    D: int
    itemsize: int


def ring_bytes(sizes: Sizes, count: int, rank: int, order: Order = "zigzag", *, backward: bool = False) -> list[Sent]:
    """Return what process `rank` of `count` sends in `ring_attention`, in the order of the transfers.

    In step i it passes on the share of process rank − i. In the backward pass, gradients follow one step later.
    """
    lengths = share_lengths(sizes.S, count, order)
    numbers = [2 * sizes.B * sizes.Hkv * lengths[(rank - step) % count] * sizes.D for step in range(count)]
    keys = [Sent("keys and values", number * sizes.itemsize) for number in numbers[:-1]]
    if not backward or count == 1:
        return keys
    gradients = [Sent("gradients of keys and values", number * max(4, sizes.itemsize)) for number in numbers]
    both = [sent for step in zip(keys, gradients, strict=False) for sent in step]
    return [*both, gradients[-1]]


def all_to_all_bytes(sizes: Sizes, count: int, rank: int, *, backward: bool = False) -> list[Sent]:
    """Return what process `rank` of `count` sends in `all_to_all_attention`, tensor by tensor."""
    B, H, Hkv, T, S, D, itemsize = sizes
    found = []
    for name, heads, tokens in (("q", H, T), ("k", Hkv, S), ("v", Hkv, S), ("out", H, T)):
        share = share_lengths(tokens, count, "contiguous")[rank]
        gives_tokens = (name == "out") != backward  # of its own heads. Else it gives heads of its own tokens
        numbers = heads // count * (tokens - share) if gives_tokens else (heads - heads // count) * share
        found.append(Sent(f"gradient of {name}" if backward else name, B * numbers * D * itemsize))
    return found


def decode_bytes(sizes: Sizes, count: int) -> list[Sent]:
    """Return what each of `count` processes sends in `decode_attention`: its out and lse, to every other process."""
    B, H, _, T, _, D, itemsize = sizes
    return [Sent("out and lse", (count - 1) * B * H * T * (D + 1) * max(4, itemsize))]


def visible_pairs(T: int, S: int, count: int, *, causal: bool = True, order: Order = "zigzag") -> list[list[int]]:
    """Return how many pairs of query and key each process computes in each step of `ring_attention`, for one head.

    There is a row for each process, with a number for each step. All processes wait for the slowest process of a step,
    so the time of a call is the sum over the steps of the largest number in each step.
    """

    def pairs(rank: int, owner: int) -> int:
        queries, keys = positions(T, count, rank, order) + (S - T), positions(S, count, owner, order)
        # a causal query sees the keys at most at its own position
        return int(torch.searchsorted(keys, queries, right=True).sum()) if causal else len(queries) * len(keys)

    return [[pairs(rank, (rank - step) % count) for step in range(count)] for rank in range(count)]
