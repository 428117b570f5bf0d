"""Ring attention: queries stay, keys and values travel from process to process (lesson 10).

Process r holds a share of the queries and a share of the keys. In step i it attends to the keys of process r − i:

    out_i, lse_i = flash_attention(q, k of r − i, v of r − i)        k and v of r − i − 1 arrive meanwhile
    out, lse     = merge of all (out_i, lse_i)                       lesson 3's formula

A process holds its own share of k and v, and at most two others. In the backward pass, k and v travel once more, and
the gradients of each share travel behind it. Each process adds its part, and after n steps the sum is back at the owner
of the share. Liu, Zaharia & Abbeel 2023.

A causal query sees the keys up to its own position, so query i sees the first seen[i] keys of a share, and seen never
decreases. The queries of a step are cut into blocks, in which seen is constant or grows by one:

    seen = 0, 0, 0         no key is visible: nothing is computed (these are the first queries)
    seen = 5, 5, 5         each query sees the same 5 keys: attention without a mask
    seen = 3, 4, 5         query i sees one key more than query i − 1: causal attention over 5 keys

With T = S, every step is at most one block, for contiguous, zigzag and striped shares alike.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from pagewise.distributed import communication
from pagewise.distributed.communication import Group, send_to_next
from pagewise.distributed.sequence import Order, checked_lengths, positions
from pagewise.flash_attention import flash_attention, in_triton
from pagewise.flash_attention.inputs import FlashInputs
from pagewise.online_softmax import finite
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_flag
from pagewise.tools.device import choose_backend
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
    its share of out. The result is differentiable once in q, k and v. Equal inputs give equal bits. All processes must
    call this function, and all must call `backward` if any does.

    Args:
        group: a group of torch.distributed. None: all processes.
        causal, scale, softcap: as in `attention`. Positions are those of the whole sequence.
        window, alibi_slopes: None. `all_to_all_attention` has both.
        order: the order of the shares. With causal, zigzag and striped shares give all processes the same work.
        return_lse: also return the natural log-sum-exp of each row of scores. It is float32 (float64 for float64) and
            differentiable.
        check: the same in every process. False: the processes do not compare their arguments, and every share has
            equally many tokens. Arguments that differ then give wrong results, or make processes wait for the time
            limit of the group.

    Raises:
        ValueError, TypeError: an argument does not fit in this process or in another process. Every process raises an
            exception before any keys travel.
        RuntimeError: no group was started, or a process has ended or called nothing within the group's time limit.
    """
    group = communication.group_of(group)

    def describe() -> dict[str, object]:
        check_flag("return_lse", return_lse)
        # the tokens of a share are not neighbours
        communication.refuse_options("ring_attention", window=window, alibi_slopes=alibi_slopes)
        options = ScoreOptions(scale, causal, None, softcap)
        return {**communication.described_options(q, k, v, options), "order": order}

    everyone = communication.compare("ring_attention", group, describe, may_differ=["T", "S"], check=check)
    T = sum(checked_lengths("q", [theirs["T"] for theirs in everyone], order))
    S = sum(checked_lengths("k and v", [theirs["S"] for theirs in everyone], order))
    queries = positions(T, group.size(), group.rank(), order) + (S - T)  # the last query has the last key, as always
    options = ScoreOptions(everyone[group.rank()]["scale"], causal, None, float(softcap))
    out, lse = Ring(group, queries, S, order, options).attend(q, k, v)
    communication.compare_backward("ring_attention", group, out, check)
    return (out, lse) if return_lse else out


class Block(NamedTuple):
    """Queries `rows` and keys `cols` of two shares. One call of `attend_to_block` computes a block."""

    rows: slice
    cols: slice
    causal: bool


class Ring:
    """A group of processes that pass on shares of keys, and the blocks that this process computes."""

    def __init__(
        self, group: dist.ProcessGroup, queries: Int64[Tensor, " T"], S: int, order: Order, options: ScoreOptions
    ) -> None:
        """Plan for S keys in all, where this process has queries at these positions. The options have a scale."""
        keys = [positions(S, group.size(), rank, order) for rank in range(group.size())]
        self.group, self.options, self.key_lengths = group, options, list(map(len, keys))
        self.blocks = [blocks(queries, of_rank, causal=options.causal) for of_rank in keys]  # by the owner of the keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
        """Return (out, lse) of this process's queries. All processes call this method together."""
        return _RingAttention.apply(q, k, v, self)

    def travel(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (rank of the owner, k, v) of all shares, this process's own share first.

        While the caller reads one of two buffers, the next share arrives in the other one.
        """
        B, Hkv, _, D = k.shape
        buffers = k.new_empty(2, 2 * B * Hkv * max(self.key_lengths) * D)

        def pair_of(owner: int, step: int) -> Float[Tensor, "2 B Hkv S D"]:
            shape = (2, B, Hkv, self.key_lengths[owner], D)
            return buffers[step % 2, : torch.Size(shape).numel()].view(shape)

        owner, count = self.group.rank(), self.group.size()
        pair = torch.stack((k, v), out=pair_of(owner, 0))
        for step in range(1, count):
            wait = send_to_next(pair, pair_of(owner - 1, step), self.group, "keys and values")
            yield owner, *pair
            owner, pair = (owner - 1) % count, wait()
        yield owner, *pair


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for owner, keys, values in ring.travel(k, v):
            for rows, cols, causal in ring.blocks[owner]:
                of_block = q[:, :, rows], keys[:, :, cols], values[:, :, cols]
                new, new_lse = attend_to_block(*of_block, ring.options._replace(causal=causal))
                before = lse[:, :, rows]
                total = torch.logaddexp(before, new_lse)  # lesson 3's merge, of results that are normalised
                a, b = torch.exp(before - finite(total)), torch.exp(new_lse - finite(total))
                out[:, :, rows].mul_(a[..., None]).addcmul_(new.to(wide), b[..., None])
                lse[:, :, rows] = total
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        ring, arriving = ctx.ring, None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        dq = torch.zeros_like(q, dtype=lse.dtype)
        for owner, keys, values in ring.travel(k, v):
            d_pair = torch.zeros(2, *keys.shape, dtype=lse.dtype, device=q.device)
            for rows, cols, causal in ring.blocks[owner]:
                # out and lse are those of all keys, so these are this block's parts of the whole gradients
                results = [x if x is None else x[:, :, rows].contiguous() for x in (d_out, d_lse, out, lse)]
                of_block = q[:, :, rows], keys[:, :, cols], values[:, :, cols]
                parts = block_gradients(*results, *of_block, ring.options._replace(causal=causal))
                dq[:, :, rows] += parts[0]
                d_pair[0, :, :, cols] += parts[1]
                d_pair[1, :, :, cols] += parts[2]
            if arriving is not None:
                d_pair += arriving()
            if len(ring.blocks) > 1:  # the sums of the share before this one arrive, and wait for this process's part
                incoming = d_pair.new_empty(*d_pair.shape[:3], ring.key_lengths[owner - 1], d_pair.shape[4])
                arriving = send_to_next(d_pair, incoming, ring.group, "gradients of keys and values")
        dk, dv = d_pair if arriving is None else arriving()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def blocks(queries: Int64[Tensor, " T"], keys: Int64[Tensor, " S"], *, causal: bool) -> list[Block]:
    """Return the blocks of one step. Together they contain each visible pair of query and key exactly once.

    Args:
        queries, keys: positions, ascending. Without causal only their numbers matter.
    """
    # the keys at most at the position of each query
    seen = torch.searchsorted(keys, queries, right=True) if causal else torch.full_like(queries, len(keys))
    found, row = [], int((seen == 0).sum())
    while row < len(seen):
        rest = seen[row:] - seen[row]
        constant = int((rest == 0).sum())
        growing = int((rest == torch.arange(len(rest))).long().cumprod(0).sum())
        stop = row + max(constant, growing)
        found.append(Block(slice(row, stop), slice(0, int(seen[stop - 1])), growing > constant))
        row = stop
    return found


def attend_to_block(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Return (out, lse) of a block, without a gradient: by torch's fused attention on a CPU, else by the package's."""
    scale, causal, _, softcap, *_ = options
    if _suits_fused(q, k, v, options):
        with torch.autocast("cpu", enabled=False):
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = fused(q, k, v, 0.0, causal, scale=scale)
        if lse.isfinite().all():
            return out, lse
    return flash_attention(q, k, v, causal=causal, scale=scale, softcap=softcap, return_lse=True)


def block_gradients(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's parts of the gradients of q, k and v. `out` and `lse` are those of all keys of the sequence."""
    scale, causal, _, softcap, *_ = options
    if d_lse is None and _suits_fused(q, k, v, options) and lse.isfinite().all():
        with torch.autocast("cpu", enabled=False):
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return fused(d_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    backend = choose_backend("auto", lse.device, in_triton.refuses(q))
    inputs = FlashInputs(q, k, v, *[None] * 5, scale, causal, None, softcap, 0.0, backend)
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    return torch.ops.pagewise.flash_attention_backward(d_out, d_lse, out, lse, q.new_empty(0), *inputs)


def _suits_fused(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> bool:
    """Whether torch's fused attention on a CPU computes a block right.

    Its causal mask begins at the first key. It drops NaN from short rows. In 16 bits it rounds weights more than the
    package does.
    """
    is_plain = not options.softcap and options.scale > 0 and (q.shape[2] == k.shape[2] or not options.causal)
    if q.device.type != "cpu" or q.dtype not in (torch.float32, torch.float64) or not is_plain:
        return False
    return bool(q.numel() and k.numel() and torch.isfinite(q.sum() + k.sum() + v.sum()))
