"""Paged attention: one new query per sequence over keys and values scattered in blocks (lessons 4 and 5).

One function in front of every way to compute it over a cache [N, P, Hkv, D]. Kwon et al. 2023. The torch paths are in
`pagewise.paged_reading`, the Triton one in `pagewise.paged_decode`; vLLM's kernels, which want a layout of their own,
in `pagewise.paged_cuda`.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.paged_cuda import choose_version, paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.paged_decode import decode_attention, refuses
from pagewise.paged_inputs import DECODING, checked_inputs, used_blocks
from pagewise.paged_reading import gathered_attention
from pagewise.tools.checks import check_count, check_flag
from pagewise.tools.device import choose_backend

__all__ = ["choose_version", "paged_attention", "paged_attention_grouped", "paged_attention_v1", "paged_attention_v2"]


def paged_attention(
    q: Float[Tensor, "B H D"],
    k_cache: Shaped[Tensor, "N P Hkv D"],
    v_cache: Shaped[Tensor, "N P Hkv D"],
    block_tables: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, " B"],
    *,
    scale: float | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_splits: int | None = None,
    return_lse: bool = False,
    check: bool | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Float[Tensor, "B H D"] | tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]:
    """Attention of each sequence's newest token over its whole context, read through its block table.

        keys    = k_cache[block_tables[b]].flatten(0, 1)[: seq_lens[b]] · k_scale,   values likewise · v_scale
        out[b]  = attention(q[b], keys, values, causal=True, …)

    Sequences may share blocks, and a table may repeat one. What no query sees is never used: slots past the end,
    other blocks (NaN there does no harm), table entries past a sequence's blocks or before its window (any number).

    Args:
        k_cache, v_cache: in the dtype of q, or both in one float8 dtype. Stored number · scale = the number meant.
        seq_lens: at most M · P. 0: the sequence is empty, out is 0 and lse −inf.
        scale, alibi_slopes, window, softcap: as in `naive_attention.attention`; bias slope · (j − (seq_len − 1)).
        num_splits: cut the keys of each sequence into that many pieces, attend to each, merge. Default: 1 in torch and
            on the CPU; on a GPU as many as fill it (`paged_decode.default_num_splits`).
        return_lse: also return the natural log-sum-exp of the scores, float32 (float64 for float64).
        check: look at lengths and table entries before launching. Default: where that is free, on the CPU; on a GPU
            True waits for it once. Unchecked, a length that the table cannot hold gives NaN, and a table entry that is
            no block of the cache reads foreign memory. The torch backend always checks.
        backend: "torch" is `gathered_attention`; `streamed_attention` is its twin that needs no room for all keys.
            "triton" takes float32, float16 and bfloat16, D up to 256, block sizes that are powers of two up to 256, and
            tensors contiguous in D, and is forward only. "auto" takes triton for tensors on a GPU that it can take and
            that need no gradient, else torch.

    Returns:
        out [B, H, D] in the dtype of q; with `return_lse` the pair (out, lse [B, H]).

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend cannot take it; the message names it. On a GPU
        the torch backend, and `check=True`, wait for it once, and cannot be captured in a CUDA graph.
    """
    check_flag("return_lse", return_lse)
    if check is not None:
        check_flag("check", check)
    if num_splits is not None:
        check_count("num_splits", num_splits)
    options = DECODING._replace(scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes)
    tensors = (q, k_cache, v_cache, block_tables, seq_lens)
    inputs, options = checked_inputs(*tensors, options, k_scale=k_scale, v_scale=v_scale)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k_cache, v_cache))
    if choose_backend(backend, q.device, refuses(inputs), learns=learns) == "torch":
        out, lse = gathered_attention(inputs, options, num_splits=num_splits or 1)
    else:
        if check or (check is None and not q.is_cuda):
            used_blocks(inputs, window)
        out, lse = decode_attention(inputs, options, num_splits=num_splits)
    return (out, lse) if return_lse else out
