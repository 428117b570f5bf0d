"""RMSNorm, RoPE, SwiGLU and the likeliest token on a CPU by kernels/decoder.cpp, where no derivative is wanted.

Each function returns None where the kernel cannot do what it is asked for. Its caller then takes torch's operators.
"""

import ctypes
import functools
import threading
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import pagewise.kernels
from pagewise.tools.cpp import NAMES, WIDTH, CTensor, functions
from pagewise.tools.transforms import is_plain

SOURCE = Path(pagewise.kernels.__file__).parent / "decoder.cpp"


class _Here(threading.local):
    switched_on = False


_here = _Here()


@functools.cache
def library() -> dict | None:
    """Return the compiled kernels by name and dtype, or None where they cannot run."""
    address, sizes, threads = ctypes.c_void_p, [ctypes.c_int64] * 3, ctypes.c_int
    return functions(
        SOURCE,
        rms_norm=[CTensor, address, CTensor, *sizes, ctypes.c_float, threads],
        rotate=[CTensor, address, address, *sizes, threads],
        silu_and_mul=[*[CTensor] * 3, *sizes, threads],
        likeliest=[CTensor, address, ctypes.c_int64, ctypes.c_int64, address, address, threads],
    )


def switch(on: bool) -> None:
    """Switch the kernels on or off for this thread. They stay off while torch has to see what a model computes."""
    unseen = is_plain() and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    _here.switched_on = on and unseen and library() is not None


def rms_norm(x: Float[Tensor, "*rows n"], weight: Float[Tensor, " n"], eps: float) -> Float[Tensor, "*rows n"] | None:
    """Return x / √(mean(x²) + ε) · weight."""
    if not _here.switched_on or not _fit(x, weight[None, None]):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    _run("rms_norm", x, CTensor(x, x.ndim - 3), weight.data_ptr(), CTensor(out, x.ndim - 3), *x.shape[-3:], eps)
    return out


def rotate(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv T D"],
    cos: Float[Tensor, "B 1 T D"],
    sin: Float[Tensor, "B 1 T D"],
) -> bool:
    """Apply RoPE to q and k of one sequence in place, or of packed ones. Return whether that was possible."""
    if not _here.switched_on or not _fit(q, k) or q.shape[-1] % (2 * WIDTH):
        return False
    for x in (q, k):
        _run("rotate", x, CTensor(x, 1), cos.data_ptr(), sin.data_ptr(), *x.shape[1:])
    return True


def silu_and_mul(gate: Float[Tensor, "*rows n"], up: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"] | None:
    """Return silu(gate) ∘ up."""
    if not _here.switched_on or not _fit(gate, up):
        return None
    out = torch.empty(gate.shape, dtype=gate.dtype)
    _run("silu_and_mul", gate, *(CTensor(x, x.ndim - 3) for x in (gate, up, out)), *gate.shape[-3:])
    return out


def likeliest(logits: Float[Tensor, "n vocab"], rows: list[int]) -> list[tuple[int, float]] | None:
    """Return the likeliest token of each of these rows, the first of equal ones, and log p of this token.

    log p is NaN where the row has no largest number. The kernel need not be switched on.
    """
    if library() is None or not _fit(logits[None]) or logits.requires_grad:
        return None
    wanted, tokens = torch.tensor([rows, rows])
    logprobs = torch.empty(len(rows))
    x, outputs = CTensor(logits[None], 1), (tokens.data_ptr(), logprobs.data_ptr())
    _run("likeliest", logits, x, wanted.data_ptr(), len(rows), logits.shape[1], *outputs)
    return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def _fit(*tensors: Tensor) -> bool:
    """Whether the kernels can read tensors, which have three axes or one more of size 1."""
    return all(
        x.device.type == "cpu"
        and x.dtype in NAMES
        and x.dtype == tensors[0].dtype
        and (x.ndim == 3 or (x.ndim == 4 and x.shape[0] == 1))
        and x.stride(-1) == 1
        and x.shape[-1] % WIDTH == 0
        for x in tensors
    )


def _run(name: str, x: Tensor, *arguments: CTensor | float) -> None:
    library()[name, x.dtype](*arguments, torch.get_num_threads())
