"""Ring attention: queries stay, keys and values travel from process to process (lesson 10).

Process r holds a share of the queries and a share of the keys. In step i it attends to the keys of process r − i:

    out_i, lse_i = flash_attention(q, k of r − i, v of r − i)        k and v of r − i − 1 arrive meanwhile
    out, lse     = merge of all (out_i, lse_i)                       lesson 3's formula

A process holds its own share of k and v, and at most two others: the share that it computes with and the next one. In
the backward pass, k and v travel once more, and the gradients of each share travel behind it. Each process adds its
part, and after n steps the sum is back at the owner of the share.
Liu, Zaharia & Abbeel 2023.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from pagewise.distributed.blocks import Block, blocks_of_ring
from pagewise.distributed.communication import Group, compare, describe_qkv, rank_and_size, send_to_next
from pagewise.distributed.sequence import Order, check_order, checked_lengths
from pagewise.flash_attention import flash_attention, in_triton
from pagewise.flash_attention.ops import FlashInputs
from pagewise.online_softmax import Partial
from pagewise.tools.checks import check_flag
from pagewise.tools.device import choose_backend


def ring_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    group: Group,
    causal: bool = False,
    scale: float | None = None,
    order: Order = "zigzag",
    return_lse: bool = False,
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Compute `flash_attention` of a sequence whose tokens are spread over the processes of a group.

    Every process passes its share of q and its share of k and v, as `shard_sequence(..., dim=2)` cuts them, and gets
    its share of out. The result is differentiable once in q, k and v. Equal inputs give equal bits.

    All processes must call this function, and all must call `backward` if any does.

    Args:
        group: a group of torch.distributed. None: all processes.
        causal, scale: as in `attention`. Positions are those of the whole sequence: causal aligns its last query with
            its last key.
        order: the order of the shares. With causal, zigzag shares give all processes the same amount of work.
        return_lse: also return the natural log-sum-exp of each row of scores. It is float32 (float64 for float64) and
            differentiable.

    Returns:
        this process's share of out, in the dtype of q; with `return_lse` the pair (out, lse).

    Raises:
        ValueError, TypeError: an argument does not fit in this process or in another process. Every process raises an
            exception before any keys travel.
        RuntimeError: no group was started.
    """
    rank, count = rank_and_size(group)

    def describe() -> dict[str, object]:
        described = describe_qkv(q, k, v, causal=causal, scale=scale)
        check_flag("return_lse", return_lse)
        check_order(order)
        return described | {"order": order}

    everyone = compare(group, describe, may_differ=["T", "S"])
    T = sum(checked_lengths("q", [theirs["T"] for theirs in everyone], order))
    key_lengths = checked_lengths("k and v", [theirs["S"] for theirs in everyone], order)
    ring_blocks = blocks_of_ring((T, sum(key_lengths)), count, rank, causal=causal, order=order)
    out, lse = _RingAttention.apply(q, k, v, Ring(group, key_lengths, ring_blocks, everyone[rank]["scale"]))
    return (out, lse) if return_lse else out


class Ring(NamedTuple):
    """A group of processes that pass on shares of keys, and the blocks that this process computes."""

    group: Group
    key_lengths: list[int]
    blocks: list[list[Block]]  # for the keys of each process
    scale: float

    def travel(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (rank of the owner, k, v) of all shares, beginning with this process's own share.

        While the caller works with one share, the next share arrives.
        """
        rank, count = rank_and_size(self.group)
        pair = torch.stack((k, v))
        for step in range(count):
            owner = (rank - step) % count
            is_last = step == count - 1
            if not is_last:
                wait = self.pass_on(pair, owner, "keys and values")
            yield owner, *pair
            if not is_last:
                pair = wait()

    def pass_on(self, pair: Tensor, owner: int, name: str) -> Callable[[], Tensor]:
        """Start to send [2, B, Hkv, S, D] of `owner`'s share, and to receive the same of the process before `owner`."""
        shape = list(pair.shape)
        shape[3] = self.key_lengths[owner - 1]
        return send_to_next(pair, pair.new_empty(shape), self.group, name)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring):
        B, H, T, D = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        seen = Partial.empty(B, H, T, head_size=D, dtype=wide, device=q.device)
        for owner, keys, values in ring.travel(k, v):
            for rows, cols, causal in ring.blocks[owner]:
                of_block = q[:, :, rows], keys[:, :, cols], values[:, :, cols]
                out, lse = flash_attention(*of_block, causal=causal, scale=ring.scale, return_lse=True)
                block = Partial(lse, torch.ones_like(lse), out.to(wide))  # normalised: m is lse, and l is 1
                before = Partial(*(x[:, :, rows] for x in seen))
                for x, merged in zip(seen, before.merge(block), strict=True):
                    x[:, :, rows] = merged
        out, lse = seen.output().to(q.dtype), seen.lse()
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        ring, arriving = ctx.ring, None
        backend = choose_backend("auto", q.device, in_triton.refuses(q))
        dq = torch.zeros_like(q, dtype=lse.dtype)
        for owner, keys, values in ring.travel(k, v):
            d_pair = torch.zeros(2, *keys.shape, dtype=lse.dtype, device=q.device)
            for rows, cols, causal in ring.blocks[owner]:
                results = (x[:, :, rows].contiguous() for x in (d_out, d_lse, out, lse))
                tensors = (q[:, :, rows], keys[:, :, cols], values[:, :, cols], *[None] * 5)
                inputs = FlashInputs(*tensors, ring.scale, causal, None, 0.0, 0.0, backend)
                # out and lse are those of all keys, so these are this block's parts of the whole gradients
                parts = torch.ops.pagewise.flash_attention_backward(*results, q.new_empty(0), *inputs)
                dq[:, :, rows] += parts[0]
                d_pair[:, :, :, cols] += torch.stack(parts[1:])
            if arriving is not None:
                d_pair += arriving()
            if len(ring.blocks) > 1:
                arriving = ring.pass_on(d_pair, owner, "gradients of keys and values")
        dk, dv = d_pair if arriving is None else arriving()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
