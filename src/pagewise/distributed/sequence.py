"""Shares of a sequence: which tokens each process holds (lesson 10).

n processes cut a sequence of T tokens into pieces that differ by at most one token; the longer pieces come first.

    contiguous   n pieces. Process r holds piece r.
    zigzag       2n pieces. Process r holds pieces r and 2n − 1 − r, in this order.
    striped      pieces of one token. Process r holds tokens r, r + n, r + 2n, …

A causal query sees all tokens before it, so with contiguous shares the last process has the most work. Zigzag shares
(Grattafiori et al. 2024) and striped shares (Brandon et al. 2023) give all processes the same work. With striped
shares, a sequence can grow without moving a token: lesson 9's engine keeps its cache in this order.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from pagewise.distributed.communication import Group, all_to_all, compare, compare_backward, group_of
from pagewise.tools.checks import check_count, check_counts
from pagewise.tools.transforms import outside_graphs, wants_gradient

Order = Literal["zigzag", "contiguous", "striped"]


def pieces(length: int, count: int, rank: int, order: Order = "zigzag") -> list[range]:
    """Return the positions that process `rank` of `count` holds of a sequence, as ascending ranges (some are empty).

    An argument that does not fit raises ValueError or TypeError.
    """
    check_counts(minimum=0, length=length, rank=rank)
    check_count("count", count)
    if order not in get_args(Order):
        raise ValueError(f'order must be "zigzag", "contiguous" or "striped", got {order!r}')
    if rank >= count:
        raise ValueError(f"rank must be below count = {count}, got {rank}")
    if order == "striped":
        return [range(min(rank, length), length, count)]
    number, mine = (count, [rank]) if order == "contiguous" else (2 * count, [rank, 2 * count - 1 - rank])
    short, longer = divmod(length, number)  # the first `longer` pieces have one token more
    return [range(i * short + min(i, longer), (i + 1) * short + min(i + 1, longer)) for i in mine]


def share_lengths(length: int, count: int, order: Order = "zigzag") -> list[int]:
    """Return how many tokens each of `count` processes holds of a sequence."""
    return [sum(map(len, pieces(length, count, rank, order))) for rank in range(count)]


def positions(length: int, count: int, rank: int, order: Order) -> Int64[Tensor, " tokens"]:
    """Return the positions that process `rank` holds, ascending, as a tensor on the CPU."""
    return torch.cat([torch.arange(part.start, part.stop, part.step) for part in pieces(length, count, rank, order)])


def shard_sequence(x: Tensor, group: Group, *, dim: int, order: Order = "zigzag") -> Tensor:
    """Return this process's share of x, a copy. Every process passes the whole x, and nothing travels.

    `dim` is the dimension of x that counts tokens, any number of them. The order is explained in this module. An
    argument that does not fit raises ValueError or TypeError.
    """
    group = group_of(group)
    dim = _checked_dim("x", x, dim)
    return x.index_select(dim, positions(x.shape[dim], group.size(), group.rank(), order).to(x.device))


@outside_graphs("unshard_sequence", remedy="torch.compile for the functions around it")
def unshard_sequence(
    share: Tensor, group: Group, *, dim: int, order: Order = "zigzag", check: bool | None = None
) -> Tensor:
    """Return the whole tensor, in every process, from the share of each process. It undoes `shard_sequence`.

    Every process passes a gradient of the whole tensor back. The gradient of a share is the sum over all processes, so
    it is the gradient of the sum of their losses. If all processes compute the same loss, divide the loss by n.
    `check` is that of `ring_attention`.

    Raises:
        ValueError, TypeError: an argument does not fit, or the shares are not those of `shard_sequence`. Every process
            raises an exception.
    """
    group = group_of(group)

    def describe() -> dict[str, object]:
        at = _checked_dim("share", share, dim)
        others, tokens = [*share.shape[:at], "tokens", *share.shape[at + 1 :]], share.shape[at]
        described = {"dim": at, "order": order, "the other dimensions of share": others, "tokens": tokens}
        return described | {"the dtype of share": share.dtype, "share.requires_grad": wants_gradient(share)}

    everyone = compare("unshard_sequence", group, describe, may_differ=["tokens"], check=check)
    lengths = checked_lengths("share", [theirs["tokens"] for theirs in everyone], order)
    mine = share.movedim(dim, 0)
    # every process gets all of this share, so its gradient is the sum of all that come back
    shapes = [(length, *mine.shape[1:]) for length in lengths]
    shares = all_to_all([mine] * len(lengths), shapes, group, "shares")
    held = torch.cat([positions(sum(lengths), len(lengths), rank, order) for rank in range(len(lengths))])
    whole = torch.cat(shares)[held.argsort().to(share.device)].movedim(0, dim)
    compare_backward("unshard_sequence", group, whole, check)
    return whole


def checked_lengths(name: str, lengths: list[int], order: Order) -> list[int]:
    """Return `lengths`, if they are those of shares in this order. Else raise ValueError."""
    expected = share_lengths(sum(lengths), len(lengths), order)
    if lengths != expected:
        said = f'the shares that shard_sequence(..., order="{order}") gives: {expected} tokens of {sum(lengths)}'
        raise ValueError(f"{name} must hold {said}, got {lengths}")
    return lengths


def _checked_dim(name: str, x: object, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be from {-x.dim()} to {x.dim() - 1} for {name} of shape {list(x.shape)}, got {dim}")
    return dim % x.dim()
