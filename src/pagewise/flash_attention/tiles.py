"""Tiles of scores: which queries meet which keys, and what becomes of their products on chip (lesson 6).

The T × S scores are cut into tiles of Br rows and Bc columns. In the loops `i` and `j` are slices of the queries and of
the keys, so that Q_i is q[:, :, i]. All heads of all sequences go through a loop side by side, and the query heads of a
KV head share the K_j and V_j that are loaded for them. On chip numbers are float32 (float64 for float64).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.inputs import Keys, OfRows, Queries
from pagewise.naive_attention import grouped_matmul, visibility
from pagewise.options import ScoreOptions
from pagewise.tools import work
from pagewise.tools.checks import check_count, check_counts
from pagewise.tools.products import product
from pagewise.tools.sizes import cdiv

Rows = Float[Tensor, "B H T 1"]  # a number per query
Scores = Float[Tensor, "B H Br Bc"]


def tile_sizes(sram_bytes: int, head_size: int, itemsize: int) -> tuple[int, int]:
    """(Br, Bc) that FlashAttention's Algorithm 1 takes (line 1): Bc = ⌈M / 4 d⌉, Br = min(Bc, d).

    M counts *elements*: so K_j and V_j fill half of the SRAM, and Q_i and O_i at most the other half.

    Args:
        sram_bytes: on-chip memory of an SM, 192 · 1024 on an A100; at least one element.
        itemsize: bytes per element.

    Raises:
        ValueError, TypeError: an argument is not a count.
    """
    check_counts(head_size=head_size, itemsize=itemsize)
    check_count("sram_bytes", sram_bytes, minimum=itemsize)
    sram_bytes, head_size, itemsize = map(int, (sram_bytes, head_size, itemsize))  # numpy's integers would wrap around
    Bc = cdiv(sram_bytes // itemsize, 4 * head_size)
    return min(Bc, head_size), Bc


class Tiles:
    """The scores of q [B,H,T,D] and k [B,Hkv,S,D] in tiles of Br × Bc, and the options that shape them.

    first: which one of a larger batch the first sequence is here. Dropout counts them.
    """

    def __init__(self, q: Queries, k: Keys, Br: int, Bc: int, options: ScoreOptions, dropout: Dropout, first: int = 0):
        (self.B, self.H, self.T, _), (_, self.Hkv, self.S, _) = q.shape, k.shape
        self.device, self.Br, self.Bc = q.device, Br, Bc
        self.options, self.dropout, self.first_sequence = options, dropout, first

    def rows(self, j: slice | None = None) -> Iterator[slice]:
        """The row tiles in order; given j, only those with a query that may see one of its keys."""
        return (i for i in _slices(self.T, self.Br) if j is None or self._meet(i, j))

    def columns(self, i: slice | None = None) -> Iterator[slice]:
        """The column tiles in order; given i, only those with a key that one of its queries may see."""
        return (j for j in _slices(self.S, self.Bc) if i is None or self._meet(i, j))

    def _meet(self, i: slice, j: slice) -> bool:
        """Whether causal and window leave anything of tile (i, j)."""
        first, last = i.start + self.S - self.T, i.stop - 1 + self.S - self.T  # positions of the queries
        if self.options.causal and j.start > last:
            return False
        return self.options.window is None or j.stop - 1 > first - self.options.window

    def at(self, i: slice, j: slice) -> "Tile":
        """The tile of queries i and keys j."""
        rows, cols = (torch.arange(s.start, s.stop, device=self.device) for s in (i, j))
        options, distance, keep = self.options, None, None
        if options.causal or options.alibi_slopes is not None:
            distance = rows[:, None] + (self.S - self.T) - cols
        if options.attn_mask is not None:
            mask = options.attn_mask.expand(self.B, self.H, self.T, self.S)
            options = options._replace(attn_mask=work.load(mask[:, :, i, j]))
        if self.dropout.p:
            keep = self.dropout.keep(self.B, self.H, rows, cols, self.first_sequence)
        visible = visibility(distance, options) if options.causal else options.attn_mask
        return Tile(distance, visible, keep, self)


class Tile(NamedTuple):
    """A tile of Br queries Q_i and Bc keys K_j."""

    distance: Int[Tensor, "Br Bc"] | None  # query position − key position; None: nobody asks
    visible: Bool[Tensor, "*BH Br Bc"] | None  # None: all keys to all queries
    keep: Bool[Tensor, "B H Br Bc"] | None  # None: no dropout
    of: Tiles

    def scores(self, Q_i: Queries, K_j: Keys) -> Scores:
        """S_ij: Q_i K_jᵀ · scale → softcap → ALiBi → −∞ where a query may not look."""
        return self.scores_and_slope(Q_i, K_j)[0]

    def scores_and_slope(self, Q_i: Queries, K_j: Keys) -> tuple[Scores, float | Scores]:
        """(S_ij, ∂S_ij / ∂(Q_i K_jᵀ)): the scale, and less than that where the softcap bends."""
        softcap, slope = self.of.options.softcap, self.of.options.scale_for(Q_i.shape[-1])
        S_ij = grouped_matmul(Q_i, K_j.mT) * slope
        if softcap > 0:
            tanh = torch.tanh(S_ij / softcap)
            S_ij, slope = softcap * tanh, slope * (1 - tanh**2)
        if self.of.options.alibi_slopes is not None:
            S_ij = S_ij - self.of.options.alibi_slopes.to(S_ij.dtype)[:, None, None] * self.distance.abs()
        return S_ij if self.visible is None else S_ij.masked_fill(~self.visible, -torch.inf), slope

    def drop(self, P_ij: Scores) -> Scores:
        """P_ij after dropout: 0, or multiplied by 1 / (1 − p)."""
        return P_ij if self.keep is None else torch.where(self.keep, P_ij * self.of.dropout.growth, 0.0)

    def seen(self, K_j: Keys) -> Keys:
        """K_j or V_j with 0 for the keys that no query here sees: a weight of 0 does not hide NaN."""
        if self.visible is None:
            return K_j
        seen = self.visible.any(dim=-2)
        if seen.dim() > 1:  # [B, H, Bc]: by any of the query heads of a KV head
            seen = seen.unflatten(1, (self.of.Hkv, -1)).any(dim=2)
        return K_j.masked_fill(~seen[..., None], 0.0)


def nothing_seen(q: Queries) -> tuple[Rows, Rows, Queries]:
    """(m, l, O) of these queries before they have seen a key: −∞, 0 and 0."""
    O = zeros(q)
    l = O.new_zeros(*q.shape[:-1], 1)
    return torch.full_like(l, -torch.inf), l, O


def gradient_of_lse(d_lse: OfRows | None, m_or_lse: OfRows) -> Rows | None:
    """Return d_lse with 0 for queries that see no key: their m and lse are −∞ whatever q and k are."""
    return None if d_lse is None else d_lse.masked_fill(m_or_lse == -torch.inf, 0.0)[..., None]


def zeros(q: Queries) -> Queries:
    """Zeros for a sum over tiles."""
    return q.new_zeros(q.shape, dtype=_wide(q))


def positive(l: Rows) -> Rows:
    """l, with 1 for a query that has seen no key: its O is 0 and stays it."""
    return l.masked_fill(l == 0, 1.0)


def grouped_sum(a: Float[Tensor, "B H n M"], b: Float[Tensor, "B H n N"], Hkv: int) -> Float[Tensor, "B Hkv M N"]:
    """aᵀ b, summed over the query heads of each KV head."""
    a, b = (x.unflatten(1, (Hkv, -1)).flatten(2, 3) for x in (a, b))
    return product(a.mT, b)


def load(x: Float[Tensor, "B heads N D"], i: slice) -> Float[Tensor, "B heads n D"]:
    """x[:, :, i], brought on chip."""
    return work.load(x[:, :, i]).to(_wide(x))


def store(x: Float[Tensor, "B heads N D"], i: slice, x_i: Float[Tensor, "B heads n D"]) -> None:
    """x[:, :, i] = x_i in main memory."""
    work.store(x[:, :, i], x_i)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
