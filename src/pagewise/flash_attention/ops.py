"""torch.ops.pagewise.flash_attention and its backward: custom ops, single calls for torch.compile (lesson 6).

`FlashInputs` is what the public functions check and every backend reads. The schemas below are its fields in order.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from pagewise.flash_attention.dropout import Dropout
from pagewise.options import ScoreOptions
from pagewise.tools.ops import custom_op
from pagewise.tools.transforms import wants_gradient

NAIVE = "pagewise.naive_attention.attention"  # it has every derivative


class FlashInputs(NamedTuple):
    """Checked tensors and options. Packed sequences are one batch [1, H, total, D] with their cu_seqlens."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S D"]
    alibi_slopes: Float[Tensor, " H"] | None
    attn_mask: Bool[Tensor, "..."] | None
    dropout_seed: Int64[Tensor, ""] | None
    cu_seqlens_q: Int32[Tensor, " ends"] | None  # sequence b is rows cu_seqlens[b] … cu_seqlens[b + 1] − 1
    cu_seqlens_k: Int32[Tensor, " ends"] | None
    scale: float
    causal: bool
    window: int | None
    softcap: float
    dropout_p: float
    backend: str  # "torch" or "triton"

    @property
    def options(self) -> ScoreOptions:
        return ScoreOptions(self.scale, self.causal, self.window, self.softcap, self.alibi_slopes, self.attn_mask)

    @property
    def is_heavy(self) -> bool:
        """Whether a mask in memory or dropout takes registers of its own."""
        return self.attn_mask is not None or self.dropout_p > 0

    @property
    def dropout(self) -> Dropout:
        return Dropout(self.dropout_p, self.dropout_seed)

    def sequences(self) -> list[tuple[slice, slice]]:
        """The rows of q and of k that belong together. For packed sequences on a GPU this waits for the GPU."""
        if self.cu_seqlens_q is None:
            return [(slice(None), slice(None))]
        rows, cols = ([slice(*ends) for ends in pairwise(x.tolist())] for x in (self.cu_seqlens_q, self.cu_seqlens_k))
        return list(zip(rows, cols, strict=True))


def attend(inputs: FlashInputs) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """(out, lse), differentiable once in q, k and v."""
    requires_grad = wants_gradient(inputs.q, inputs.k, inputs.v)
    out, lse, _ = torch.ops.pagewise.flash_attention(*inputs, requires_grad)
    return out, lse


def empty_like(x: Float[Tensor, "B heads rows D"]) -> Float[Tensor, "B heads rows D"]:
    """An empty tensor with the strides of x if its rows are contiguous, else contiguous."""
    empty = torch.empty_like(x)
    return empty if empty.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def outputs(q: Tensor, requires_grad: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Empty out, lse, and `saved`: [2, B, H, T], which the Triton backward needs in float32, else an empty tensor."""
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    saves = requires_grad and backend == "triton" and q.dtype == torch.float32
    return empty_like(q), lse, q.new_empty(2, *q.shape[:3], dtype=torch.float32) if saves else q.new_empty(0)


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? attn_mask, Tensor? dropout_seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "float scale, bool causal, SymInt? window, float softcap, float dropout_p, str backend"
)
_NUM_TENSORS = 8  # of the inputs
_FORWARD = f"({_INPUTS}, bool requires_grad) -> (Tensor, Tensor, Tensor)"
_BACKWARD = f"(Tensor d_out, Tensor d_lse, Tensor out, Tensor lse, Tensor saved, {_INPUTS}) -> (Tensor, Tensor, Tensor)"


@custom_op("flash_attention", schema=_FORWARD, fake=lambda q, *others: outputs(q, *reversed(others[-2:])))
def _flash_attention(*arguments):
    from pagewise.flash_attention import in_torch, in_triton

    *fields, requires_grad = arguments
    inputs = FlashInputs(*fields)
    results = outputs(inputs.q, requires_grad, inputs.backend)
    (in_triton if inputs.backend == "triton" else in_torch).forward(inputs, *results)
    return results


@custom_op("flash_attention_backward", schema=_BACKWARD, fake=lambda *fields: tuple(map(empty_like, fields[5:8])))
def _flash_attention_backward(d_out, d_lse, out, lse, saved, *fields):
    from pagewise.flash_attention import in_torch, in_triton

    inputs = FlashInputs(*fields)
    if inputs.backend == "triton":
        return in_triton.backward(inputs, d_out, d_lse, out, lse, saved)
    return in_torch.backward(inputs, d_out, d_lse, out, lse)


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
