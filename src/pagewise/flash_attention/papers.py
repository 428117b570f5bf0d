"""The loops of both papers (`version_1`, `version_2`) as functions, for any shapes, options and tiles (lesson 6).

They are plain torch: code to read, to count with `tools.work`, and to compare the kernels with. Every function takes
tile_rows and tile_cols, and these **options, by name:

    causal, window, scale, softcap, alibi_slopes, attn_mask      as in `naive_attention.attention`
    dropout_p, dropout_seed      weights are kept as `dropout_mask` says; without a seed, torch's generator draws one
"""

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention import version_1, version_2
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.inputs import NAIVE
from pagewise.flash_attention.tiles import Tiles, gradient_of_lse
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_counts, check_qkv, check_same, check_shape, check_tensor
from pagewise.tools.transforms import check_derivative, derivative_of, is_batched, is_traced, outside_graphs

FUNCTIONS = "flash_attention_1 (as flash_attention_2)"
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


def flash_attention_1_forward(q: Out, k: Keys, v: Keys, **options: Any) -> tuple[Out, OfRows, OfRows]:
    """Return (out, m, l) of `flash_attention_1` for its backward: m is the largest score, l is Σ exp(score − m)."""
    return _forward(version_1, q, k, v, **options)


def flash_attention_2_forward(q: Out, k: Keys, v: Keys, **options: Any) -> tuple[Out, OfRows]:
    """Return (out, lse) of `flash_attention_2`."""
    return _forward(version_2, q, k, v, **options)


def flash_attention_1_backward(
    d_out: Out, q: Out, k: Keys, v: Keys, out: Out, m: OfRows, l: OfRows, *, d_lse: OfRows | None = None, **options: Any
) -> Gradients:
    """Return (dq, dk, dv) from arguments and results of `flash_attention_1_forward`. Dropout needs its seed."""
    return _backward(version_1, d_out, q, k, v, out, {"m": m, "l": l}, d_lse, **options)


def flash_attention_2_backward(
    d_out: Out, q: Out, k: Keys, v: Keys, out: Out, lse: OfRows, *, d_lse: OfRows | None = None, **options: Any
) -> Gradients:
    """Return (dq, dk, dv) from arguments and results of `flash_attention_2_forward`. Dropout needs its seed."""
    return _backward(version_2, d_out, q, k, v, out, {"lse": lse}, d_lse, **options)


@torch.no_grad()
def _forward(
    version: ModuleType, q: Tensor, k: Tensor, v: Tensor, *, tile_rows: int, tile_cols: int, **options: Any
) -> tuple[Tensor, ...]:
    out, *of_rows = version.forward(q, k, v, _checked(q, k, v, tile_rows, tile_cols, options), q.dtype)
    return out, *(x.squeeze(-1) for x in of_rows)


@torch.no_grad()
def _backward(
    version: ModuleType,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    of_rows: dict[str, Tensor],
    d_lse: Tensor | None,
    *,
    tile_rows: int,
    tile_cols: int,
    **options: Any,
) -> Gradients:
    tiles = _checked(q, k, v, tile_rows, tile_cols, options)
    wide = torch.promote_types(q.dtype, torch.float32)
    checks = [("d_out", d_out, "B H T D", [q.dtype]), ("out", out, "B H T D", [q.dtype, wide])]
    checks += [(name, x, "B H T", [wide]) for name, x in (of_rows | {"d_lse": d_lse}).items() if x is not None]
    for name, x, axes, dtypes in checks:
        check_tensor(name, x, axes, dtypes=dtypes)
        check_shape(name, x, q.shape[: x.dim()], axes)
        check_same("device", q=q, **{name: x})
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        raise ValueError("dropout_seed must be the seed of the forward, so that the same weights are dropped again")
    rows = [x[..., None] for x in of_rows.values()]
    return version.backward(d_out, gradient_of_lse(d_lse, rows[0].squeeze(-1)), q, k, v, out, *rows, tiles)


# ------------------------------------------------------------------------------------------------ autograd


@outside_graphs(FUNCTIONS, remedy="pagewise.flash_attention.flash_attention")
def _attend(version: ModuleType, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, return_lse: bool) -> object:
    """Return out or (out, lse) by the loops of `version`. The result is differentiable if a gradient is needed."""
    if len({is_batched(x) for x in (q, k, v)}) > 1:
        raise ValueError(
            f"{FUNCTIONS} writes in place, so vmap must batch q, k and v alike: use in_dims=0 for all three"
        )
    if (derivative := derivative_of(q, k, v)) == "forward mode" and is_traced():
        raise ValueError(f"{FUNCTIONS} writes in place, which torch.func.linearize does not follow: use {NAIVE}")
    if derivative in ("backward", "torch.func"):
        check_derivative(FUNCTIONS, q, k, v, has=("backward",), remedy=NAIVE)
        inputs = tiles.options.alibi_slopes, tiles.options.attn_mask, tiles.dropout.seed
        out, lse = _Attention.apply(q, k, v, version, tiles, *inputs)
    else:
        out, *stats = version.forward(q, k, v, tiles, q.dtype)
        lse = _lse_of(*stats) if return_lse else None
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """(out, lse) by the loops of a version, and its backward.

    The backward gets O before it is rounded, because D = rowsum(dO ∘ O) is subtracted from numbers close to it.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, version: ModuleType, tiles: Tiles, *of_tiles: Tensor | None):
        O, *stats = version.forward(q, k, v, tiles, torch.promote_types(q.dtype, torch.float32))
        # autograd watches the tensors of `tiles` too: changed ones must not reach the backward
        ctx.save_for_backward(*of_tiles, q, k, v, O, *stats)
        ctx.version, ctx.tiles = version, tiles
        ctx.set_materialize_grads(False)
        return O.to(q.dtype), _lse_of(*stats)

    @staticmethod
    def backward(ctx, d_out: Tensor | None, d_lse: Tensor | None):
        if is_batched(d_out) or is_batched(d_lse):
            raise RuntimeError(f"{FUNCTIONS} takes no batch of gradients: pass vectorize=False, or use {NAIVE}")
        slopes, mask, seed, q, k, v, O, *stats = ctx.saved_tensors
        options = ctx.tiles.options._replace(alibi_slopes=slopes, attn_mask=mask)
        tiles = ctx.tiles._replace(options=options, dropout=ctx.tiles.dropout._replace(seed=seed))
        d_out = torch.zeros_like(q) if d_out is None else d_out
        d_lse = gradient_of_lse(d_lse, stats[0].squeeze(-1))
        return *_Gradients.apply(ctx.version, tiles, d_out, d_lse, q, k, v, O, *stats), *(None,) * 5


class _Gradients(torch.autograd.Function):
    """The backward of a version, which is not differentiable itself."""

    @staticmethod
    def forward(ctx, version: ModuleType, tiles: Tiles, *inputs: Tensor | None):
        return version.backward(*inputs, tiles)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("FlashAttention is differentiable once: use naive_attention for second derivatives")


def _lse_of(m: Float[Tensor, "B H T 1"], l: Float[Tensor, "B H T 1"] | None = None) -> OfRows:
    """Return the log-sum-exp from m and l, or the given log-sum-exp."""
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
