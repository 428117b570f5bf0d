"""Shares of a sequence: which tokens each process holds (lesson 10).

n processes cut a sequence of T tokens into pieces that differ by at most one token; the longer pieces come first.

    contiguous   n pieces. Process r holds piece r.
    zigzag       2n pieces. Process r holds pieces r and 2n − 1 − r, in this order.
    striped      pieces of one token. Process r holds tokens r, r + n, r + 2n, …

A causal query sees all tokens before it. With contiguous shares, the last process sees the most keys and the first
process sees the fewest. A zigzag share has one piece from each half of the sequence, so every process has the same
number of visible pairs of query and key. Llama 3 was trained with zigzag shares (Grattafiori et al. 2024). Striped
shares have the same purpose (Brandon et al. 2023), and a sequence can grow without moving a token: lesson 9's engine
keeps its cache in this order.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from pagewise.distributed.communication import Group, all_gather, all_to_all, compare, rank_and_size
from pagewise.tools.checks import check_count, check_counts, check_flag
from pagewise.tools.transforms import outside_graphs

Order = Literal["zigzag", "contiguous", "striped"]


def pieces(length: int, count: int, rank: int, order: Order = "zigzag") -> list[range]:
    """Return the positions that process `rank` of `count` holds of a sequence, as ascending ranges (some are empty).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    check_counts(minimum=0, length=length, rank=rank)
    check_count("count", count)
    check_order(order)
    if rank >= count:
        raise ValueError(f"rank must be below count = {count}, got {rank}")
    if order == "striped":
        return [range(min(rank, length), length, count)]
    if order == "contiguous":
        return [_piece(length, count, rank)]
    return [_piece(length, 2 * count, rank), _piece(length, 2 * count, 2 * count - 1 - rank)]


def share_lengths(length: int, count: int, order: Order = "zigzag") -> list[int]:
    """Return how many tokens each of `count` processes holds of a sequence."""
    return [sum(map(len, pieces(length, count, rank, order))) for rank in range(count)]


def shard_sequence(x: Tensor, group: Group, *, dim: int, order: Order = "zigzag") -> Tensor:
    """Return this process's share of x, a copy. Every process passes the whole x, and nothing travels.

    Args:
        dim: the dimension of x that counts tokens. Its length does not have to be a multiple of n.
        order: "zigzag", "contiguous" or "striped"; see this module.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    rank, count = rank_and_size(group)
    dim = _checked_dim("x", x, dim)
    return x.index_select(dim, positions(x.shape[dim], count, rank, order).to(x.device))


@outside_graphs("unshard_sequence", remedy="torch.compile for the functions around it")
def unshard_sequence(
    share: Tensor, group: Group, *, dim: int, order: Order = "zigzag", check: bool | None = None
) -> Tensor:
    """Return the whole tensor, in every process, from the share of each process. It undoes `shard_sequence`.

    Every process passes a gradient of the whole tensor back. The gradient of a share is the sum over all processes, so
    it is the gradient of the sum of their losses. If all processes compute the same loss, divide the loss by n.

    Args:
        dim, order: as in `shard_sequence`.
        check: as in `ring_attention`.

    Raises:
        ValueError, TypeError: an argument does not fit, or the shares are not those of `shard_sequence`. Every process
            raises an exception.
    """
    rank_and_size(group)

    def describe() -> dict[str, object]:
        at = _checked_dim("share", share, dim)
        check_order(order)
        if check is not None:
            check_flag("check", check)
        others = [*share.shape[:at], "tokens", *share.shape[at + 1 :]]
        gradient = torch.is_grad_enabled() and share.requires_grad
        return {
            "dim": at,
            "order": order,
            "the other dimensions of share": others,
            "the dtype of share": share.dtype,
            "share.requires_grad": gradient,
            "tokens": share.shape[at],
        }

    everyone = compare("unshard_sequence", group, describe, may_differ=["tokens"], check=check is not False)
    lengths = checked_lengths("share", [theirs["tokens"] for theirs in everyone], order)
    return _Unshard.apply(share, group, everyone[0]["dim"], order, lengths, check is not False)


def checked_lengths(name: str, lengths: list[int], order: Order) -> list[int]:
    """Return `lengths`, if they are those of shares in this order.

    Raises:
        ValueError: they are not.
    """
    expected = share_lengths(sum(lengths), len(lengths), order)
    if lengths != expected:
        raise ValueError(
            f'{name} must hold the shares that shard_sequence(..., order="{order}") gives: {expected} tokens of '
            f"{sum(lengths)}, got {lengths}"
        )
    return lengths


def check_order(order: object) -> None:
    """`order` must be "zigzag", "contiguous" or "striped"."""
    if order not in get_args(Order):
        raise ValueError(f'order must be "zigzag", "contiguous" or "striped", got {order!r}')


def positions(length: int, count: int, rank: int, order: Order) -> Int64[Tensor, " tokens"]:
    """Return the positions that process `rank` holds, ascending, as a tensor on the CPU."""
    return torch.cat([torch.arange(part.start, part.stop, part.step) for part in pieces(length, count, rank, order)])


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share, group, dim, order, lengths, compares):
        ctx.rest = group, dim, order, lengths, compares
        tokens_first = share.movedim(dim, 0)
        padded = tokens_first.new_zeros(max(lengths), *tokens_first.shape[1:])  # all_gather takes equal shapes
        padded[: len(tokens_first)] = tokens_first
        gathered = all_gather(padded, group, "unshard")
        whole = tokens_first.new_empty(sum(lengths), *tokens_first.shape[1:])
        for rank, length in enumerate(lengths):
            whole[positions(len(whole), len(lengths), rank, order).to(whole.device)] = gathered[rank, :length]
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx, gradient):
        return _SumOfShares.apply(gradient, *ctx.rest), *[None] * 5


class _SumOfShares(torch.autograd.Function):
    """This process's share of the sum of the tensors of all processes. It and `_Unshard` are each other's gradient."""

    @staticmethod
    def forward(ctx, whole, group, dim, order, lengths, compares):
        ctx.rest = group, dim, order, lengths, compares
        if compares:
            compare("the backward of unshard_sequence", group, dict)
        ranks = range(len(lengths))
        of_each = [
            whole.movedim(dim, 0)[positions(sum(lengths), len(lengths), rank, order).to(whole.device)] for rank in ranks
        ]
        shapes = [of_each[rank_and_size(group)[0]].shape] * len(lengths)
        total = torch.stack(all_to_all(of_each, shapes, group, "gradient of unshard")).sum(dim=0)
        return total.movedim(0, dim)

    @staticmethod
    def backward(ctx, gradient):
        return _Unshard.apply(gradient, *ctx.rest), *[None] * 5


def _piece(length: int, count: int, index: int) -> range:
    """Return piece `index` of `count`: the first length % count pieces are one token longer than the others."""
    short, longer = divmod(length, count)
    start = index * short + min(index, longer)
    return range(start, start + short + (index < longer))


def _checked_dim(name: str, x: object, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be from {-x.dim()} to {x.dim() - 1} for {name} of shape {list(x.shape)}, got {dim}")
    return dim % x.dim()
