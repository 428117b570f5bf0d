"""The loops of both papers (`version_1`, `version_2`) as functions: any shapes, options and tiles (lesson 6).

They are plain torch: to be read, to be counted by `tools.work`, and to compare the kernels with. Every function takes
these **options, by name:

    causal, window, scale, softcap, alibi_slopes, attn_mask      as in `naive_attention.attention`
    dropout_p, dropout_seed      the weights kept are those of `dropout_mask`; no seed: torch's generator draws one
"""

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention import version_1, version_2
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.tiles import Tiles, gradient_of_lse
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_counts, check_qkv, check_same, check_shape, check_tensor
from pagewise.tools.device import wants_gradient

Out = Float[Tensor, "B H T D"]
Keys = Float[Tensor, "B Hkv S D"]
OfRows = Float[Tensor, "B H T"]  # a number per query
Gradients = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]


def flash_attention_1(
    q: Out, k: Keys, v: Keys, *, tile_rows: int, tile_cols: int, return_lse: bool = False, **options: Any
) -> Out | tuple[Out, OfRows]:
    """Compute `naive_attention.attention` by FlashAttention's Algorithm 1, in tiles of tile_rows × tile_cols scores.

    The result is differentiable once in q, k and v; the backward is Algorithm 4.

    Args:
        tile_rows, tile_cols: Br and Bc. Any number is allowed, also more than the rows or columns.
        return_lse: also return the natural log-sum-exp of each row of scores. It is differentiable too.
        options: see the docstring of this module.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse). A query that sees no key gets 0 and −inf.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    return _attend(version_1, q, k, v, _checked(q, k, v, tile_rows, tile_cols, options), return_lse)


def flash_attention_2(
    q: Out, k: Keys, v: Keys, *, tile_rows: int, tile_cols: int, return_lse: bool = False, **options: Any
) -> Out | tuple[Out, OfRows]:
    """Compute the same as `flash_attention_1` by FlashAttention-2's Algorithm 1; the backward is Algorithm 2."""
    return _attend(version_2, q, k, v, _checked(q, k, v, tile_rows, tile_cols, options), return_lse)


@torch.no_grad()
def flash_attention_1_forward(
    q: Out, k: Keys, v: Keys, *, tile_rows: int, tile_cols: int, **options: Any
) -> tuple[Out, OfRows, OfRows]:
    """(out, m, l) of `flash_attention_1`: the largest score of each row and Σ exp(score − m), for its backward."""
    tiles = _checked(q, k, v, tile_rows, tile_cols, options)
    out, m, l = version_1.forward(q, k, v, tiles, q.dtype)
    return out, m.squeeze(-1), l.squeeze(-1)


@torch.no_grad()
def flash_attention_2_forward(
    q: Out, k: Keys, v: Keys, *, tile_rows: int, tile_cols: int, **options: Any
) -> tuple[Out, OfRows]:
    """(out, lse) of `flash_attention_2`."""
    tiles = _checked(q, k, v, tile_rows, tile_cols, options)
    out, lse = version_2.forward(q, k, v, tiles, q.dtype)
    return out, lse.squeeze(-1)


@torch.no_grad()
def flash_attention_1_backward(
    d_out: Out,
    q: Out,
    k: Keys,
    v: Keys,
    out: Out,
    m: OfRows,
    l: OfRows,
    *,
    tile_rows: int,
    tile_cols: int,
    d_lse: OfRows | None = None,
    **options: Any,
) -> Gradients:
    """(dq, dk, dv) from the arguments and results of `flash_attention_1_forward`. Dropout needs the same seed."""
    tiles = _checked(q, k, v, tile_rows, tile_cols, options)
    _check_stored(q, options, d_lse, d_out=d_out, out=out, m=m, l=l)
    return version_1.backward(d_out, gradient_of_lse(d_lse, m), q, k, v, out, m[..., None], l[..., None], tiles)


@torch.no_grad()
def flash_attention_2_backward(
    d_out: Out,
    q: Out,
    k: Keys,
    v: Keys,
    out: Out,
    lse: OfRows,
    *,
    tile_rows: int,
    tile_cols: int,
    d_lse: OfRows | None = None,
    **options: Any,
) -> Gradients:
    """(dq, dk, dv) from the arguments and results of `flash_attention_2_forward`. Dropout needs the same seed."""
    tiles = _checked(q, k, v, tile_rows, tile_cols, options)
    _check_stored(q, options, d_lse, d_out=d_out, out=out, lse=lse)
    return version_2.backward(d_out, gradient_of_lse(d_lse, lse), q, k, v, out, lse[..., None], tiles)


# ------------------------------------------------------------------------------------------------ autograd


def _attend(version: ModuleType, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, return_lse: bool) -> object:
    """out, or (out, lse), by the loops of `version`; differentiable if a gradient is needed."""
    if wants_gradient(q, k, v):
        out, lse = _Attention.apply(q, k, v, version, tiles)
    else:
        out, *stats = version.forward(q, k, v, tiles, q.dtype)
        lse = _lse_of(*stats) if return_lse else None
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """(out, lse) by the loops of a version, and its backward.

    The backward gets O before it is rounded: D = rowsum(dO ∘ O) is subtracted from numbers that are nearly equal to it.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, version: ModuleType, tiles: Tiles):
        O, *stats = version.forward(q, k, v, tiles, torch.promote_types(q.dtype, torch.float32))
        ctx.save_for_backward(q, k, v, O, *stats)
        ctx.version, ctx.tiles = version, tiles
        ctx.set_materialize_grads(False)
        return O.to(q.dtype), _lse_of(*stats)

    @staticmethod
    def backward(ctx, d_out: Tensor | None, d_lse: Tensor | None):
        q, k, v, O, *stats = ctx.saved_tensors
        d_out = torch.zeros_like(q) if d_out is None else d_out
        d_lse = gradient_of_lse(d_lse, stats[0].squeeze(-1))
        return *_Gradients.apply(ctx.version, ctx.tiles, d_out, d_lse, q, k, v, O, *stats), None, None


class _Gradients(torch.autograd.Function):
    """The backward of a version, which is not differentiable itself."""

    @staticmethod
    def forward(ctx, version: ModuleType, tiles: Tiles, *inputs: Tensor | None):
        return version.backward(*inputs, tiles)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("FlashAttention is differentiable once: use naive_attention for second derivatives")


def _lse_of(m: Float[Tensor, "B H T 1"], l: Float[Tensor, "B H T 1"] | None = None) -> OfRows:
    """The log-sum-exp from m and l, or from itself."""
    return (m if l is None else m + torch.log(l)).squeeze(-1)


# ------------------------------------------------------------------------------------------------ checks


def _checked(q: Tensor, k: Tensor, v: Tensor, tile_rows: int, tile_cols: int, options: dict[str, Any]) -> Tiles:
    """Check the arguments that all functions here share."""
    known = (*ScoreOptions._fields, "dropout_p", "dropout_seed")
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: the options are {', '.join(known)}")
    check_qkv(q, k, v)
    check_counts(tile_rows=tile_rows, tile_cols=tile_cols)
    of_scores = ScoreOptions(**{name: value for name, value in options.items() if name in ScoreOptions._fields})
    of_scores = of_scores.checked(q, k.shape[2]).without_gradient()
    dropout = Dropout.checked(options.get("dropout_p", 0.0), options.get("dropout_seed"), q.device)
    return Tiles.of(q, k, int(tile_rows), int(tile_cols), of_scores, dropout)


def _check_stored(q: Tensor, options: dict[str, Any], d_lse: object, **stored: object) -> None:
    """Check what a backward function takes besides the arguments of the forward."""
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, value in (stored if d_lse is None else stored | {"d_lse": d_lse}).items():
        like_q = name in ("d_out", "out")
        axes, dtype = ("B H T D", q.dtype) if like_q else ("B H T", wide)
        check_tensor(name, value, axes, dtypes=(dtype, wide) if name == "out" else (dtype,))
        check_shape(name, value, q.shape if like_q else q.shape[:3], axes)
        check_same("device", q=q, **{name: value})
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        raise ValueError("dropout_seed must be the seed of the forward: the same weights are dropped again")
