"""The blocks of one step of ring attention: the queries and keys that see each other (lesson 10).

A process has the queries of its own share and the keys of another share. Both are in ascending order of position. A
causal query sees the keys up to its own position, so query i sees the first seen[i] of these keys, and seen never
decreases. The queries are cut so that in each part seen is constant or grows by one:

    seen = 0, 0, 0         no key is visible: nothing is computed (these are the first queries)
    seen = 5, 5, 5         each query sees the same 5 keys: attention without a mask
    seen = 3, 4, 5         query i sees one key more than query i − 1: causal attention over 5 keys

With T = S, every step is at most one block, for contiguous, zigzag and striped shares alike. On a CPU, torch's fused
attention computes a block without a mask, and a causal block with as many queries as keys.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pagewise.distributed.sequence import Order, positions
from pagewise.flash_attention import flash_attention, in_triton
from pagewise.flash_attention.ops import FlashInputs
from pagewise.tools.device import choose_backend


class Block(NamedTuple):
    """Queries `rows` and keys `cols` of two shares. One call of `attend_to_block` computes a block."""

    rows: slice
    cols: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """The number of pairs of query and key that see each other."""
        T, S = self.rows.stop - self.rows.start, self.cols.stop - self.cols.start
        if not self.causal:
            return T * S
        first = max(S - T + 1, 0)  # the keys that the first query sees; each query sees one key more
        return (first + S) * (S - first + 1) // 2


def blocks(queries: Int64[Tensor, " T"], keys: Int64[Tensor, " S"], *, causal: bool) -> list[Block]:
    """Return the blocks of one step. Together they contain each visible pair of query and key exactly once.

    Args:
        queries, keys: positions, ascending. Without causal only their numbers matter.
    """
    if not causal:
        return [Block(slice(0, len(queries)), slice(0, len(keys)), False)] if len(queries) and len(keys) else []
    seen = torch.searchsorted(keys, queries, right=True)  # the keys at most at the position of each query
    found, row = [], int((seen == 0).sum())
    while row < len(seen):
        rest = seen[row:] - seen[row]
        constant = int((rest == 0).sum())
        growing = int((rest == torch.arange(len(rest))).long().cumprod(0).sum())
        stop = row + max(constant, growing)
        found.append(Block(slice(row, stop), slice(0, int(seen[stop - 1])), growing > constant))
        row = stop
    return found


def blocks_of_ring(lengths: tuple[int, int], count: int, rank: int, *, causal: bool, order: Order) -> list[list[Block]]:
    """Return for each process of the ring the blocks of its keys and of the queries of process `rank`.

    Args:
        lengths: (T, S) of the whole sequence. Causal aligns the last query with the last key, as in `attention`.
    """
    T, S = lengths
    queries = positions(T, count, rank, order) + (S - T)
    return [blocks(queries, positions(S, count, source, order), causal=causal) for source in range(count)]


def attend_to_block(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Return (out, lse) of a block, without a gradient: by torch's fused attention on a CPU, else by the package's."""
    if _suits_fused(q, k, v, causal, scale, softcap):
        with torch.autocast("cpu", enabled=False):
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = fused(q, k, v, 0.0, causal, scale=scale)
        if lse.isfinite().all():
            return out, lse
    return flash_attention(q, k, v, causal=causal, scale=scale, softcap=softcap, return_lse=True)


def block_gradients(
    d_out: Float[Tensor, "B H T D"],
    d_lse: Float[Tensor, "B H T"] | None,
    out: Float[Tensor, "B H T D"],
    lse: Float[Tensor, "B H T"],
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's parts of the gradients of q, k and v. `out` and `lse` are those of all keys of the sequence."""
    if d_lse is None and _suits_fused(q, k, v, causal, scale, softcap) and lse.isfinite().all():
        with torch.autocast("cpu", enabled=False):
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return fused(d_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    backend = choose_backend("auto", q.device, in_triton.refuses(q))
    inputs = FlashInputs(q, k, v, *[None] * 5, scale, causal, None, softcap, 0.0, backend)
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    return torch.ops.pagewise.flash_attention_backward(d_out, d_lse, out, lse, q.new_empty(0), *inputs)


def _suits_fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, softcap: float) -> bool:
    """Whether torch's fused attention on a CPU computes a block right.

    Its causal mask begins at the first key. It drops NaN from short rows. In 16 bits it rounds weights more than the
    package does.
    """
    if q.device.type != "cpu" or q.dtype not in (torch.float32, torch.float64) or softcap or scale <= 0:
        return False
    fits = q.numel() and k.numel() and (q.shape[2] == k.shape[2] or not causal)
    return bool(fits and torch.isfinite(q.sum() + k.sum() + v.sum()))
