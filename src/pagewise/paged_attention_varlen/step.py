"""The value that all layers of an engine's step share (lesson 9)."""

from typing import NamedTuple

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import DECODING, Splits

Packed = Float[Tensor, "total_q H D"]
Cache = Shaped[Tensor, "N P Hkv D"]


class Step(NamedTuple):
    """Sequences with packed queries, the blocks of their keys and values, and how to attend to them.

    Sequences of length 0 are allowed. Their queries see nothing.
    """

    block_tables: Int32[Tensor, "B M"]
    seq_lens: Int32[Tensor, " B"]
    cu_seqlens_q: Int32[Tensor, " ends"]
    block_size: int
    decodes: bool = False  # every sequence has one query
    options: ScoreOptions = DECODING
    v_scale: float = 1.0
    splits: Splits | None = None
    plain: bool = False  # no derivative is wanted, and the tensors are neither traced nor batched: an engine knows
