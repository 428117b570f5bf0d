"""FlashAttention in plain torch: FlashAttention-2's loops, forward and backward, for every option (lesson 6).

It runs on any device and in any dtype, float64 too. Scores and sums are float32 at least. `count_work` counts the loops
of the ops as they run. The Triton kernels are not counted.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention import version_2
from pagewise.flash_attention.inputs import FlashInputs, empty_like
from pagewise.flash_attention.tiles import Tiles, gradient_of_lse
from pagewise.tools.work import count_work, counts_as

TILE = 128  # rows and columns: large enough that torch's products outweigh Python's loops
Gradients = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]
Counts = tuple[int, int, int, int]


def forward(inputs: FlashInputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Write (out, lse) of `flash_attention`. `saved` stays as it is: the backward needs only out and lse."""
    for b, (rows, cols) in enumerate(inputs.sequences()):
        out[:, :, rows], lse[:, :, rows] = forward_of_sequence(inputs, b, rows, cols)


def backward(
    inputs: FlashInputs,
    d_out: Float[Tensor, "B H T D"],
    d_lse: Float[Tensor, "B H T"],
    out: Float[Tensor, "B H T D"],
    lse: Float[Tensor, "B H T"],
) -> Gradients:
    """(dq, dk, dv) from the gradients of out and lse and from the results of the forward."""
    dq, dk, dv = map(empty_like, inputs[:3])
    for b, (rows, cols) in enumerate(inputs.sequences()):
        gradients = backward_of_sequence(inputs, (d_out, d_lse, out, lse), b, rows, cols)
        dq[:, :, rows], dk[:, :, cols], dv[:, :, cols] = gradients
    return dq, dk, dv


def forward_of_sequence(inputs: FlashInputs, sequence: int, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
    """(out, lse) of these queries and keys, out not yet rounded to the dtype of q."""
    q, k, v = inputs.q[:, :, rows], inputs.k[:, :, cols], inputs.v[:, :, cols]
    tiles = Tiles.of(q, k, TILE, TILE, inputs.options, inputs.dropout, sequence)
    out, lse = version_2.forward(q, k, v, tiles, torch.promote_types(q.dtype, torch.float32))
    return out, lse.squeeze(-1)


def backward_of_sequence(
    inputs: FlashInputs, results: tuple[Tensor, ...], sequence: int, rows: slice, cols: slice
) -> Gradients:
    """(dq, dk, dv) of these queries and keys. results: d_out, d_lse, out and lse of all."""
    q, k, v = inputs.q[:, :, rows], inputs.k[:, :, cols], inputs.v[:, :, cols]
    d_out, d_lse, out, lse = (x[:, :, rows] for x in results)
    tiles = Tiles.of(q, k, TILE, TILE, inputs.options, inputs.dropout, sequence)
    return version_2.backward(d_out, gradient_of_lse(d_lse, lse), q, k, v, out, lse[..., None], tiles)


@counts_as("pagewise::flash_attention")
def _forward(*arguments) -> Counts:
    inputs = FlashInputs(*arguments[:-1])  # the last argument is requires_grad
    return _sum_over_sequences(inputs, lambda *sequence: forward_of_sequence(inputs, *sequence))


@counts_as("pagewise::flash_attention_backward")
def _backward(d_out, d_lse, out, lse, saved, *fields) -> Counts:
    inputs = FlashInputs(*fields)
    results = (d_out, d_lse, out, lse)
    return _sum_over_sequences(inputs, lambda *sequence: backward_of_sequence(inputs, results, *sequence))


def _sum_over_sequences(inputs: FlashInputs, run: Callable[[int, slice, slice], object]) -> Counts:
    if inputs.backend != "torch":
        raise ValueError(f'count_work counts flash_attention with backend="torch", got backend="{inputs.backend}"')
    works = [
        count_work(lambda b=b, rows=rows, cols=cols: run(b, rows, cols))
        for b, (rows, cols) in enumerate(inputs.sequences())
    ]
    names = ("matmul_flops", "other_flops", "bytes_read", "bytes_written")
    return tuple(sum(getattr(work, name) for work in works) for name in names)
