"""FlashAttention-2 in Triton: how the kernels of `kernels/flash_attention*.py` are launched (lesson 6).

Tensors are read and written with their own strides: a transposed view [B, T, H, D] is not copied. No length is a
constant of the kernels, so they are compiled once per dtype, head size and set of options.
"""

import torch
from torch import Tensor

from pagewise.flash_attention import tuning
from pagewise.flash_attention.inputs import FlashInputs, Gradients, Keys, OfRows, Out, empty_like
from pagewise.kernels.arguments import Dropout, Packed, Saved, Scoring, Sizes
from pagewise.tools.architecture import architecture
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import without_bfloat16
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv, padded

MAX_HEAD_SIZE = 256


def refuses(q: Out) -> str | None:
    """The reason why the Triton kernels cannot take these tensors, to follow 'backend="triton"', or None."""
    if q.dtype not in FLOATS:
        return f"takes q in float32, float16 or bfloat16, got {q.dtype}"
    if q.shape[-1] > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, got {q.shape[-1]}"
    gpu = architecture(q.device)
    # In float32 the backward needs 66 560 bytes of shared memory for a head size of 256, and sm_75 has 65 536.
    limit = 128 if 0 < gpu.shared_bytes <= 65_536 else MAX_HEAD_SIZE
    if q.dtype == torch.float32 and q.shape[-1] > limit:
        return f"takes float32 head sizes up to {limit} on this GPU, got {q.shape[-1]}: use float16"
    return without_bfloat16(q.dtype, gpu)


def forward(inputs: FlashInputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Write (out, lse) of `flash_attention`, and in `saved` what the backward needs besides.

    For a gradient in float32 these are the largest score m, in units of log 2, and log₂ l = log₂ Σ 2^(score − m). Next
    to a large m their sum, the log-sum-exp, rounds log₂ l away, and the weights get a relative error of about m · 2⁻²⁴.
    With scores of −480 the error of a gradient was 2.1e-4, where naive attention's was 3.4e-6. In 16 bits the rounding
    of the weights themselves is larger.

    In float32 both kernels are compiled without fused multiply-adds. Where only one of them fuses score · scale − m,
    the weights of the backward do not add up to 1.
    """
    from pagewise.kernels.flash_attention import flash_attention_kernel

    B, H, T, D = inputs.q.shape
    if not inputs.q.numel():
        return
    q, k, v = map(with_close_rows, inputs[:3])
    gpu = architecture(q.device)
    tiles = tuning.tiles_for("forward", q, gpu, inputs.is_heavy)
    num_tiles = tuning.num_tiles(T, tiles.owned, inputs.cu_seqlens_q)
    m, log_l = saved.flatten(1) if saved.numel() else (None, None)
    by_tma = gpu.sm >= 90 and inputs.attn_mask is None and takes_tma(k) and takes_tma(v)
    launch(
        flash_attention_kernel,
        (num_tiles * H * B,),
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse.view(-1),
        saved=Saved(m, log_l, None),
        num_tiles=num_tiles,
        SIZES=Sizes(D, padded(D), tiles.owned, tiles.visited, inputs.causal),
        SCALE_FIRST=inputs.scale <= 0.0 or inputs.softcap > 0.0 or inputs.alibi_slopes is not None,
        TMA=by_tma,
        outputs=(out,),
        scratch=by_tma,
        **shared_arguments(inputs, tiles, tiles.owned, tiles.visited),
    )


def backward(inputs: FlashInputs, d_out: Out, d_lse: OfRows, out: Out, lse: OfRows, saved: Tensor) -> Gradients:
    """(dq, dk, dv) from the gradients of out and lse and from the results of the forward.

    Without `saved` the backward works with lse, in float32 too.
    """
    from pagewise.kernels import flash_attention_backward as kernels

    (B, H, T, D), (_, Hkv, S, _) = inputs.q.shape, inputs.k.shape
    gradients = dq, dk, dv = tuple(map(empty_like, inputs[:3]))
    if not inputs.q.numel() or not inputs.k.numel():
        return tuple(x.zero_() for x in gradients)
    q, k, v, d_out = map(with_close_rows, (*inputs[:3], d_out))
    gpu = architecture(q.device)
    splits = tuning.num_splits(B * Hkv * cdiv(S, tuning.KEYS_PER_PROGRAM), H // Hkv, gpu.num_sms)
    if splits > 1:  # programs that share the query heads of a KV head have sums of their own
        dk, dv = (x.new_empty(splits * B, *x.shape[1:], dtype=torch.float32) for x in (k, v))
    delta = lse.new_empty(lse.numel())
    m, log_l = saved.flatten(1) if saved.numel() else (torch.empty_like(delta), None)
    launch(
        kernels.flash_attention_delta_kernel,
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
    tiles = tuning.tiles_for("backward", q, gpu, inputs.is_heavy)
    num_key_tiles = tuning.num_tiles(S, tiles.owned, inputs.cu_seqlens_k)
    num_query_tiles = tuning.num_tiles(T, tiles.owned, inputs.cu_seqlens_q)
    launch(
        kernels.flash_attention_backward_kernel,
        (splits * B * Hkv * num_key_tiles + B * H * num_query_tiles,),
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        saved=Saved(m, log_l, delta),
        dq=dq,
        dk=dk,
        dv=dv,
        num_key_tiles=num_key_tiles,
        num_query_tiles=num_query_tiles,
        batch_size=B,
        splits=splits,
        KEY_SIZES=Sizes(D, padded(D), tiles.visited, tiles.owned, inputs.causal),
        QUERY_SIZES=Sizes(D, padded(D), tiles.owned, tiles.visited, inputs.causal),
        outputs=(dq, dk, dv),
        **shared_arguments(inputs, tiles, tiles.owned, tiles.owned),
    )
    if splits > 1:
        for x, sums in zip(gradients[1:], (dk, dv), strict=True):
            x.copy_(sums.unflatten(0, (splits, B)).sum(dim=0))
    return gradients


def with_close_rows(x: Out | Keys) -> Out | Keys:
    """x, copied only if a row is not contiguous or the rows are too far apart for the kernels' offsets."""
    *_, row, column = x.stride()
    return x if (column == 1 or x.shape[-1] == 1) and row < tuning.MAX_ROW_STRIDE else x.contiguous()


def takes_tma(x: Keys) -> bool:
    """Whether a tensor descriptor shall describe x: each row is contiguous and begins at a multiple of 16 bytes.

    In float32, which no tensor core multiplies exactly, the kernel spills up to 9 KB per thread with descriptors.
    """
    (batch, head, row, dim), itemsize = x.stride(), x.element_size()
    return itemsize == 2 and dim == 1 and not (x.data_ptr() | (batch | head | row) * itemsize) % 16


def shared_arguments(inputs: FlashInputs, tiles: tuning.Tiles, q_tile: int, k_tile: int) -> dict[str, object]:
    """The arguments that forward and backward share, for tiles of q_tile queries and k_tile keys."""
    (B, H, T, _), (_, Hkv, S, _) = inputs.q.shape, inputs.k.shape
    mask, dropout, packed, cu_seqlens = inputs.attn_mask, None, None, (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    if mask is not None:
        mask = mask.expand(B, H, T, S).view(torch.uint8)
    if inputs.dropout_p:
        dropout = Dropout(inputs.dropout_seed, float(inputs.dropout.threshold), inputs.dropout.growth)
    if cu_seqlens[0] is not None:
        q_tiles = tuning.sequence_of_each_tile(T, q_tile, cu_seqlens[0])
        packed = Packed(*cu_seqlens, q_tiles, tuning.sequence_of_each_tile(S, k_tile, cu_seqlens[1]))
    scoring = Scoring.of(inputs.scale, inputs.softcap, inputs.alibi_slopes, mask)
    window = None if inputs.window is None else min(inputs.window, S)  # a wider one might not fit 32 bits
    options = {"scoring": scoring, "dropout": dropout, "packed": packed, "window": window}
    sizes = {"num_heads": H, "group": H // Hkv, "T": T, "S": S}
    of_launch = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return options | sizes | of_launch | {"enable_fp_fusion": inputs.q.dtype != torch.float32}
