"""FlashAttention in plain torch, behind the door: FlashAttention-2's loops, forward and backward (lesson 6).

Given what `flash_attention` has checked, on any device and in any dtype, float64 too. Autocast has no say in what is
computed here, as it has none in what a kernel computes: scores and sums are float32 at least.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention import version_2
from pagewise.flash_attention.differentiable import of_seeing_rows
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.tiles import Tiles
from pagewise.options import ScoreOptions

TILE = 128  # rows and columns: large enough that torch's products outweigh Python's loops


def forward(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    options: ScoreOptions,
    dropout: Dropout,
    first_sequence: int = 0,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """(out, lse) of `flash_attention`, out not yet rounded to the dtype of q."""
    tiles = Tiles.of(q, k, TILE, TILE, options, dropout, first_sequence)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = version_2.forward(q, k, v, tiles, wide)
    return out, lse.squeeze(-1)


def backward(
    d_out: Float[Tensor, "B H T D"],
    d_lse: Float[Tensor, "B H T"] | None,
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    out: Float[Tensor, "B H T D"],
    lse: Float[Tensor, "B H T"],
    options: ScoreOptions,
    dropout: Dropout,
    first_sequence: int = 0,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]:
    """(dq, dk, dv) of `flash_attention`."""
    tiles = Tiles.of(q, k, TILE, TILE, options, dropout, first_sequence)
    lse = lse[..., None]
    with torch.autocast(q.device.type, enabled=False):
        return version_2.backward(d_out, of_seeing_rows(d_lse, lse), q, k, v, out, lse, tiles)
