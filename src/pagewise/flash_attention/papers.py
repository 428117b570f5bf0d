"""The loops of both papers (`version_1`, `version_2`) as functions, for any shapes, options and tiles (lesson 6).

They are plain torch: code to read, to count with `tools.work`, and to compare the kernels with. Every function takes
tile_rows and tile_cols, and these **options, by name:

    causal, window, scale, softcap, alibi_slopes, attn_mask      as in `naive_attention.attention`
    dropout_p, dropout_seed      weights are kept as `dropout_mask` says; without a seed, torch's generator draws one
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagewise.flash_attention import version_1, version_2
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.inputs import NAIVE, Gradients, Keys, OfRows, Out
from pagewise.flash_attention.ops import attend
from pagewise.flash_attention.tiles import Tiles, gradient_of_lse
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_counts, check_qkv, check_same, check_shape, check_tensor
from pagewise.tools.transforms import check_derivative


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
    return _attend("flash_attention_1", q, k, v, return_lse, tile_rows=tile_rows, tile_cols=tile_cols, **options)


def flash_attention_2(
    q: Out, k: Keys, v: Keys, *, tile_rows: int, tile_cols: int, return_lse: bool = False, **options: Any
) -> Out | tuple[Out, OfRows]:
    """Compute the same as `flash_attention_1` by FlashAttention-2's Algorithm 1; the backward is Algorithm 2."""
    return _attend("flash_attention_2", q, k, v, return_lse, tile_rows=tile_rows, tile_cols=tile_cols, **options)


def flash_attention_1_forward(q: Out, k: Keys, v: Keys, **options: Any) -> tuple[Out, OfRows, OfRows]:
    """Return (out, m, l) of `flash_attention_1` for its backward: m is the largest score, l is Σ exp(score − m)."""
    return _forward(version_1, q, k, v, options)


def flash_attention_2_forward(q: Out, k: Keys, v: Keys, **options: Any) -> tuple[Out, OfRows]:
    """Return (out, lse) of `flash_attention_2`."""
    return _forward(version_2, q, k, v, options)


def flash_attention_1_backward(
    d_out: Out, q: Out, k: Keys, v: Keys, out: Out, m: OfRows, l: OfRows, *, d_lse: OfRows | None = None, **options: Any
) -> Gradients:
    """Return (dq, dk, dv) from arguments and results of `flash_attention_1_forward`. Dropout needs its seed."""
    return _backward(version_1, d_out, q, k, v, out, options, d_lse=d_lse, m=m, l=l)


def flash_attention_2_backward(
    d_out: Out, q: Out, k: Keys, v: Keys, out: Out, lse: OfRows, *, d_lse: OfRows | None = None, **options: Any
) -> Gradients:
    """Return (dq, dk, dv) from arguments and results of `flash_attention_2_forward`. Dropout needs its seed."""
    return _backward(version_2, d_out, q, k, v, out, options, d_lse=d_lse, lse=lse)


def _attend(function: str, q: Out, k: Keys, v: Keys, return_lse: bool, **options: Any) -> object:
    tiles = _checked(q, k, v, **options)
    check_derivative(function, q, k, v, has=("backward",), remedy=NAIVE)
    out, lse = attend(q, k, v, tiles.options, tiles.dropout, function, tiles.Br, tiles.Bc)
    return (out, lse) if return_lse else out


@torch.no_grad()
def _forward(version: ModuleType, q: Out, k: Keys, v: Keys, options: dict[str, Any]) -> tuple[Tensor, ...]:
    out, *of_rows = version.forward(q, k, v, _checked(q, k, v, **options), q.dtype)
    return out, *(x.squeeze(-1) for x in of_rows)


@torch.no_grad()
def _backward(
    version: ModuleType, d_out: Out, q: Out, k: Keys, v: Keys, out: Out, options: dict, **of_rows: Any
) -> Gradients:
    tiles, wide = _checked(q, k, v, **options), torch.promote_types(q.dtype, torch.float32)
    checks = [("d_out", d_out, "B H T D", [q.dtype]), ("out", out, "B H T D", [q.dtype, wide])]
    checks += [(name, x, "B H T", [wide]) for name, x in of_rows.items() if x is not None]
    for name, x, axes, dtypes in checks:
        check_tensor(name, x, axes, dtypes=dtypes)
        check_shape(name, x, q.shape[: x.dim()], axes)
        check_same("device", q=q, **{name: x})
    if tiles.dropout.p and options.get("dropout_seed") is None:
        raise ValueError("dropout_seed must be the seed of the forward, so that the same weights are dropped again")
    d_lse, *stats = of_rows.values()
    d_lse = gradient_of_lse(d_lse, stats[0])
    return version.backward(d_out, d_lse, q, k, v, out, *(x[..., None] for x in stats), tiles)


def _checked(q: Out, k: Keys, v: Keys, *, tile_rows: int, tile_cols: int, **options: Any) -> Tiles:
    """Check the arguments that all functions here share."""
    known = (*ScoreOptions._fields, "dropout_p", "dropout_seed")
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: the options are {', '.join(known)}")
    check_qkv(q, k, v)
    check_counts(tile_rows=tile_rows, tile_cols=tile_cols)
    dropout = options.pop("dropout_p", 0.0), options.pop("dropout_seed", None)
    of_scores = ScoreOptions(**options).checked(q, k.shape[2]).without_gradient()
    return Tiles(q, k, int(tile_rows), int(tile_cols), of_scores, Dropout.checked(*dropout, q.device))
