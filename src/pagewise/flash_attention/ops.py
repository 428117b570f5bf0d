"""torch.ops.pagewise.flash_attention and its backward: one op for all backends, so that torch.compile sees through.

The door has checked everything. Packed sequences come as one batch [1, H, total, D] with their cu_seqlens.
"""

import torch
from torch import Tensor

from pagewise.flash_attention import in_torch, in_triton
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.launching import Saved, room_like
from pagewise.flash_attention.packed import Packed
from pagewise.options import ScoreOptions
from pagewise.tools.device import wants_gradient


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, dropout: Dropout, packed: Packed | None, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) by "torch" or "triton"; differentiable once."""
    learns = wants_gradient(q, k, v)
    out, lse, *_ = torch.ops.pagewise.flash_attention(
        q, k, v, options.alibi_slopes, options.attn_mask, dropout.seed, *(packed or (None, None)),
        options.scale_for(q.shape[-1]), options.causal, options.window, options.softcap, dropout.p, backend, learns,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("pagewise::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    dropout_p: float,
    backend: str,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, and `Saved`."""
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    dropout, packed = Dropout(dropout_p, dropout_seed), _packed(cu_seqlens_q, cu_seqlens_k)
    if backend == "triton":
        out, lse, saved = in_triton.forward(q, k, v, options, dropout, packed, learns=learns)
        return out, lse, *saved
    out, lse, rest, stats = _room(q, learns, backend)
    exact = torch.empty_like(out, dtype=lse.dtype)
    for b, (rows, cols) in enumerate(_sequences(packed)):
        part = in_torch.forward(q[:, :, rows], k[:, :, cols], v[:, :, cols], options, dropout, b)
        exact[:, :, rows], lse[:, :, rows] = part
    out.copy_(exact)
    if rest.numel():
        rest.copy_(exact - out)
    return out, lse, rest, stats


@torch.library.custom_op("pagewise::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    stats: Tensor,
    alibi_slopes: Tensor | None,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    dropout_p: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    dropout, packed = Dropout(dropout_p, dropout_seed), _packed(cu_seqlens_q, cu_seqlens_k)
    if backend == "triton":
        return in_triton.backward(d_out, d_lse, q, k, v, out, lse, Saved(rest, stats), options, dropout, packed)
    dq, dk, dv = (room_like(x) for x in (q, k, v))
    exact = out.to(lse.dtype) + rest if rest.numel() else out
    for b, (rows, cols) in enumerate(_sequences(packed)):
        of_rows = (x[:, :, rows] for x in (d_out, d_lse, q))
        of_cols = (x[:, :, cols] for x in (k, v))
        stored = (exact[:, :, rows], lse[:, :, rows])
        part = in_torch.backward(*of_rows, *of_cols, *stored, options, dropout, b)
        dq[:, :, rows], dk[:, :, cols], dv[:, :, cols] = part
    return dq, dk, dv


@_flash_attention.register_fake
def _(q, k, v, *options):
    *_, backend, learns = options
    return _room(q, learns, backend)


@_flash_attention_backward.register_fake
def _(d_out, d_lse, q, k, v, *options):
    return tuple(room_like(x) for x in (q, k, v))


def _keep_for_backward(ctx, inputs, output) -> None:
    tensors, ctx.numbers = inputs[:8], inputs[8:-1]
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.set_materialize_grads(False)  # what is saved has none, and zeros for it would be written in vain


def _backward(ctx, d_out: Tensor | None, d_lse: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *others = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    tensors = (d_out, d_lse, q, k, v, out, lse, *others)
    gradients = torch.ops.pagewise.flash_attention_backward(*tensors, *ctx.numbers)
    return *gradients, *(None,) * 12


def _no_second_backward(ctx, *gradients: Tensor) -> None:
    raise RuntimeError(
        "flash_attention is differentiable once: its backward computes the scores again and keeps nothing to "
        "differentiate; for second derivatives use pagewise.naive_attention.attention"
    )


_flash_attention.register_autograd(_backward, setup_context=_keep_for_backward)
_flash_attention_backward.register_autograd(_no_second_backward)


def _room(q: Tensor, learns: bool, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for out, lse, and what is saved; the torch loops go by lse, as in the paper."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return room_like(q), q.new_empty(q.shape[:3], dtype=wide), *Saved.room(q, learns, stats=backend == "triton")


def _packed(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Packed | None:
    return None if cu_seqlens_q is None else Packed(cu_seqlens_q, cu_seqlens_k)


def _sequences(packed: Packed | None) -> list[tuple[slice, slice]]:
    """Rows of q and of k that belong together; all of them, if they are not packed."""
    return [(slice(None), slice(None))] if packed is None else packed.sequences()
