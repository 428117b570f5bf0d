"""The blocks of one step of ring attention: the queries and keys that see each other (lesson 10).

A process has the queries of its own share and the keys of another share. Both are in ascending order of position. A
causal query sees the keys up to its own position, so query i sees the first seen[i] of these keys, and seen never
decreases. The queries are cut so that in each part seen is constant or grows by one:

    seen = 0, 0, 0         no key is visible: nothing is computed
    seen = 5, 5, 5         each query sees the same 5 keys: attention without a mask
    seen = 3, 4, 5         query i sees one key more than query i − 1: causal attention over 5 keys

With T = S, every step is at most one block, for contiguous and zigzag shares alike.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from pagewise.distributed.sequence import Order, positions


class Block(NamedTuple):
    """Queries `rows` and keys `cols` of two shares. One call of `flash_attention` computes a block."""

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
    found, row = [], 0
    while row < len(seen):
        rest = seen[row:] - seen[row]
        constant = int((rest == 0).sum())
        growing = int((rest == torch.arange(len(rest))).long().cumprod(0).sum())
        stop = row + max(constant, growing)
        if last := int(seen[stop - 1]):
            found.append(Block(slice(row, stop), slice(0, last), growing > constant))
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
