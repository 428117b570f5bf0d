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

from pagewise.distributed.blocks import Block, attend_to_block, block_gradients, blocks_of_ring
from pagewise.distributed.communication import (
    Group,
    compare,
    described_options,
    group_of,
    rank_and_size,
    refuse_options,
    send_to_next,
)
from pagewise.distributed.sequence import Order, check_order, checked_lengths
from pagewise.online_softmax import finite
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_flag
from pagewise.tools.transforms import outside_graphs


@outside_graphs("ring_attention", remedy="torch.compile for the functions around it")
def ring_attention(
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
    order: Order = "zigzag",
    return_lse: bool = False,
    check: bool | None = None,
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Compute `flash_attention` of a sequence whose tokens are spread over the processes of a group.

    Every process passes its share of q and its share of k and v, as `shard_sequence(..., dim=2)` cuts them, and gets
    its share of out. The result is differentiable once in q, k and v. Equal inputs give equal bits.

    All processes must call this function, and all must call `backward` if any does.

    Args:
        group: a group of torch.distributed. None: all processes.
        causal, scale, softcap: as in `attention`. Positions are those of the whole sequence: causal aligns its last
            query with its last key.
        window, alibi_slopes: None. `all_to_all_attention` has both.
        order: the order of the shares. With causal, zigzag and striped shares give all processes the same work.
        return_lse: also return the natural log-sum-exp of each row of scores. It is float32 (float64 for float64) and
            differentiable.
        check: False: the processes do not compare their arguments, and every share has equally many tokens. Arguments
            that differ then give wrong results, or make processes wait for the time limit of the group.

    Returns:
        this process's share of out, in the dtype of q; with `return_lse` the pair (out, lse).

    Raises:
        ValueError, TypeError: an argument does not fit in this process or in another process. Every process raises an
            exception before any keys travel.
        RuntimeError: no group was started, or a process has ended or called nothing within the group's time limit.
    """
    rank, count = rank_and_size(group)

    def describe() -> dict[str, object]:
        check_flag("return_lse", return_lse)
        check_order(order)
        # the tokens of a share are not neighbours
        refuse_options("ring_attention", "all_to_all_attention", window=window, alibi_slopes=alibi_slopes)
        return {**described_options(q, k, v, ScoreOptions(scale, causal, None, softcap), check), "order": order}

    may_differ = ["T", "S"]
    everyone = compare("ring_attention", group, describe, may_differ=may_differ, check=check is not False)
    T = sum(checked_lengths("q", [theirs["T"] for theirs in everyone], order))
    key_lengths = checked_lengths("k and v", [theirs["S"] for theirs in everyone], order)
    ring_blocks = blocks_of_ring((T, sum(key_lengths)), count, rank, causal=causal, order=order)
    ring = Ring(group_of(group), key_lengths, ring_blocks, everyone[rank]["scale"], float(softcap), check is not False)
    out, lse = _RingAttention.apply(q, k, v, ring)
    return (out, lse) if return_lse else out


class Ring(NamedTuple):
    """A group of processes that pass on shares of keys, and the blocks that this process computes."""

    group: Group
    key_lengths: list[int]
    blocks: list[list[Block]]  # for the keys of each process
    scale: float
    softcap: float = 0.0
    check: bool = False  # whether the processes say to each other that they begin the backward pass

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
        """Return (out, lse) of this process's queries. All processes must call this method. Nothing is checked."""
        return _RingAttention.forward(None, q, k, v, self)

    def travel(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (rank of the owner, k, v) of all shares, beginning with this process's own share.

        While the caller works with one share, the next share arrives. There are two buffers: the caller reads one, and
        the next share is written into the other one.
        """
        rank, count = rank_and_size(self.group)
        if count == 1:
            yield rank, k, v
            return
        B, Hkv, _, D = k.shape
        buffers = k.new_empty(2, 2 * B * Hkv * max(self.key_lengths) * D)

        def pair_of(owner: int, step: int) -> Float[Tensor, "2 B Hkv S D"]:
            shape = (2, B, Hkv, self.key_lengths[owner], D)
            return buffers[step % 2, : torch.Size(shape).numel()].view(shape)

        pair = torch.stack((k, v), out=pair_of(rank, 0))
        for step in range(count):
            owner = (rank - step) % count
            is_last = step == count - 1
            if not is_last:
                wait = send_to_next(pair, pair_of(owner - 1, step + 1), self.group, "keys and values")
            yield owner, *((k, v) if step == 0 else pair)
            if not is_last:
                pair = wait()

    def pass_on_gradients(self, pair: Float[Tensor, "2 B Hkv S D"], owner: int) -> Callable[[], Tensor]:
        """Start to send gradients of `owner`'s share, and to receive those of the share of the process before it."""
        shape = (*pair.shape[:3], self.key_lengths[owner - 1], pair.shape[4])
        return send_to_next(pair, pair.new_empty(shape), self.group, "gradients of keys and values")


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for owner, keys, values in ring.travel(k, v):
            for rows, cols, causal in ring.blocks[owner]:
                of_block = q[:, :, rows], keys[:, :, cols], values[:, :, cols]
                new, new_lse = attend_to_block(*of_block, causal=causal, scale=ring.scale, softcap=ring.softcap)
                before = lse[:, :, rows]
                total = torch.logaddexp(before, new_lse)  # lesson 3's merge, of results that are normalised
                a, b = torch.exp(before - finite(total)), torch.exp(new_lse - finite(total))
                out[:, :, rows].mul_(a[..., None]).addcmul_(new.to(wide), b[..., None])
                lse[:, :, rows] = total
        out = out.to(q.dtype)
        if ctx is not None:
            ctx.ring = ring
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        ring, arriving = ctx.ring, None
        if ring.check:
            compare("the backward of ring_attention", ring.group, dict)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        dq = torch.zeros_like(q, dtype=lse.dtype)
        for owner, keys, values in ring.travel(k, v):
            d_pair = torch.zeros(2, *keys.shape, dtype=lse.dtype, device=q.device)
            for rows, cols, causal in ring.blocks[owner]:
                # out and lse are those of all keys, so these are this block's parts of the whole gradients
                results = [x if x is None else x[:, :, rows].contiguous() for x in (d_out, d_lse, out, lse)]
                of_block = q[:, :, rows], keys[:, :, cols], values[:, :, cols]
                parts = block_gradients(*results, *of_block, causal=causal, scale=ring.scale, softcap=ring.softcap)
                dq[:, :, rows] += parts[0]
                for total, part in zip(d_pair, parts[1:], strict=True):
                    total[:, :, cols] += part
            if arriving is not None:
                d_pair += arriving()
            if len(ring.blocks) > 1:
                arriving = ring.pass_on_gradients(d_pair, owner)
        dk, dv = d_pair if arriving is None else arriving()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
