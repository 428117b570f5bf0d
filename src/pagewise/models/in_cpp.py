"""RMSNorm, RoPE, SwiGLU and linear layers on a CPU in C++, where no derivative is wanted.

Each function returns None where the kernel cannot do what it is asked for. Its caller then takes torch's operators.
"""

import contextlib
import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.tools.cpp import WIDTH, CTensor, functions
from pagewise.tools.sizes import cdiv
from pagewise.tools.transforms import is_plain

EVERY = 2**31  # more rows than there are
PANEL = 32  # a multiple of the outputs whose weights linear.cpp packs together


class Here(threading.local):
    """The kernels that are switched on for this thread, and the packed weights, by the ids of their layers."""

    kernels: Mapping[tuple[str, torch.dtype], Callable] = {}
    packed: Mapping[tuple[int, ...], Any] = {}


here = Here()


@functools.cache
def library() -> dict:
    """Return the compiled kernels of decoder.cpp and linear.cpp by name and dtype, without those that cannot run."""
    address, sizes, threads = ctypes.c_void_p, [ctypes.c_int64] * 3, ctypes.c_int
    return functions(
        "decoder.cpp",
        rms_norm=[CTensor, address, CTensor, *sizes, ctypes.c_float, threads],
        rotate=[CTensor, address, address, *sizes, threads],
        silu_and_mul=[*[CTensor] * 3, *sizes, threads],
    ) | functions(
        "linear.cpp",
        pack=[address, address, *sizes[:2], threads],
        product=[address, ctypes.c_int64, *[address] * 3, *sizes, threads],
        has_tiles=[],
    )


def switch(packed: Mapping[tuple[int, ...], Any] | None) -> None:
    """Switch the kernels and packed weights on for this thread, or off (None).

    They stay off while torch has to see what a model computes.
    """
    if packed is None or not is_plain() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        here.kernels, here.packed = {}, {}
    else:
        here.kernels, here.packed = library(), packed


def rms_norm(x: Float[Tensor, "*rows n"], weight: Float[Tensor, " n"], eps: float) -> Float[Tensor, "*rows n"] | None:
    """Return x / √(mean(x²) + ε) · weight."""
    kernel = here.kernels.get(("rms_norm", x.dtype))
    if kernel is None or x.ndim < 3 or x.shape[:-3].numel() != 1 or x.dtype != weight.dtype:
        return None
    if x.shape[-1] % WIDTH or x.stride(-1) != 1:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    places = CTensor(x.data_ptr(), x.stride()[-3:]), weight.data_ptr(), CTensor(out.data_ptr(), out.stride()[-3:])
    kernel(*places, *x.shape[-3:], eps, torch.get_num_threads())
    return out


def rotate(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv T D"],
    cos: Float[Tensor, "B 1 T D"],
    sin: Float[Tensor, "B 1 T D"],
) -> bool:
    """Apply RoPE to q and k of one sequence in place, or of packed ones. Return whether that was possible."""
    kernel = here.kernels.get(("rotate", q.dtype))
    if kernel is None or len(q) != 1 or q.dtype != k.dtype:
        return False
    if q.shape[-1] % (2 * WIDTH) or q.stride(-1) != 1 or k.stride(-1) != 1:
        return False
    for x in (q, k):
        angles = cos.data_ptr(), sin.data_ptr()
        kernel(CTensor(x.data_ptr(), x.stride()[-3:]), *angles, *x.shape[1:], torch.get_num_threads())
    return True


def silu_and_mul(gate: Float[Tensor, "*rows n"], up: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"] | None:
    """Return silu(gate) ∘ up."""
    kernel = here.kernels.get(("silu_and_mul", gate.dtype))
    if kernel is None or gate.ndim != 3 or gate.dtype != up.dtype:
        return None
    if gate.shape[-1] % WIDTH or gate.stride(-1) != 1 or up.stride(-1) != 1:
        return None
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_at, up_at = CTensor(gate.data_ptr(), gate.stride()), CTensor(up.data_ptr(), up.stride())
    kernel(gate_at, up_at, CTensor(out.data_ptr(), out.stride()), *gate.shape, torch.get_num_threads())
    return out


def packed(weight: Float[Tensor, "N K"]) -> tuple[Tensor, Callable, int] | None:
    """Return a copy of W in the order in which the product of linear.cpp reads it, this product, and for how many rows.

    None: no kernel runs here, or oneDNN's is as fast.
    """
    found, dtype, (N, K) = library(), weight.dtype, weight.shape
    if ("product", dtype) not in found:
        return None
    most = 64  # of more rows, oneDNN's or torch's product is as fast
    if dtype == torch.bfloat16:
        has_tiles, onednn = found["has_tiles", dtype](), torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if onednn and not has_tiles:
            return None
        most = 256 if has_tiles else EVERY
    weight = weight.contiguous()
    copy = torch.zeros(cdiv(N, PANEL) * PANEL * cdiv(K, PANEL) * PANEL, dtype=dtype, device=weight.device)
    use_huge_pages(copy)
    found["pack", dtype](weight.data_ptr(), copy.data_ptr(), N, K, torch.get_num_threads())
    return copy, found["product", dtype], most


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux for pages of 2 MiB. In pages of 4 KiB, a core that reads a large tensor waits for their addresses."""
    size, start = 2**21, tensor.data_ptr() & -(2**21)
    with contextlib.suppress(AttributeError):  # a system without madvise
        length = ctypes.c_size_t(cdiv(tensor.data_ptr() + tensor.nbytes - start, size) * size)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), length, mmap.MADV_HUGEPAGE)
