"""The value that all layers of an engine's step share (lesson 9)."""

from typing import NamedTuple

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import Splits

Packed = Float[Tensor, "total_q H D"]
Cache = Shaped[Tensor, "N P Hkv D"]


class Step(NamedTuple):
    """Sequences with packed queries, the blocks of their keys and values, and how to attend to them."""

    block_tables: Int32[Tensor, "B M"]
    seq_lens: Int32[Tensor, " B"]
    cu_seqlens_q: Int32[Tensor, " ends"]
    block_size: int
    decodes: bool  # every sequence has one query
    options: ScoreOptions
    v_scale: float
    splits: Splits | None
    plain: bool = False  # no derivative is wanted, and the tensors have values: an engine knows
