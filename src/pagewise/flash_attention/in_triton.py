"""FlashAttention-2 in Triton: how the kernels of `kernels/flash_attention*.py` are launched (lesson 6).

Behind the door, and behind the custom ops of `ops.py`. Tensors are read and written as they lie: a transposed view
[B, T, H, D] is not copied. Nothing about lengths is a constant of the kernels, so they are compiled once per dtype,
head size and set of options.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention import in_triton_hopper as hopper
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.launching import (
    Saved,
    in_base_2,
    kind,
    launch,
    room_like,
    round_into,
    strides,
    with_close_rows,
)
from pagewise.flash_attention.packed import Packed
from pagewise.options import ScoreOptions
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import num_sms, triton_launch
from pagewise.tools.sizes import cdiv, padded

MAX_HEAD_SIZE = 256
DELTA_ROWS = 32
Gradients = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]


def refuses(q: Float[Tensor, "B H T D"]) -> str | None:
    """Why the Triton kernels cannot take these tensors, or None."""
    if q.dtype not in FLOATS:
        return f"takes q in float32, float16 or bfloat16, got {q.dtype}"
    if q.shape[-1] > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, got {q.shape[-1]}"
    return None


def forward(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    options: ScoreOptions,
    dropout: Dropout,
    packed: Packed | None = None,
    *,
    learns: bool = False,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"], Saved]:
    """(out, lse) of `flash_attention`, for tensors that `refuses` does not refuse, and what the backward wants."""
    from pagewise.kernels import flash_attention as kernels

    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    plain = packed is None and not dropout.p and q.numel() > 0
    if plain and (variant := hopper.variant_that_wins(q, k, v, options)):
        return hopper.forward(q, k, v, options, variant, learns=learns)
    out, lse = room_like(q), q.new_empty(B, H, T, dtype=torch.float32)
    saved = Saved.room(q, learns)
    if not q.numel():
        return out, lse, saved
    with triton_launch(q.device) as readable:
        q, k, v = (readable(with_close_rows(x)) for x in (q, k, v))
        written, rest = readable(out), readable(saved.rest)  # in float32 where they are not written as they are
        m_and_log_l = saved.stats.unbind() if learns else (lse, lse)
        tensors, in_strides, numbers, constants = _arguments(q, k, v, options, dropout, packed, unread=lse)
        sizes = (packed.num_seqs if packed else B, H, H // Hkv, T, S)
        launch(
            kernels.flash_attention_kernel,
            kernels.forward_tiles(*kind(q), heavy=constants["MASK"] or constants["DROPOUT"]),
            lambda tiles: (_count_tiles(T, tiles["ROWS"], packed) * H * B,),
            (q, k, v, *tensors, written, lse, rest, *m_and_log_l, *in_strides, *strides(written), *sizes, *numbers),
            constants | {"LEARNS": learns, "REST": saved.rest.numel() > 0},
            operations=2 * B * H * T * S * D,
        )
    round_into(out, saved.rest, written)
    return out, lse, saved


def backward(
    d_out: Float[Tensor, "B H T D"],
    d_lse: Float[Tensor, "B H T"],
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    out: Float[Tensor, "B H T D"],
    lse: Float[Tensor, "B H T"],
    saved: Saved,
    options: ScoreOptions,
    dropout: Dropout,
    packed: Packed | None = None,
    *,
    splits: int | None = None,
) -> Gradients:
    """(dq, dk, dv) from the gradients of out and lse and what the forward stored.

    Args:
        splits: programs that share the query heads of a KV head in the sums of dK and dV, each with float32 sums of its
            own; a divisor of H / Hkv. Default: as few as fill the GPU.
    """
    from pagewise.kernels import flash_attention_backward as kernels

    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    dq, dk, dv = room_like(q), room_like(k), room_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    if splits is None:
        splits = _default_splits(B * Hkv * cdiv(S, 128), H // Hkv, q.device)
    with triton_launch(q.device) as readable:
        q, k, v, d_out = (readable(with_close_rows(x)) for x in (q, k, v, d_out))
        out, rest = readable(out), readable(saved.rest)
        delta, block_d = torch.empty_like(lse), padded(D)
        kernels.flash_attention_delta_kernel[(cdiv(T, DELTA_ROWS) * H * B,)](
            out, rest, d_out, lse, d_lse.contiguous(), delta, *strides(out), *strides(d_out), H, T,
            D=D, BLOCK_D=block_d, ROWS=DELTA_ROWS, REST=rest.numel() > 0, num_warps=4,
        )  # fmt: skip
        tensors, in_strides, numbers, constants = _arguments(q, k, v, options, dropout, packed, unread=lse)
        sums = [readable(dk), readable(dv)]
        if splits > 1:
            sums = [x.new_empty(splits * B, *x.shape[1:], dtype=torch.float32) for x in (k, v)]
        written = readable(dq)
        q_k_v, mask_strides = in_strides[:9], in_strides[9:]
        sizes = (B, packed.num_seqs if packed else B, H, H // Hkv, splits, T, S)
        launch(
            kernels.flash_attention_backward_kernel,
            kernels.backward_tiles(*kind(q), heavy=constants["MASK"] or constants["DROPOUT"]),
            lambda tiles: (
                splits * B * Hkv * _count_tiles(S, tiles["KEY_COLS"], packed)
                + B * H * _count_tiles(T, tiles["QUERY_ROWS"], packed),
            ),
            (
                q, k, v, d_out, *saved.stats_or(lse), delta, *tensors, written, *sums, *q_k_v, *strides(d_out),
                *mask_strides, *strides(written), *strides(sums[0]), *strides(sums[1]), *sizes, *numbers,
                options.scale_for(D),
            ),
            constants,
            operations=2 * B * H * T * S * D,
        )  # fmt: skip
    if splits > 1:
        sums = [x.unflatten(0, (splits, B)).sum(dim=0) for x in sums]
    return tuple(
        mine if theirs is mine else mine.copy_(theirs) for mine, theirs in ((dq, written), (dk, sums[0]), (dv, sums[1]))
    )


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, dropout: Dropout, packed: Packed | None, *, unread: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[float, ...], dict[str, Any]]:
    """What both kernels are given alike: tensors, strides, numbers, constants. `unread` stands for no tensor."""
    (B, H, T, D), S = q.shape, k.shape[2]
    mask, mask_strides = unread, (0, 0, 0, 0)
    if options.attn_mask is not None:
        mask = options.attn_mask.expand(B, H, T, S).view(torch.uint8)
        mask_strides = mask.stride()
    slopes = unread if options.alibi_slopes is None else options.alibi_slopes.contiguous()
    seed = unread if dropout.seed is None else dropout.seed
    cu_q, cu_k = (unread, unread) if packed is None else (x.contiguous() for x in packed)
    window = min(options.window or S, S)  # wider, it hides nothing more, and might not fit 32 bits
    constants = {
        "D": D, "BLOCK_D": padded(D), "CAUSAL": options.causal, "WINDOW": options.window is not None,
        "SOFTCAP": options.softcap > 0, "ALIBI": options.alibi_slopes is not None,
        "MASK": options.attn_mask is not None, "DROPOUT": dropout.p > 0, "PACKED": packed is not None,
    }  # fmt: skip
    in_strides = (*strides(q), *strides(k), *strides(v), *mask_strides)
    numbers = (*in_base_2(options, D), window, dropout.threshold, dropout.growth)
    return (slopes, mask, seed, cu_q, cu_k), in_strides, numbers, constants


def _count_tiles(length: int, tile: int, packed: Packed | None) -> int:
    return cdiv(length, tile) if packed is None else length // tile + packed.num_seqs


def _default_splits(programs: int, group: int, device: torch.device) -> int:
    """The smallest divisor of a group that gives a GPU's multiprocessors a program each."""
    sms = num_sms(device, on_cpu=1)
    return next((n for n in range(1, group) if group % n == 0 and n * programs >= sms), group)
