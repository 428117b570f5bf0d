"""FlashAttention-2 in Triton: how the kernels of `kernels/flash_attention*.py` are launched (lesson 6).

Behind the door, and behind the custom ops of `ops.py`. Tensors are read and written as they lie: a transposed view
[B, T, H, D] is not copied. Nothing about lengths is a constant of the kernels, so they are compiled once per dtype,
head size and set of options.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from pagewise.flash_attention.dropout import Dropout
from pagewise.options import ScoreOptions
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import triton_launch, triton_mode
from pagewise.tools.sizes import cdiv

LOG2_E = 1.4426950408889634
MAX_HEAD_SIZE = 256
FAR_ROWS = 2**24  # elements from row to row; beyond, an offset in a tile would not fit 32 bits
DELTA_ROWS = 32
WORTH_TUNING = 2**32  # operations of a product Q Kᵀ; below, what a launch costs hides the tiles
OutAndLse = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]
Gradients = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]


class Packed(NamedTuple):
    """Where sequence b lies in tensors [1, H, total, D]: rows cu_seqlens[b] … cu_seqlens[b + 1] − 1."""

    cu_seqlens_q: Int32[Tensor, " ends"]
    cu_seqlens_k: Int32[Tensor, " ends"]

    def __len__(self) -> int:
        return self.cu_seqlens_q.numel() - 1


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
) -> OutAndLse:
    """(out, lse) of `flash_attention`, for tensors that `refuses` does not refuse."""
    from pagewise.kernels import flash_attention as kernels

    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    out, lse = room_like(q), q.new_empty(B, H, T, dtype=torch.float32)
    if not q.numel():
        return out, lse
    with triton_launch(q.device) as readable:
        q, k, v = (readable(_with_close_rows(x)) for x in (q, k, v))
        written = readable(out)  # the interpreter's are in float32
        tensors, strides, numbers, constants = _arguments(q, k, v, options, dropout, packed, unread=lse)
        sizes = (len(packed) if packed else B, H, H // Hkv, T, S)
        _launch(
            kernels.flash_attention_kernel,
            kernels.forward_tiles(*_kind(q), heavy=constants["MASK"] or constants["DROPOUT"]),
            lambda tiles: (_count_tiles(T, tiles["ROWS"], packed) * H * B,),
            (q, k, v, *tensors, written, lse, *strides, *_strides(written), *sizes, *numbers),
            constants,
            worth_tuning=2 * B * H * T * S * D > WORTH_TUNING,
        )
    return out if written is out else written.to(out.dtype), lse


def backward(
    d_out: Float[Tensor, "B H T D"],
    d_lse: Float[Tensor, "B H T"],
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    out: Float[Tensor, "B H T D"],
    lse: Float[Tensor, "B H T"],
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
        q, k, v, d_out, out = (readable(_with_close_rows(x)) for x in (q, k, v, d_out, out))
        delta, block_d = torch.empty_like(lse), padded(D)
        kernels.flash_attention_delta_kernel[(cdiv(T, DELTA_ROWS) * H * B,)](
            out, d_out, lse, d_lse.contiguous(), delta, *_strides(out), *_strides(d_out), H, T,
            D=D, BLOCK_D=block_d, ROWS=DELTA_ROWS, num_warps=4,
        )  # fmt: skip
        tensors, strides, numbers, constants = _arguments(q, k, v, options, dropout, packed, unread=lse)
        sums = [readable(dk), readable(dv)]
        if splits > 1:
            sums = [x.new_empty(splits * B, *x.shape[1:], dtype=torch.float32) for x in (k, v)]
        written = readable(dq)
        q_k_v, mask_strides = strides[:9], strides[9:]
        sizes = (B, len(packed) if packed else B, H, H // Hkv, splits, T, S)
        _launch(
            kernels.flash_attention_backward_kernel,
            kernels.backward_tiles(*_kind(q), heavy=constants["MASK"] or constants["DROPOUT"]),
            lambda tiles: (
                splits * B * Hkv * _count_tiles(S, tiles["KEY_COLS"], packed)
                + B * H * _count_tiles(T, tiles["QUERY_ROWS"], packed),
            ),
            (
                q, k, v, d_out, lse, delta, *tensors, written, *sums, *q_k_v, *_strides(d_out), *mask_strides,
                *_strides(written), *_strides(sums[0]), *_strides(sums[1]), *sizes, *numbers, options.scale_for(D),
            ),
            constants,
            worth_tuning=2 * B * H * T * S * D > WORTH_TUNING,
        )  # fmt: skip
    if splits > 1:
        sums = [x.unflatten(0, (splits, B)).sum(dim=0) for x in sums]
    return tuple(
        mine if theirs is mine else mine.copy_(theirs) for mine, theirs in ((dq, written), (dk, sums[0]), (dv, sums[1]))
    )


def room_like(x: Float[Tensor, "B heads rows D"]) -> Float[Tensor, "B heads rows D"]:
    """Room for numbers that lie as x does, if its rows are contiguous; else contiguous."""
    room = torch.empty_like(x)
    return room if room.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def padded(head_size: int) -> int:
    """BLOCK_D: a power of two, at least the 16 that a matrix product takes."""
    return max(16, 1 << (head_size - 1).bit_length())


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
    scale, softcap = options.scale_for(D), options.softcap
    scale = scale / softcap if softcap > 0 else scale * LOG2_E
    window = min(options.window or 2**31 - 1, 2**31 - 1)
    constants = {
        "D": D, "BLOCK_D": padded(D), "CAUSAL": options.causal, "WINDOW": options.window is not None,
        "SOFTCAP": softcap > 0, "ALIBI": options.alibi_slopes is not None, "MASK": options.attn_mask is not None,
        "DROPOUT": dropout.p > 0, "PACKED": packed is not None,
    }  # fmt: skip
    strides = (*_strides(q), *_strides(k), *_strides(v), *mask_strides)
    numbers = (scale, softcap * LOG2_E, window, dropout.threshold, dropout.growth)
    return (slopes, mask, seed, cu_q, cu_k), strides, numbers, constants


def _strides(x: Float[Tensor, "B heads rows D"]) -> tuple[int, int, int]:
    return x.stride()[:3]


def _with_close_rows(x: Float[Tensor, "B heads rows D"]) -> Float[Tensor, "B heads rows D"]:
    """x, copied only where its rows are not contiguous, or lie farther apart than the kernels count."""
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) < FAR_ROWS else x.contiguous()


def _count_tiles(length: int, tile: int, packed: Packed | None) -> int:
    return cdiv(length, tile) if packed is None else length // tile + len(packed)


def _kind(q: Tensor) -> tuple[int, int, int]:
    """What the choice of tiles depends on: BLOCK_D, bytes per element, and compute capability; 0: interpreted."""
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
    return padded(q.shape[-1]), q.element_size(), major


def _default_splits(programs: int, group: int, device: torch.device) -> int:
    """The smallest divisor of a group that gives a GPU's multiprocessors a program each."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return next((n for n in range(1, group) if group % n == 0 and n * programs >= sms), group)


def _launch(
    kernel: Any,
    choices: tuple[dict[str, int], ...],
    grid: Callable[[dict[str, Any]], tuple[int]],
    arguments: tuple,
    constants: dict[str, Any],
    *,
    worth_tuning: bool,
) -> None:
    """Launch with the first of these tiles; on a GPU, where it matters, with the fastest, found out once and kept."""
    if (
        len(choices) > 1
        and worth_tuning
        and triton_mode() == "compiled"
        and not torch.cuda.is_current_stream_capturing()
    ):
        _tuned(kernel, tuple(tuple(choice.items()) for choice in choices))[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants, **choices[0])


@functools.cache
def _tuned(kernel: Any, choices: tuple[tuple[tuple[str, int], ...], ...]) -> Any:
    import triton

    configs = []
    for choice in map(dict, choices):
        threads = {name: choice.pop(name) for name in ("num_warps", "num_stages")}
        configs.append(triton.Config(choice, **threads))
    key = ["D", "CAUSAL", "WINDOW", "SOFTCAP", "ALIBI", "MASK", "DROPOUT", "PACKED"]  # and dtypes
    return triton.autotune(configs, key, cache_results=True)(kernel)
