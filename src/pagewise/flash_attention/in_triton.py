"""FlashAttention-2 in Triton: how the kernels of `kernels/flash_attention*.py` are launched (lesson 6).

Tensors are read and written with their own strides: a transposed view [B, T, H, D] is not copied. No length is a
constant of the kernels, so they are compiled once per dtype, head size and set of options.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention import tuning
from pagewise.flash_attention.ops import FlashInputs, empty_like
from pagewise.tools.architecture import Architecture, architecture
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import without_bfloat16
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv, padded

LOG2_E = 1.4426950408889634
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
    """Write (out, lse) of `flash_attention`, and in `saved` what the backward needs.

    Without a gradient `saved` is empty. Otherwise it is [2, B, H, T]: the largest score m, in units of log 2, and
    log₂ l = log₂ Σ 2^(score − m). FlashAttention's backward uses their sum, the log-sum-exp. Next to a large m the sum
    rounds log₂ l away, and the weights get a relative error of about m · 2⁻²⁴. With scores of −480 the error of a
    float32 gradient was 2.1e-4, where naive attention's was 3.4e-6. The two numbers are therefore kept apart.
    """
    from pagewise.kernels.flash_attention import flash_attention_kernel

    B, H, T, _ = inputs.q.shape
    if not inputs.q.numel():
        return
    tensors = (*map(with_close_rows, inputs[:3]), out, lse.view(-1))
    tensors += tuple(saved.flatten(1)) if saved.numel() else (None, None)
    sizes = (H, H // inputs.k.shape[1], T, inputs.k.shape[2])

    def run(tiles: tuning.Tiles) -> None:
        num_tiles = tuning.num_tiles(T, tiles.owned, inputs.cu_seqlens_q)
        sequences = tuning.sequence_of_each_tile(T, tiles.owned, inputs.cu_seqlens_q)
        arguments = (*tensors, *_optional(inputs), sequences, num_tiles, *sizes, *_numbers(inputs))
        constants = _constants(inputs, tiles) | {"ROWS": tiles.owned, "COLS": tiles.visited}
        launch(flash_attention_kernel, (num_tiles * H * B,), *arguments, outputs=(out,), **constants)

    run(_chosen_tiles(tuning.forward_tiles, inputs, run))


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
        splits: how many programs share the query heads of a KV head in the sums of dK and dV, each with float32 sums
            of its own; a divisor of H / Hkv. Default: `tuning.num_splits`.
    """
    from pagewise.kernels.flash_attention_backward import flash_attention_backward_kernel, flash_attention_delta_kernel

    (B, H, T, D), (_, Hkv, S, _) = inputs.q.shape, inputs.k.shape
    gradients = dq, dk, dv = tuple(map(empty_like, inputs[:3]))
    if not inputs.q.numel() or not inputs.k.numel():
        return tuple(x.zero_() for x in gradients)
    q, k, v, d_out = map(with_close_rows, (*inputs[:3], d_out))
    if splits is None:
        gpu = architecture(q.device)
        splits = tuning.num_splits(B * Hkv * cdiv(S, tuning.KEYS_PER_PROGRAM), H // Hkv, gpu.num_sms)
    if splits > 1:
        dk, dv = (x.new_empty(splits * B, *x.shape[1:], dtype=torch.float32) for x in (k, v))
    delta = torch.empty_like(lse)
    rows = (out, d_out, lse.view(-1), d_lse.reshape(-1), delta.view(-1), H, T)
    grid, constants = (cdiv(T, tuning.DELTA_ROWS) * H * B,), {"D": D, "BLOCK_D": padded(D), "ROWS": tuning.DELTA_ROWS}
    launch(flash_attention_delta_kernel, grid, *rows, **constants, num_warps=4)
    tensors = (q, k, v, d_out, *_m_and_log_l(saved, lse), delta.view(-1), *_optional(inputs))
    sizes = (B, H, H // Hkv, splits, T, S)

    def run(tiles: tuning.Tiles) -> None:
        keys, queries = (S, tiles.owned, inputs.cu_seqlens_k), (T, tiles.owned, inputs.cu_seqlens_q)
        num_key_tiles, num_query_tiles = tuning.num_tiles(*keys), tuning.num_tiles(*queries)
        sequences = tuning.sequence_of_each_tile(*keys), tuning.sequence_of_each_tile(*queries)
        counts = (num_key_tiles, num_query_tiles, *sizes)
        grid = (splits * B * Hkv * num_key_tiles + B * H * num_query_tiles,)
        arguments = (*tensors, *sequences, dq, dk, dv, *counts, *_numbers(inputs), inputs.scale)
        constants = _constants(inputs, tiles) | {"KEY_ROWS": tiles.visited, "KEY_COLS": tiles.owned}
        constants |= {"QUERY_ROWS": tiles.owned, "QUERY_COLS": tiles.visited}
        launch(flash_attention_backward_kernel, grid, *arguments, outputs=(dq, dk, dv), **constants)

    run(_chosen_tiles(tuning.backward_tiles, inputs, run))
    if splits > 1:
        for x, sums in zip(gradients[1:], (dk, dv), strict=True):
            x.copy_(sums.unflatten(0, (splits, B)).sum(dim=0))
    return gradients


def with_close_rows(x: Float[Tensor, "B heads rows D"]) -> Float[Tensor, "B heads rows D"]:
    """x, copied only if a row is not contiguous or the rows are too far apart for the kernels' offsets."""
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) < tuning.MAX_ROW_STRIDE else x.contiguous()


def _optional(inputs: FlashInputs) -> tuple[Tensor | None, ...]:
    """The kernels' arguments slopes, attn_mask, seed and cu_seqlens."""
    mask = inputs.attn_mask
    if mask is not None:
        mask = mask.expand(*inputs.q.shape[:3], inputs.k.shape[2]).view(torch.uint8)
    return inputs.alibi_slopes, mask, inputs.dropout_seed, inputs.cu_seqlens_q, inputs.cu_seqlens_k


def _numbers(inputs: FlashInputs) -> tuple[float | int | None, ...]:
    """The kernels' arguments scale, softcap, window, threshold and growth; None for an option that is not used."""
    scale, softcap, S = inputs.scale, inputs.softcap, inputs.k.shape[2]
    scores = (scale / softcap, softcap * LOG2_E) if softcap > 0 else (scale * LOG2_E, None)
    window = None if inputs.window is None else min(inputs.window, S)  # a wider one might not fit 32 bits
    dropout = inputs.dropout
    return *scores, window, *((dropout.threshold, dropout.growth) if dropout.p else (None, None))


def _constants(inputs: FlashInputs, tiles: tuning.Tiles) -> dict[str, Any]:
    D = inputs.q.shape[-1]
    constants = {"D": D, "BLOCK_D": padded(D), "CAUSAL": inputs.causal}
    return constants | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def _chosen_tiles(choices: Callable, inputs: FlashInputs, run: Callable[[tuning.Tiles], None]) -> tuning.Tiles:
    """The tiles to launch with, from `tuning.forward_tiles` or `tuning.backward_tiles`."""
    (B, H, T, D), S, q = inputs.q.shape, inputs.k.shape[2], inputs.q
    heavy = inputs.attn_mask is not None or inputs.dropout_p > 0
    options = (inputs.causal, *(x is None for x in (*_optional(inputs), *_numbers(inputs))))
    tiles = choices(padded(D), q.element_size(), architecture(q.device), heavy=heavy)
    num_sequences = B if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.numel() - 1
    operations = 2 * B * H * T * S * D // max(1, num_sequences // B)  # packed: as if all sequences were equally long
    return tuning.fastest(tiles, operations, (choices.__name__, q.device, q.dtype, D, *options), run)


def _m_and_log_l(saved: Tensor, lse: Float[Tensor, "B H T"]) -> tuple[Tensor, Tensor]:
    """m and log₂ l as the forward saved them; if it saved nothing, lse in their place."""
    if saved.numel():
        return tuple(saved.flatten(1))
    sees_nothing = lse.flatten() == -torch.inf
    m = (lse.flatten() * LOG2_E).masked_fill(sees_nothing, 0.0)
    return m, torch.zeros_like(m).masked_fill(sees_nothing, torch.inf)
