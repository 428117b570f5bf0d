"""The bytes that each method sends and the pairs that each process computes, as formulas (lesson 10).

With n equal shares and b bytes per number, a process sends 2 (n − 1)/n · B · Hkv · S · D · b in the ring's forward, and
2 (n − 1)/n² · B · (H · T + Hkv · S) · D · b in all-to-all. `count_bytes` counts what is really sent.
"""

from typing import NamedTuple

import torch

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


def ring_bytes(sizes: Sizes, count: int, rank: int, order: Order = "zigzag", *, backward: bool = False) -> int:
    """Return the bytes that process `rank` of `count` sends in `ring_attention`, in the forward or in the backward.

    It passes on all shares but that of the next process, and in the backward also the gradients of all shares.
    """
    of_next = share_lengths(sizes.S, count, order)[(rank + 1) % count]
    gradients = sizes.S * max(4, sizes.itemsize) if backward and count > 1 else 0
    return 2 * sizes.B * sizes.Hkv * sizes.D * ((sizes.S - of_next) * sizes.itemsize + gradients)


def all_to_all_bytes(sizes: Sizes, count: int, rank: int, *, backward: bool = False) -> int:
    """Return the bytes that process `rank` of `count` sends in `all_to_all_attention`, forward or backward."""
    B, H, Hkv, T, S, D, itemsize = sizes

    def given_away(heads: int, tokens: int, *, own_heads: bool) -> int:
        share = share_lengths(tokens, count, "contiguous")[rank]
        return heads // count * (tokens - share) if own_heads else (heads - heads // count) * share

    qkv = given_away(H, T, own_heads=backward) + 2 * given_away(Hkv, S, own_heads=backward)
    return B * D * itemsize * (qkv + given_away(H, T, own_heads=not backward))


def decode_bytes(sizes: Sizes, count: int) -> int:
    """Return the bytes that each of `count` processes sends in `decode_attention`: out and lse, to every other one."""
    return (count - 1) * sizes.B * sizes.H * sizes.T * (sizes.D + 1) * max(4, sizes.itemsize)


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
