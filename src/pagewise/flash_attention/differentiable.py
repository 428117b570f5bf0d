"""The papers' loops as an operation that autograd knows (lesson 6)."""

from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention.tiles import Tiles
from pagewise.tools.checks import check_flag
from pagewise.tools.device import wants_gradient


def attend(version: ModuleType, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, return_lse: bool) -> object:
    """The loops of `version`, as a differentiable operation where a gradient is wanted."""
    check_flag("return_lse", return_lse)
    if wants_gradient(q, k, v):
        out, lse = _Attention.apply(q, k, v, version, tiles)
        return (out, lse) if return_lse else out
    out, *stats = version.forward(q, k, v, tiles, q.dtype)
    return (out, lse_of(*stats).squeeze(-1)) if return_lse else out


class _Attention(torch.autograd.Function):
    """(out, lse) by the loops of a version, and its backward.

    That is given O as it was before it was rounded: D = rowsum(dO ∘ O) is subtracted from numbers like itself.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, version: ModuleType, tiles: Tiles):
        O, *stats = version.forward(q, k, v, tiles, torch.promote_types(q.dtype, torch.float32))
        ctx.save_for_backward(q, k, v, O, *stats)
        ctx.version, ctx.tiles = version, tiles
        ctx.set_materialize_grads(False)
        return O.to(q.dtype), lse_of(*stats).squeeze(-1)

    @staticmethod
    def backward(ctx, d_out: Tensor | None, d_lse: Tensor | None):
        q, k, v, O, *stats = ctx.saved_tensors
        d_out = torch.zeros_like(q) if d_out is None else d_out
        d_lse = of_seeing_rows(d_lse, *stats)
        return *_Gradients.apply(ctx.version, ctx.tiles, d_out, d_lse, q, k, v, O, *stats), None, None


class _Gradients(torch.autograd.Function):
    """The backward of a version, which has none itself."""

    @staticmethod
    def forward(ctx, version: ModuleType, tiles: Tiles, *given: Tensor | None):
        return version.backward(*given, tiles)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("FlashAttention is differentiable once: use naive_attention for second derivatives")


def lse_of(m: Tensor, l: Tensor | None = None) -> Tensor:
    """The log-sum-exp, from m and l or as it is."""
    return m if l is None else m + torch.log(l)


def of_seeing_rows(d_lse: Float[Tensor, "B H T"] | None, *stats: Tensor) -> Float[Tensor, "B H T 1"] | None:
    """d_lse, with 0 for queries that see no key: their lse is −∞ whatever q and k are."""
    return None if d_lse is None else d_lse[..., None].masked_fill(lse_of(*stats) == -torch.inf, 0.0)
