"""torch.ops.pagewise.flash_attention and its backward: custom ops, single calls for torch.compile (lesson 6).

The schemas are the fields of `FlashInputs` in order.
"""

from typing import Any

import torch
from torch import Tensor

from pagewise.flash_attention import in_torch, in_triton
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.inputs import NAIVE, FlashInputs, Keys, OfRows, Out, Queries, empty_like, outputs
from pagewise.options import ScoreOptions
from pagewise.tools.ops import custom_op
from pagewise.tools.transforms import wants_gradient


def attend(
    q: Queries, k: Keys, v: Keys, options: ScoreOptions, dropout: Dropout, *last: Any, cu_seqlens: tuple = (None, None)
) -> tuple[Out, OfRows]:
    """(out, lse), differentiable once in q, k and v. last: fields of `FlashInputs`, from `backend` on."""
    scale, causal, window, softcap, slopes, mask = options._replace(scale=options.scale_for(q.shape[-1]))
    inputs = (q, k, v, slopes, mask, dropout.seed, *cu_seqlens, scale, causal, window, softcap, dropout.p, *last)
    out, lse, _ = _flash_attention(*FlashInputs(*inputs), wants_gradient(q, k, v))
    return out, lse


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? attn_mask, Tensor? dropout_seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "float scale, bool causal, SymInt? window, float softcap, float dropout_p, "
    "str backend, int tile_rows, int tile_cols"
)
_NUM_TENSORS = 8  # of the inputs
_FORWARD = f"({_INPUTS}, bool requires_grad) -> (Tensor, Tensor, Tensor)"
_BACKWARD = f"(Tensor d_out, Tensor d_lse, Tensor out, Tensor lse, Tensor saved, {_INPUTS}) -> (Tensor, Tensor, Tensor)"


@custom_op(
    "flash_attention", schema=_FORWARD, fake=lambda *arguments: outputs(FlashInputs(*arguments[:-1]), arguments[-1])
)
def _flash_attention(*arguments):
    inputs, requires_grad = FlashInputs._make(arguments[:-1]), arguments[-1]
    results = outputs(inputs, requires_grad)
    (in_triton if inputs.backend == "triton" else in_torch).forward(inputs, *results)
    return results


@custom_op("flash_attention_backward", schema=_BACKWARD, fake=lambda *fields: tuple(map(empty_like, fields[5:8])))
def _flash_attention_backward(d_out, d_lse, out, lse, saved, *fields):
    inputs = FlashInputs(*fields)
    return (in_triton if inputs.backend == "triton" else in_torch).backward(inputs, d_out, d_lse, out, lse, saved)


def _keep_for_backward(ctx, inputs, output) -> None:
    ctx.numbers = inputs[_NUM_TENSORS:-1]
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.set_materialize_grads(False)  # `saved` has no gradient: do not write zeros for it


def _backward(ctx, d_out: Tensor | None, d_lse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing computes these tensors anew each time they are read
    out, lse, *_ = saved
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    gradients = torch.ops.pagewise.flash_attention_backward(d_out, d_lse, *saved, *ctx.numbers)
    return *gradients, *(None,) * (len(FlashInputs._fields) - 2)


def _no_second_backward(ctx, *gradients: Tensor) -> None:
    raise RuntimeError(
        "flash_attention is differentiable once: its backward computes the scores again and keeps nothing to "
        f"differentiate; for second derivatives use {NAIVE}"
    )


torch.library.register_autograd("pagewise::flash_attention", _backward, setup_context=_keep_for_backward)
torch.library.register_autograd("pagewise::flash_attention_backward", _no_second_backward)
