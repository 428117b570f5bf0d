"""`flash_attention_varlen`: sequences of different lengths behind each other, without padding (lesson 6)."""

from typing import Literal

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from pagewise.flash_attention import in_triton, ops
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.packed import Packed
from pagewise.options import ScoreOptions
from pagewise.tools.checks import (
    FLOATS,
    check_count,
    check_flag,
    check_heads,
    check_running_sums,
    check_same,
    check_shape,
    check_tensor,
)
from pagewise.tools.device import choose_backend


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
    """`flash_attention` of B packed sequences: rows cu_seqlens[b] … cu_seqlens[b + 1] − 1 are sequence b's.

    Each sequence is for itself: causal aligns to its own end, and dropout counts its rows and columns from 0, as
    `dropout_mask((B, H, T, S), …)[b]` does. A length may be 0. Differentiable in q, k and v, once.

    Args:
        cu_seqlens_q, cu_seqlens_k: [B + 1], running sums of lengths from 0 to total_q and total_k.
        max_seqlen_q, max_seqlen_k: no length is larger. Not needed here: the kernels find their sequence themselves.
        check: look at the running sums first: True does, which waits for a GPU; None where that is free; False does
            not, and under torch.compile none does. Unchecked, sums that are no such sums lead into foreign memory.
        The rest as in `flash_attention`.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: differentiated twice.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    batch_q, batch_k, batch_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes).checked(batch_q, len(k)).without_gradient()
    dropout = Dropout.checked(dropout_p, dropout_seed, q.device)
    check_flag("return_lse", return_lse)
    if check is not None:
        check_flag("check", check)
    looks = check or (check is None and q.device.type == "cpu")
    for name, cu_seqlens, rows, longest in (
        ("q", cu_seqlens_q, len(q), max_seqlen_q),
        ("k", cu_seqlens_k, len(k), max_seqlen_k),
    ):
        if longest is not None:
            check_count(f"max_seqlen_{name}", longest, minimum=0)
        if looks and not torch.compiler.is_compiling():
            actual = max(check_running_sums(name, cu_seqlens, rows), default=0)
            if longest is not None and actual > longest:
                raise ValueError(f"max_seqlen_{name} must be at least the longest length, {actual}, got {longest}")
    backend = choose_backend(backend, q.device, in_triton.refuses(batch_q))
    packed = Packed(cu_seqlens_q, cu_seqlens_k)
    out, lse = ops.attend(batch_q, batch_k, batch_v, options, dropout, packed, backend)
    out, lse = (x[0].transpose(0, 1) for x in (out, lse))
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, tensor, axes in (("q", q, "total_q H D"), ("k", k, "total_k Hkv D"), ("v", v, "total_k Hkv D")):
        check_tensor(name, tensor, axes, dtypes=(*FLOATS, torch.float64))
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, tensor, "B+1", dtypes=(torch.int32,))
    check_same("dtype", q=q, k=k, v=v)
    check_same("device", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    (_, H, D), (total_k, Hkv, _) = q.shape, k.shape
    check_shape("k", k, (total_k, Hkv, D), "total_k Hkv D")
    check_shape("v", v, k.shape, "total_k Hkv D")
    check_heads(H, Hkv)
    if D == 0:
        raise ValueError("q must have a head size D of at least 1, got 0")
    if not len(cu_seqlens_q):
        raise ValueError("cu_seqlens_q must have B + 1 entries, the first 0, got none")
    check_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "B+1")
