"""FlashAttention-2 in Triton: how the kernels of `kernels/flash_attention*.py` are launched (lesson 6).

Tensors are read and written with their own strides: a transposed view [B, T, H, D] is not copied. No length is a
constant of the kernels, so they are compiled once per dtype, head size and set of options.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention import tuning
from pagewise.flash_attention.inputs import FlashInputs, empty_like
from pagewise.kernels.arguments import Dropout, Packed, Saved, Scoring, Sizes
from pagewise.tools.architecture import Architecture, architecture
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import without_bfloat16
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv, padded

MAX_HEAD_SIZE = 256
Gradients = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]


def refuses(q: Float[Tensor, "B H T D"]) -> str | None:
    """The reason why the Triton kernels cannot take these tensors, to follow 'backend="triton"', or None."""
    if q.dtype not in FLOATS:
        return f"takes q in float32, float16 or bfloat16, got {q.dtype}"
    if q.shape[-1] > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, got {q.shape[-1]}"
    gpu = gpu_of(q.device)
    if q.dtype == torch.float32 and q.shape[-1] > tuning.max_head_size_in_float32(gpu):
        limit = tuning.max_head_size_in_float32(gpu)
        return f"takes float32 head sizes up to {limit} on this GPU, got {q.shape[-1]}: use float16"
    return without_bfloat16(q.dtype, gpu)


def gpu_of(device: torch.device) -> Architecture:
    """`architecture` for the public functions: torch.compile does not see through its cache."""
    return architecture(device)


# `torch.compiler.assume_constant_result` does the same, but first imports torch._dynamo, which takes a second or two.
gpu_of._dynamo_marked_constant = True


def forward(inputs: FlashInputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Write (out, lse) of `flash_attention`, and in `saved` what the backward needs besides.

    Without a gradient, and for 16-bit inputs, `saved` is empty. For float32 it is [2, B, H, T]: the largest score m, in
    units of log 2, and log₂ l = log₂ Σ 2^(score − m). FlashAttention's backward uses their sum, the log-sum-exp. Next
    to a large m the sum rounds log₂ l away, and the weights get a relative error of about m · 2⁻²⁴. With scores of
    −480 the error of a float32 gradient was 2.1e-4, where naive attention's was 3.4e-6. The two numbers are therefore
    kept apart. In 16 bits the rounding of the weights themselves is larger.
    """
    from pagewise.kernels.flash_attention import flash_attention_kernel

    (B, H, T, D), (_, Hkv, S, _) = inputs.q.shape, inputs.k.shape
    if not inputs.q.numel():
        return
    q, k, v = map(with_close_rows, inputs[:3])
    gpu = architecture(q.device)
    tiles = tuning.tiles_for("forward", q, gpu, inputs.is_heavy)
    num_tiles = tuning.num_tiles(T, tiles.owned, inputs.cu_seqlens_q)
    by_tma = gpu.sm >= 90 and inputs.attn_mask is None and takes_tma(k) and takes_tma(v)
    launch(
        flash_attention_kernel,
        (num_tiles * H * B,),
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse.view(-1),
        saved=Saved(*saved.flatten(1), None) if saved.numel() else None,
        scoring=scoring_of(inputs),
        dropout=dropout_of(inputs),
        packed=packed_of(inputs, tiles.owned, tiles.visited),
        num_tiles=num_tiles,
        num_heads=H,
        group=H // Hkv,
        T=T,
        S=S,
        window=window_of(inputs),
        SIZES=Sizes(D, padded(D), tiles.owned, tiles.visited, inputs.causal),
        SCALE_FIRST=inputs.scale <= 0.0 or inputs.softcap > 0.0 or inputs.alibi_slopes is not None,
        TMA=by_tma,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        outputs=(out,),
        scratch=by_tma,
    )


def backward(
    inputs: FlashInputs,
    d_out: Float[Tensor, "B H T D"],
    d_lse: Float[Tensor, "B H T"],
    out: Float[Tensor, "B H T D"],
    lse: Float[Tensor, "B H T"],
    saved: Float[Tensor, "..."],
    *,
    splits: int | None = None,
) -> Gradients:
    """(dq, dk, dv) from the gradients of out and lse and from the results of the forward.

    Args:
        saved: as the forward left it. Empty, it makes the backward work with lse, in float32 too.
        splits: how many programs share the query heads of a KV head in the sums of dK and dV, each with float32 sums
            of its own; a divisor of H / Hkv. Default: `tuning.num_splits`.
    """
    from pagewise.kernels.flash_attention_backward import (
        flash_attention_backward_kernel,
        flash_attention_delta_kernel,
        flash_attention_options_backward_kernel,
    )

    (B, H, T, D), (_, Hkv, S, _) = inputs.q.shape, inputs.k.shape
    gradients = dq, dk, dv = tuple(map(empty_like, inputs[:3]))
    if not inputs.q.numel() or not inputs.k.numel():
        return tuple(x.zero_() for x in gradients)
    q, k, v, d_out = map(with_close_rows, (*inputs[:3], d_out))
    gpu = architecture(q.device)
    if splits is None:
        splits = tuning.num_splits(B * Hkv * cdiv(S, tuning.KEYS_PER_PROGRAM), H // Hkv, gpu.num_sms)
    if splits > 1:
        dk, dv = (x.new_empty(splits * B, *x.shape[1:], dtype=torch.float32) for x in (k, v))
    delta = lse.new_empty(lse.numel())
    m, log_l = saved.flatten(1) if saved.numel() else (torch.empty_like(delta), None)
    launch(
        flash_attention_delta_kernel,
        (cdiv(T, tuning.DELTA_ROWS) * H * B,),
        out=out,
        d_out=d_out,
        lse=lse.view(-1),
        d_lse=d_lse.reshape(-1),
        delta=delta,
        m=m if log_l is None else None,
        num_heads=H,
        T=T,
        D=D,
        BLOCK_D=padded(D),
        ROWS=tuning.DELTA_ROWS,
        num_warps=4,
    )
    scoring, dropout, window = scoring_of(inputs), dropout_of(inputs), window_of(inputs)
    tiles = tuning.tiles_for("backward", q, gpu, inputs.is_heavy)
    packed = packed_of(inputs, tiles.owned, tiles.owned)
    num_key_tiles = tuning.num_tiles(S, tiles.owned, inputs.cu_seqlens_k)
    num_query_tiles = tuning.num_tiles(T, tiles.owned, inputs.cu_seqlens_q)
    if scoring[1:] == (None, None, None) and dropout is packed is window is None:
        kernel, options = flash_attention_backward_kernel, {"scale": scoring.scale}
    else:
        kernel = flash_attention_options_backward_kernel
        options = {"scoring": scoring, "dropout": dropout, "packed": packed, "window": window}
    launch(
        kernel,
        (splits * B * Hkv * num_key_tiles + B * H * num_query_tiles,),
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        saved=Saved(m, log_l, delta),
        dq=dq,
        dk=dk,
        dv=dv,
        **options,
        num_key_tiles=num_key_tiles,
        num_query_tiles=num_query_tiles,
        batch_size=B,
        num_heads=H,
        group=H // Hkv,
        splits=splits,
        T=T,
        S=S,
        KEY_SIZES=Sizes(D, padded(D), tiles.visited, tiles.owned, inputs.causal),
        QUERY_SIZES=Sizes(D, padded(D), tiles.owned, tiles.visited, inputs.causal),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        outputs=(dq, dk, dv),
    )
    if splits > 1:
        for x, sums in zip(gradients[1:], (dk, dv), strict=True):
            x.copy_(sums.unflatten(0, (splits, B)).sum(dim=0))
    return gradients


def with_close_rows(x: Float[Tensor, "B heads rows D"]) -> Float[Tensor, "B heads rows D"]:
    """x, copied only if a row is not contiguous or the rows are too far apart for the kernels' offsets."""
    *_, row, column = x.stride()
    return x if (column == 1 or x.shape[-1] == 1) and row < tuning.MAX_ROW_STRIDE else x.contiguous()


def takes_tma(x: Float[Tensor, "B heads rows D"]) -> bool:
    """Whether a tensor descriptor shall describe x: each row is contiguous and begins at a multiple of 16 bytes.

    In float32, which no tensor core multiplies exactly, the kernel spills up to 9 KB per thread with descriptors.
    """
    (batch, head, row, dim), itemsize = x.stride(), x.element_size()
    return itemsize == 2 and dim == 1 and not (x.data_ptr() | (batch | head | row) * itemsize) % 16


def scoring_of(inputs: FlashInputs) -> Scoring:
    """The kernels' argument scoring."""
    mask = inputs.attn_mask
    if mask is not None:
        mask = mask.expand(*inputs.q.shape[:3], inputs.k.shape[2]).view(torch.uint8)
    return Scoring.of(inputs.scale, inputs.softcap, inputs.alibi_slopes, mask)


def window_of(inputs: FlashInputs) -> int | None:
    """The kernels' argument window. A window wider than the keys might not fit 32 bits."""
    return None if inputs.window is None else min(inputs.window, inputs.k.shape[2])


def dropout_of(inputs: FlashInputs) -> Dropout | None:
    """The kernels' argument dropout."""
    if not inputs.dropout_p:
        return None
    dropout = inputs.dropout
    return Dropout(dropout.seed, float(dropout.threshold), dropout.growth)


def packed_of(inputs: FlashInputs, q_tile: int, k_tile: int) -> Packed | None:
    """The kernels' argument packed, for tiles of these sizes."""
    cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_seqlens_q is None:
        return None
    q_tiles = tuning.sequence_of_each_tile(inputs.q.shape[2], q_tile, cu_seqlens_q)
    k_tiles = tuning.sequence_of_each_tile(inputs.k.shape[2], k_tile, cu_seqlens_k)
    return Packed(cu_seqlens_q, cu_seqlens_k, q_tiles, k_tiles)
