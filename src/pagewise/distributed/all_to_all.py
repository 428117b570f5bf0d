"""All-to-all attention, known as Ulysses: processes exchange heads for tokens (lesson 10).

Before attention, a process has all H heads of its T / n tokens. Attention needs all tokens of a head, but its heads do
not need each other. So the processes exchange:

    [B, H, T/n, D]  →  all-to-all  →  [B, H/n, T, D]  →  attention  →  [B, H/n, T, D]  →  all-to-all  →  [B, H, T/n, D]

An exchange moves numbers and does not change them, so its gradient is the opposite exchange. Jacobs et al. 2023.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.distributed.communication import Group, all_to_all, compare, described_options, rank_and_size
from pagewise.distributed.sequence import checked_lengths
from pagewise.flash_attention import flash_attention
from pagewise.options import ScoreOptions
from pagewise.tools.transforms import outside_graphs


@outside_graphs("all_to_all_attention", remedy="torch.compile for the functions around it")
def all_to_all_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    group: Group,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    check: bool | None = None,
) -> Float[Tensor, "B H T D"]:
    """Compute `flash_attention` of a sequence whose tokens are spread over the processes of a group.

    Every process passes its *contiguous* share of q and of k and v, as `shard_sequence(..., order="contiguous")` cuts
    them, and gets its share of out. Each process computes whole sequences, so causal makes no process wait. The result
    is differentiable once in q, k and v. All processes must call this function, and all must call `backward` if any
    does.

    Args:
        group: a group of torch.distributed with n processes. None: all processes. n must divide Hkv.
        causal, scale, softcap, window, alibi_slopes: as in `attention`. Positions are those of the whole sequence.
            `alibi_slopes` are those of all H heads.
        check: as in `ring_attention`.

    Raises:
        ValueError, TypeError: an argument does not fit in this process or in another process. Every process raises an
            exception before any heads travel.
        RuntimeError: no group was started, or a process has ended or called nothing within the group's time limit.
    """
    rank, count = rank_and_size(group)

    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes)

    def describe() -> dict[str, object]:
        described = described_options(q, k, v, options, check)
        Hkv = k.shape[1]
        if Hkv % count:
            raise ValueError(
                f"k has Hkv = {Hkv} heads, and {count} processes cannot share them equally: "
                f"use ring_attention, which takes any number of heads, or a group whose size divides {Hkv}"
            )
        return described

    may_differ = ["T", "S"]
    everyone = compare("all_to_all_attention", group, describe, may_differ=may_differ, check=check is not False)
    of_queries = checked_lengths("q", [theirs["T"] for theirs in everyone], "contiguous")
    of_keys = checked_lengths("k and v", [theirs["S"] for theirs in everyone], "contiguous")
    q = _Exchange.apply(q, heads_to_tokens, tokens_to_heads, of_queries, group, "q", False)
    k = _Exchange.apply(k, heads_to_tokens, tokens_to_heads, of_keys, group, "k", False)
    v = _Exchange.apply(v, heads_to_tokens, tokens_to_heads, of_keys, group, "v", False)
    slopes = None if alibi_slopes is None else alibi_slopes.chunk(count)[rank]  # of the heads that this process has
    how = {"scale": everyone[rank]["scale"], "window": window, "softcap": softcap, "alibi_slopes": slopes}
    out = flash_attention(q, k, v, causal=causal, **how)
    return _Exchange.apply(out, tokens_to_heads, heads_to_tokens, of_queries, group, "out", check is not False)


def heads_to_tokens(
    x: Float[Tensor, "B H share D"], lengths: list[int], group: Group, name: str
) -> Float[Tensor, "B heads T D"]:
    """Give away all heads but H / n, for the other processes' tokens of these heads."""
    _, count = rank_and_size(group)
    pieces = x.chunk(count, dim=1)
    shapes = [(*pieces[0].shape[:2], length, x.shape[3]) for length in lengths]
    return torch.cat(all_to_all(pieces, shapes, group, name), dim=2)


def tokens_to_heads(
    x: Float[Tensor, "B heads T D"], lengths: list[int], group: Group, name: str
) -> Float[Tensor, "B H share D"]:
    """Give away all tokens but this process's share, for the other heads of that share."""
    rank, _ = rank_and_size(group)
    pieces = x.split(lengths, dim=2)
    shapes = [pieces[rank].shape] * len(pieces)
    return torch.cat(all_to_all(pieces, shapes, group, name), dim=1)


class _Exchange(torch.autograd.Function):
    """`there(x, …)`, with the gradient `back(gradient, …)`, before which all processes compare what they call."""

    @staticmethod
    def forward(
        ctx, x: Tensor, there: Callable, back: Callable, lengths: list[int], group: Group, name: str, compares: bool
    ) -> Tensor:
        ctx.there, ctx.back, ctx.rest, ctx.compares = there, back, (lengths, group, name), compares
        return there(x, *ctx.rest)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        lengths, group, name = ctx.rest
        if ctx.compares:
            compare("the backward of all_to_all_attention", group, dict)
        x = _Exchange.apply(gradient, ctx.back, ctx.there, lengths, group, f"gradient of {name}", False)
        return x, *[None] * 6
