"""Values that belong together, which the host passes to kernels as one parameter.

A tensor is a tuple in itself: (pointer, stride of each dimension), as `pagewise.tools.launch` makes it.
"""

from typing import Any, NamedTuple


class Scoring(NamedTuple):
    """How products q · k become scores in units of log 2, and values a result. None: the option is not used."""

    scale: float  # · log₂ e; with a softcap: the scale of the tanh's argument
    softcap: float | None  # · log₂ e
    slopes: Any  # ALiBi's, [H] float32
    v_scale: float  # of the result


class Results(NamedTuple):
    """Where results go: out and lse, and m, l and acc of splits, all float32 but out."""

    out: Any  # [B, H, T, D]
    lse: Any  # [B, H, T]
    m: Any  # [slots · ROWS]; None if no item is split
    l: Any  # [slots · ROWS]
    acc: Any  # [slots · ROWS · D]


class Sizes(NamedTuple):
    """What the decode kernels are compiled for."""

    P: int | None  # tokens per block of the cache; None: keys and values are dense
    D: int  # head size
    BLOCK_D: int  # the power of two from D on, at least 16
    GROUP: int  # query heads per KV head
    ROWS: int  # query rows of an item: pairs of a query and a head of the group
    TILE: int  # keys per step
