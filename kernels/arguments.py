"""Arguments of kernels that belong together: each of these tuples is one parameter (from lesson 5 on).

`tools.launch.launch` passes a tensor of two or more dimensions as (pointer, stride of each dimension), in these tuples
too. A field is None for an option that is not used, and the kernel is then compiled without that option.

Triton 3.6 allows less than 3.7. After a branch or a loop, it has lost the constants of a tuple within a tuple, such as
a stride of 1, unless the last field of the outer tuple is a constant: `last`. A tuple that holds None is not compared
with None. A device function does not return None, alone or in a tuple. If it returns nothing, its caller gets None.
"""

from typing import NamedTuple

from torch import Tensor

LOG2_E = 1.4426950408889634


class Scoring(NamedTuple):
    """How a product q · k becomes a score, in units of log 2."""

    scale: float  # · log₂ e; with a softcap: the scale of the tanh's argument
    softcap: float | None  # · log₂ e
    slopes: Tensor | None  # ALiBi: [H] float32
    attn_mask: Tensor | None = None  # [B, H, T, S] bytes
    last: None = None  # for Triton 3.6, see above

    @classmethod
    def of(cls, scale: float, softcap: float, slopes: Tensor | None, attn_mask: Tensor | None = None) -> "Scoring":
        """Return these options in the kernels' units. A softcap of 0 is none."""
        if softcap > 0:
            return cls(scale / softcap, softcap * LOG2_E, slopes, attn_mask)
        return cls(scale * LOG2_E, None, slopes, attn_mask)


class Dropout(NamedTuple):
    """Which weights are dropped: those whose 16-bit draw is below `threshold`."""

    seed: Tensor  # [1] int64
    threshold: float  # a whole number; Triton would compile an int of 1, and a multiple of 16, again
    growth: float  # the factor of the weights that are kept


class Packed(NamedTuple):
    """Packed sequences: sequence b is rows cu_seqlens[b] … cu_seqlens[b + 1] − 1 of [1, heads, total, D]."""

    cu_seqlens_q: Tensor  # [B + 1] int32
    cu_seqlens_k: Tensor  # [B + 1] int32
    q_tiles: Tensor | None  # [tiles of queries] int32: the sequence of each tile
    k_tiles: Tensor | None  # [tiles of keys] int32


class Saved(NamedTuple):
    """What the forward leaves for the backward: [B · H · T] float32 each. All are None if no backward needs them."""

    m: Tensor | None  # the largest score of a query, in units of log 2; in a backward without log_l: log₂ Σ 2^score
    log_l: Tensor | None  # log₂ Σ 2^(score − m), and +∞ for a query that sees no key
    delta: Tensor | None  # (out · d_out).sum(-1) − d_lse; None in the forward


class Sizes(NamedTuple):
    """Constants of a kernel. A program owns ROWS queries and visits COLS keys in a step, or the reverse."""

    D: int
    BLOCK_D: int  # the next power of two from D on, at least 16
    ROWS: int  # of queries in a tile
    COLS: int  # of keys in a tile
    CAUSAL: bool


class Results(NamedTuple):
    """Where decode kernels store results: out and lse, and for items that are split the (m, l, acc) of each split."""

    out: Tensor  # [B, H, T, D]
    lse: Tensor  # [B, H, T] float32
    v_scale: float  # a factor of out
    m: Tensor | None  # [slots · ROWS] float32, in units of log 2; None if no item is split
    l: Tensor | None  # [slots · ROWS] float32
    acc: Tensor | None  # [slots · ROWS · D] float32
    last: None = None  # for Triton 3.6, see above


class DecodeSizes(NamedTuple):
    """Constants of a decode kernel. A program owns ROWS query rows and visits TILE keys in a step."""

    P: int | None  # tokens per block of the cache; None: keys and values are dense
    D: int
    BLOCK_D: int  # the power of two from D on, at least 16
    GROUP: int  # query heads per KV head
    ROWS: int  # pairs of a query and a head of the group
    TILE: int
