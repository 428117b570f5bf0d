"""`flash_attention` and `flash_attention_varlen`: they check their arguments once and choose a backend (lesson 6)."""

from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from pagewise.flash_attention import in_cuda, in_triton, tuning
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.inputs import NAIVE
from pagewise.flash_attention.ops import attend
from pagewise.options import ScoreOptions
from pagewise.tools.architecture import architecture
from pagewise.tools.checks import check_count, check_qkv, check_running_sums, check_same, check_shape, check_tensor
from pagewise.tools.device import choose_backend, looks
from pagewise.tools.remembered import remembers
from pagewise.tools.transforms import check_derivative, derivative_of, lacks


def flash_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
    return_lse: bool = False,
    backend: Literal["auto", "torch", "triton", "cuda"] = "auto",
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Compute `naive_attention.attention` in memory that grows with T + S instead of T · S.

    The result is differentiable once in q, k and v. T, S and strides are arbitrary: a transposed view of [B, T, H, D]
    is not copied, and out has the strides of q. Equal inputs give equal bits, in the backward too. Autocast has no
    effect. Dao et al. 2022; Dao 2023.

    Args:
        causal, window, scale, softcap, alibi_slopes, attn_mask: as in `attention`.
        dropout_p: probability in [0, 1) that a weight is dropped. p is rounded to a multiple of 2⁻¹⁶, up to 1 − 2⁻¹⁶.
            Weights that are kept are multiplied by 1 / (1 − p).
        dropout_seed: an int, or one int64 in a tensor. `dropout_mask` says which weights a seed keeps. None: torch's
            generator draws a seed. Give a seed if torch.compile computes activations again in the backward
            (`activation_memory_budget`), because torch would draw another one there.
        return_lse: also return the natural log-sum-exp of each row of scores. It is float32 (float64 for float64) and
            differentiable.
        backend: "triton" takes head sizes up to 256. "torch" takes everything, float64 too. "cuda" is a kernel to be
            read: it has only the option causal, and no gradient. "auto" takes triton on a GPU if triton can, else
            torch. On a GPU of sm_75, where Triton does not use the tensor cores, "auto" takes cuda if cuda can.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse). A query that sees no key gets 0 and −inf, and no
        gradient.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: differentiated twice.
    """
    options, refusal = _checked(q, k, v, ScoreOptions(scale, causal, window, softcap))
    if alibi_slopes is not None or attn_mask is not None:
        options = options._replace(alibi_slopes=alibi_slopes, attn_mask=attn_mask)
        options.checked(q, k.shape[2]).without_gradient()
    dropout = Dropout.checked(dropout_p, dropout_seed, q.device)
    gpu = architecture(q.device) if backend == "auto" else None
    if backend == "cuda" or (gpu is not None and gpu.sm > 0 and not gpu.has_triton_tensor_cores):
        derivative = derivative_of(q, k, v)
        cannot = lacks(derivative) if derivative else in_cuda.refuses(q, options, dropout)
        if not cannot:
            out, lse = in_cuda.forward(q, k, v, options)
            return (out, lse) if return_lse else out
        if backend == "cuda":
            others = '"torch"' if refusal else '"triton" or "torch"'
            raise ValueError(f'backend="cuda" {cannot}; backend={others} takes it')
        backend = "torch"
    check_derivative("flash_attention", q, k, v, has=("backward",), remedy=NAIVE)
    backend = choose_backend(backend, q.device, refusal, others=("cuda",))
    out, lse = attend(q, k, v, options, dropout, backend)
    return (out, lse) if return_lse else out


@remembers
def _checked(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> tuple[ScoreOptions, str | None]:
    """Return the checked options, and why Triton cannot take these tensors."""
    check_qkv(q, k, v)
    return options.checked(q, k.shape[2]), in_triton.refuses(q)


def flash_attention_varlen(
    q: Float[Tensor, "total_q H D"],
    k: Float[Tensor, "total_k Hkv D"],
    v: Float[Tensor, "total_k Hkv D"],
    cu_seqlens_q: Int32[Tensor, " ends"],
    cu_seqlens_k: Int32[Tensor, " ends"],
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Int64[Tensor, ""] | None = None,
    return_lse: bool = False,
    check: bool | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Float[Tensor, "total_q H D"] | tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]:
    """Compute `flash_attention` of B packed sequences: sequence b is rows cu_seqlens[b] … cu_seqlens[b + 1] − 1.

    Each sequence attends only to itself. Causal aligns to its end, and dropout counts its rows and columns from 0, as
    `dropout_mask((B, H, T, S), …)[b]` does. A length may be 0. Differentiable once in q, k and v.

    Args:
        cu_seqlens_q, cu_seqlens_k: [B + 1], running sums of the lengths, from 0 to total_q and total_k.
        max_seqlen_q, max_seqlen_k: no length is larger. The kernels do not need them.
        check: look at the running sums before launching. By default this is done on the CPU, where it is free, and
            never under torch.compile. On a GPU, True makes the host wait once. Unchecked, wrong sums make the kernels
            read and write outside the tensors.
        The other arguments are those of `flash_attention`.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: differentiated twice.
    """
    tensors = _checked_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes)
    options = options.checked(tensors[0], k.shape[0]).without_gradient()
    dropout = Dropout.checked(dropout_p, dropout_seed, q.device)
    for name, cu_seqlens, rows, longest in (
        ("q", cu_seqlens_q, q.shape[0], max_seqlen_q),
        ("k", cu_seqlens_k, k.shape[0], max_seqlen_k),
    ):
        if longest is not None:
            check_count(f"max_seqlen_{name}", longest, minimum=0)
        if looks(check, cu_seqlens):
            actual = max(check_running_sums(name, cu_seqlens, rows), default=0)
            if longest is not None and actual > longest:
                raise ValueError(f"max_seqlen_{name} must be at least the longest length, {actual}, got {longest}")
    backend = choose_backend(backend, q.device, in_triton.refuses(tensors[0]))
    check_derivative("flash_attention_varlen", q, k, v, has=("backward",), remedy=NAIVE)
    out, lse = attend(*tensors, options, dropout, backend, cu_seqlens=(cu_seqlens_q, cu_seqlens_k))
    out, lse = (x[0].transpose(0, 1) for x in (out, lse))
    return (out, lse) if return_lse else out


def measure_tiles(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv S D"], v: Float[Tensor, "B Hkv S D"], **options: Any
) -> dict[str, tuning.Tiles]:
    """Time the kernels' tile sizes for such tensors on this GPU, and let this process take the fastest from now on.

    Without this call equal inputs give equal bits in every process.

    Args:
        options: of `flash_attention`, such as causal.

    Returns:
        The tiles of the "forward" and of the "backward" that all later calls with this dtype, this head size (rounded
        up to a power of two) and this use of attn_mask or dropout take.

    Raises:
        ValueError: q is not on a GPU, or an argument does not fit.
    """
    if q.device.type != "cuda":
        raise ValueError(f"measure_tiles times kernels on a GPU, got q on {q.device}")
    from triton.testing import do_bench

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, **options, backend="triton")
    calls = {
        "forward": lambda: flash_attention(*leaves, **options, backend="triton"),
        "backward": lambda: torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True),
    }
    heavy = options.get("attn_mask") is not None or options.get("dropout_p", 0.0) > 0
    gpu = architecture(q.device)
    return {name: tuning.measure(name, q, gpu, heavy, partial(do_bench, call)) for name, call in calls.items()}


def _checked_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [1, H, total_q, D], k and v [1, Hkv, total_k, D]."""
    for name, tensor, axes in (("q", q, "total_q H D"), ("k", k, "total_k Hkv D"), ("v", v, "total_k Hkv D")):
        check_tensor(name, tensor, axes)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, tensor, "B+1", dtypes=(torch.int32,))
    check_same("device", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_shape("k", k, (*k.shape[:2], q.shape[2]), "total_k Hkv D")
    check_shape("v", v, k.shape, "total_k Hkv D")
    tensors = tuple(x.transpose(0, 1)[None] for x in (q, k, v))
    check_qkv(*tensors)
    if not cu_seqlens_q.shape[0]:
        raise ValueError("cu_seqlens_q must have B + 1 entries, the first 0, got none")
    check_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "B+1")
    return tensors
