"""Small calls that launch the first rungs: the Triton kernels that a lesson shows whole. See `kernel_cases`.

The head size must be a power of two. These kernels have no options.
"""

from collections.abc import Callable
from typing import Any

import torch

from pagewise.experiments.kernel_cases import (
    HKV,
    LENS,
    Case,
    H,
    P,
    Paged,
    Tensors,
    dense,
    gradients_of,
    seen,
    with_gradients,
)
from pagewise.naive_attention import attention
from pagewise.paged_attention.in_triton import partial_results
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv


def paged_decode(dtype: torch.dtype, D: int, options: bool = False) -> Case:
    """Lesson 5's first rung: one query of each sequence, over blocks."""
    from pagewise.kernels.paged_attention import paged_decode_kernel

    inputs = Paged.of(LENS, [1, 1, 1], D, dtype, dtype)

    def run() -> Tensors:
        out = torch.empty_like(inputs.q)
        sizes = {"P": P, "D": D, "GROUP": H // HKV, "ROWS": 16, "TILE": 32}
        launch(paged_decode_kernel, (len(LENS), HKV), *inputs[:5], out, D**-0.5, **sizes, outputs=(out,))
        return (out,)

    return Case(run, lambda dtype: inputs.naive(dtype)[:1])


def split(kernel: Any, phi: tuple[float, ...], dtype: torch.dtype, D: int) -> Case:
    """Three splits. torch merges them: with a common φ nothing is rescaled."""
    q, k, v = dense(2, 1, 150, D, dtype)

    def run() -> Tensors:
        partials = partial_results(2 * H * 3, D, q.device)
        sizes = {"D": D, "GROUP": H // HKV, "ROWS": 16, "TILE": 32}
        launch(kernel, (2, HKV, 3), q[:, :, 0], k, v, *partials, H, 150, D**-0.5, *phi, **sizes)
        m, l, acc = (x.view(2, H, 3, -1) for x in partials)
        factor = torch.ones_like(m) if phi else torch.exp(m - m.amax(dim=2, keepdim=True))
        return ((factor * acc).sum(dim=2, keepdim=True) / (factor * l).sum(dim=2, keepdim=True)).to(dtype), m.amax(2)

    def naive(dtype: torch.dtype) -> Tensors:
        q_, k_ = q.to(dtype), k.to(dtype).repeat_interleave(H // HKV, dim=1)
        largest = (q_ @ k_.mT).amax(dim=-1).to(torch.promote_types(dtype, torch.float32)) * D**-0.5
        return attention(q_, k.to(dtype), v.to(dtype)), largest

    return Case(run, naive)


def split_decode(dtype: torch.dtype, D: int, options: bool = False) -> Case:
    """Lesson 7's first rung. Each split has a maximum of its own."""
    from pagewise.kernels.flash_decoding import split_decode_kernel

    return split(split_decode_kernel, (), dtype, D)


def unified_max(dtype: torch.dtype, D: int, options: bool = False) -> Case:
    """Lesson 8's first rung. All splits have the same φ, which is 1."""
    from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel

    return split(unified_max_kernel, (1.0,), dtype, D)


def flash(dtype: torch.dtype, D: int, options: bool = False) -> Case:
    """The forward, and the gradient of q."""
    from pagewise.kernels.flash_attention import flash_forward_kernel
    from pagewise.kernels.flash_attention_backward import flash_dq_kernel

    T, S = 37, 70
    q, k, v = dense(1, T, S, D, dtype)
    sizes = {"D": D, "BLOCK_D": D, "ROWS": 16, "COLS": 32, "CAUSAL": True}
    sizes |= {"group": H // HKV, "T": T, "S": S, "scale": D**-0.5}
    grid, qkv = (cdiv(T, 16), H, 1), {"q": q, "k": k, "v": v}

    def run() -> Tensors:
        out, lse, dq = torch.empty_like(q), torch.empty(1, H, T), torch.empty_like(q)
        launch(flash_forward_kernel, grid, **qkv, out=out, lse=lse, **sizes, outputs=(out, lse))
        d_out, d_lse = gradients_of(out, lse)
        delta = (out.float() * d_out.float()).sum(dim=-1) - d_lse
        sums = {"lse": lse.flatten(), "delta": delta.flatten()}
        launch(flash_dq_kernel, grid, **qkv, d_out=d_out, **sums, dq=dq, **sizes, outputs=(dq,))
        return out, seen(lse), dq

    def naive(dtype: torch.dtype) -> Tensors:
        attend = lambda *qkv: attention(*qkv, causal=True, return_lse=True)  # noqa: E731
        return with_gradients(attend, (x.to(dtype) for x in (q, k, v)))[:3]

    return Case(run, naive)


CALLS: dict[str, Callable[[torch.dtype, int, bool], Case]] = {
    "first paged decode": paged_decode,
    "first split decode": split_decode,
    "first unified max": unified_max,
    "first flash": flash,
}
