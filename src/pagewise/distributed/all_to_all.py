"""All-to-all attention, known as Ulysses: processes exchange heads for tokens (lesson 10).

Before attention, a process has all H heads of its T / n tokens. Attention needs all tokens of a head, but its heads do
not need each other. So the processes exchange:

    [B, H, T/n, D]  →  all-to-all  →  [B, H/n, T, D]  →  attention  →  [B, H/n, T, D]  →  all-to-all  →  [B, H, T/n, D]

An exchange moves numbers and does not change them, so its gradient is the opposite exchange. Jacobs et al. 2023.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.distributed.communication import Group, all_to_all, compare, compare_backward, described_options, group_of
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
    is differentiable in q, k and v as that of `flash_attention` is.

    Args:
        group: a group of torch.distributed whose size divides Hkv. None: all processes.
        causal, scale, softcap, window, alibi_slopes: as in `attention`, for all H heads of the whole sequence.
        check: as in `ring_attention`.

    Raises:
        ValueError, TypeError, RuntimeError: as `ring_attention`.
    """
    group = group_of(group)
    rank, count = group.rank(), group.size()

    def describe() -> dict[str, object]:
        options = ScoreOptions(scale, causal, window, softcap, alibi_slopes)
        described = described_options(q, k, v, options)
        if (Hkv := k.shape[1]) % count:
            remedy = f"use ring_attention, which takes any number of heads, or a group whose size divides {Hkv}"
            raise ValueError(f"k has Hkv = {Hkv} heads, and {count} processes cannot share them equally: {remedy}")
        return described

    everyone = compare("all_to_all_attention", group, describe, may_differ=["T", "S"], check=check)
    of_queries = checked_lengths("q", [theirs["T"] for theirs in everyone], "contiguous")
    of_keys = checked_lengths("k and v", [theirs["S"] for theirs in everyone], "contiguous")

    # all heads but H / n are given away, for the other processes' tokens of these heads
    pieces = [piece for each in zip(*(x.chunk(count, dim=1) for x in (q, k, v)), strict=True) for piece in each]
    lengths = [length for each in zip(of_queries, of_keys, of_keys, strict=True) for length in each]
    shapes = [(*piece.shape[:2], length, q.shape[3]) for piece, length in zip(pieces, lengths, strict=True)]
    arrived = all_to_all(pieces, shapes, group, "q, k and v")
    q, k, v = (torch.cat(arrived[i::3], dim=2) for i in range(3))
    slopes = None if alibi_slopes is None else alibi_slopes.chunk(count)[rank]  # of the heads that this process has
    scale = everyone[rank]["scale"]
    out = flash_attention(q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, alibi_slopes=slopes)
    pieces = out.split(of_queries, dim=2)  # all tokens but a share are given away, for the other heads of that share
    out = torch.cat(all_to_all(pieces, [pieces[rank].shape] * count, group, "out"), dim=1)
    compare_backward("all_to_all_attention", group, out, check)
    return out
