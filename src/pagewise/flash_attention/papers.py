"""The papers' loops (`version_1`, `version_2`) behind a door of their own: any shapes, options and tiles (lesson 6).

In plain torch: to be read, to be counted by `tools.work`, and for the kernels to be held against.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from pagewise.flash_attention import version_1, version_2
from pagewise.flash_attention.differentiable import attend, of_seeing_rows
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.tiles import Tiles
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_counts, check_qkv, check_same, check_shape, check_tensor

Out = Float[Tensor, "B H T D"]
OfRows = Float[Tensor, "B H T"]  # a number per query
Gradients = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]


def flash_attention_1(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    tile_rows: int,
    tile_cols: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
    return_lse: bool = False,
) -> Out | tuple[Out, OfRows]:
    """`naive_attention.attention` by FlashAttention's Algorithm 1, in tiles of tile_rows × tile_cols scores.

    Differentiable in q, k and v, once; the backward is its Algorithm 4. Options as in `attention`, but for dropout:

    Args:
        tile_rows, tile_cols: Br and Bc; any number, also more than there are rows or columns.
        dropout_p, dropout_seed: the weights kept are those of `dropout_mask`. No seed: torch's generator gives one.
        return_lse: also return the natural log-sum-exp of each row of scores, differentiable too.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse). A query that sees no key gets 0 and −inf.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    tiles = _checked(q, k, v, tile_rows, tile_cols, options, dropout_p, dropout_seed)
    return attend(version_1, q, k, v, tiles, return_lse)


def flash_attention_2(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    tile_rows: int,
    tile_cols: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
    return_lse: bool = False,
) -> Out | tuple[Out, OfRows]:
    """`flash_attention_1` by FlashAttention-2's Algorithm 1; the backward is its Algorithm 2."""
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    tiles = _checked(q, k, v, tile_rows, tile_cols, options, dropout_p, dropout_seed)
    return attend(version_2, q, k, v, tiles, return_lse)


@torch.no_grad()
def flash_attention_1_forward(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    tile_rows: int,
    tile_cols: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
) -> tuple[Out, OfRows, OfRows]:
    """(out, m, l) of `flash_attention_1`: the largest score of each row and Σ exp(score − m), for its backward."""
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    tiles = _checked(q, k, v, tile_rows, tile_cols, options, dropout_p, dropout_seed)
    out, m, l = version_1.forward(q, k, v, tiles, q.dtype)
    return out, m.squeeze(-1), l.squeeze(-1)


@torch.no_grad()
def flash_attention_2_forward(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    tile_rows: int,
    tile_cols: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
) -> tuple[Out, OfRows]:
    """(out, lse) of `flash_attention_2`."""
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    tiles = _checked(q, k, v, tile_rows, tile_cols, options, dropout_p, dropout_seed)
    out, lse = version_2.forward(q, k, v, tiles, q.dtype)
    return out, lse.squeeze(-1)


@torch.no_grad()
def flash_attention_1_backward(
    d_out: Out,
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    out: Out,
    m: OfRows,
    l: OfRows,
    *,
    tile_rows: int,
    tile_cols: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
    d_lse: OfRows | None = None,
) -> Gradients:
    """(dq, dk, dv) from what `flash_attention_1_forward` was given and gave. With dropout it needs the same seed."""
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    tiles = _checked(q, k, v, tile_rows, tile_cols, options, dropout_p, dropout_seed)
    _check_stored(q, tiles, dropout_seed, d_lse, d_out=d_out, out=out, m=m, l=l)
    m, l = m[..., None], l[..., None]
    return version_1.backward(d_out, of_seeing_rows(d_lse, m, l), q, k, v, out, m, l, tiles)


@torch.no_grad()
def flash_attention_2_backward(
    d_out: Out,
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    out: Out,
    lse: OfRows,
    *,
    tile_rows: int,
    tile_cols: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
    d_lse: OfRows | None = None,
) -> Gradients:
    """(dq, dk, dv) from what `flash_attention_2_forward` was given and gave. With dropout it needs the same seed."""
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    tiles = _checked(q, k, v, tile_rows, tile_cols, options, dropout_p, dropout_seed)
    _check_stored(q, tiles, dropout_seed, d_lse, d_out=d_out, out=out, lse=lse)
    lse = lse[..., None]
    return version_2.backward(d_out, of_seeing_rows(d_lse, lse), q, k, v, out, lse, tiles)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile_rows: int,
    tile_cols: int,
    options: ScoreOptions,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
) -> Tiles:
    """What every function here checks, and makes of it."""
    check_qkv(q, k, v)
    check_counts(tile_rows=tile_rows, tile_cols=tile_cols)
    options = options.checked(q, k.shape[2]).without_gradient()
    dropout = Dropout.checked(dropout_p, dropout_seed, q.device)
    return Tiles.of(q, k, int(tile_rows), int(tile_cols), options, dropout)


def _check_stored(q: Tensor, tiles: Tiles, dropout_seed: object, d_lse: object, **stored: object) -> None:
    """What a backward function is given besides the forward's arguments."""
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, value in (stored if d_lse is None else stored | {"d_lse": d_lse}).items():
        like_q = name in ("d_out", "out")
        axes, dtype = ("B H T D", q.dtype) if like_q else ("B H T", wide)
        check_tensor(name, value, axes, dtypes=(dtype, wide) if name == "out" else (dtype,))
        check_shape(name, value, q.shape if like_q else q.shape[:3], axes)
        check_same("device", q=q, **{name: value})
    if tiles.dropout.p and dropout_seed is None:
        raise ValueError("dropout_seed must be the one that the forward was given: the same weights are dropped again")
