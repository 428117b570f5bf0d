"""FlashAttention in plain torch: the loops of a paper, forward and backward, for every option (lesson 6).

They are FlashAttention-2's, unless the backend is "flash_attention_1". The loops run on any device and in any dtype,
float64 too. Scores and sums are float32 at least. `count_work` counts them as they run, but not the Triton kernels.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from pagewise.flash_attention import version_1, version_2
from pagewise.flash_attention.inputs import FlashInputs, Gradients, OfRows, Out, empty_like, outputs
from pagewise.flash_attention.tiles import Tiles, gradient_of_lse
from pagewise.tools.work import count_work, counts_as, on_chip


def forward(inputs: FlashInputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Write (out, lse) of `flash_attention`, and `saved` if the backward needs more than these."""
    saves = saved.dim() > 1
    for rows, _, qkv, tiles in _sequences(inputs):
        O, m_or_lse, *l = _version(inputs).forward(*qkv, tiles, saved.dtype if saves else out.dtype)
        with on_chip():  # the version has counted these stores
            out[:, :, rows], lse[:, :, rows] = O, (m_or_lse + torch.log(*l) if l else m_or_lse).squeeze(-1)
            if saves:
                torch.cat((O, m_or_lse, *l), dim=-1, out=saved)


def backward(inputs: FlashInputs, d_out: Out, d_lse: OfRows, out: Out, lse: OfRows, saved: Tensor) -> Gradients:
    """(dq, dk, dv) from the gradients of out and lse and from the results of the forward."""
    dq, dk, dv = map(empty_like, inputs[:3])
    results = (out, lse[..., None])
    if saved.dim() > 1:
        results = (saved[..., : out.shape[-1]], *saved[..., out.shape[-1] :].split(1, dim=-1))
    for rows, cols, qkv, tiles in _sequences(inputs):
        dO, d_L, O, *stats = (x[:, :, rows] for x in (d_out, d_lse, *results))
        d_L = gradient_of_lse(d_L, stats[0].squeeze(-1))
        gradients = _version(inputs).backward(dO, d_L, *qkv, O, *stats, tiles)
        with on_chip():
            dq[:, :, rows], dk[:, :, cols], dv[:, :, cols] = gradients
    return dq, dk, dv


def _sequences(inputs: FlashInputs) -> Iterator[tuple[slice, slice, tuple[Tensor, Tensor, Tensor], Tiles]]:
    """The rows of q and of k of each sequence, its q, k and v, and their tiles. Packed, this waits for a GPU."""
    rows_and_cols = [(slice(None), slice(None))]
    if inputs.cu_seqlens_q is not None:
        ends = pairwise(inputs.cu_seqlens_q.tolist()), pairwise(inputs.cu_seqlens_k.tolist())
        rows_and_cols = [(slice(*of_q), slice(*of_k)) for of_q, of_k in zip(*ends, strict=True)]
    for b, (rows, cols) in enumerate(rows_and_cols):
        q, k, v = inputs.q[:, :, rows], inputs.k[:, :, cols], inputs.v[:, :, cols]
        tiles = Tiles(q, k, inputs.tile_rows, inputs.tile_cols, inputs.options, inputs.dropout, b)
        yield rows, cols, (q, k, v), tiles


def _version(inputs: FlashInputs) -> ModuleType:
    return version_1 if inputs.backend == "flash_attention_1" else version_2


@counts_as("pagewise::flash_attention")
def _forward(*arguments) -> tuple[int, ...]:
    inputs = FlashInputs(*arguments[:-1])  # the last argument is requires_grad
    return _counted(inputs, lambda: forward(inputs, *outputs(inputs, False)))


@counts_as("pagewise::flash_attention_backward")
def _backward(d_out, d_lse, out, lse, saved, *fields) -> tuple[int, ...]:
    inputs = FlashInputs(*fields)
    return _counted(inputs, lambda: backward(inputs, d_out, d_lse, out, lse, saved))


def _counted(inputs: FlashInputs, run: Callable[[], object]) -> tuple[int, ...]:
    if inputs.backend == "triton":
        raise ValueError(f'count_work counts flash_attention with backend="torch", got backend="{inputs.backend}"')
    work = count_work(run)
    return work.matmul_flops, work.other_flops, work.bytes_read, work.bytes_written
