"""Paged attention: one new query per sequence over keys and values scattered in blocks (lessons 4 and 5).

`paged_attention` stands in front of every way to compute it over a cache [N, P, Hkv, D], in torch (`in_torch`) and in
Triton (`in_triton`). Kwon et al. 2023. Their kernels v1 and v2, and the variant that reads K and V once per KV head,
want a layout of their own (`in_cuda`). Everything is checked here, once.
"""

from typing import Literal

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.paged_attention.in_torch import gathered_attention
from pagewise.paged_attention.in_triton import DecodeInputs, decode, refuses
from pagewise.paged_attention.inputs import DECODING, checked_inputs, used_blocks
from pagewise.paged_attention.splits import checked_splits
from pagewise.tools.checks import check_flag
from pagewise.tools.device import choose_backend, wants_gradient

Output = Float[Tensor, "B H D"] | tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]


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
    split_size: int | None = None,
    return_lse: bool = False,
    check: bool | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Output:
    """Attention of each sequence's newest token over its whole context, read through its block table.

        keys    = k_cache[block_tables[b]].flatten(0, 1)[: seq_lens[b]] · k_scale,   values likewise · v_scale
        out[b]  = attention(q[b], keys, values, causal=True, …)

    Sequences may share blocks, and a table may repeat one. What no query sees is never used: slots past the end,
    other blocks (NaN there does no harm), table entries past a sequence's blocks or before its window (any number).

    Args:
        k_cache, v_cache: in the dtype of q, or both in one float8 dtype. Stored number · scale = the number meant.
        seq_lens: at most M · P. 0: the sequence is empty, out is 0 and lse −inf.
        scale, alibi_slopes, window, softcap: as in `naive_attention.attention`; bias slope · (j − (seq_len − 1)).
        num_splits, split_size: cut the keys of each sequence into that many pieces, or into pieces of that many keys
            (in Triton of whole tiles), attend to each, merge. One or the other; a row's bits then do not depend on the
            batch around it. Default: one piece in torch and on the CPU; on a GPU as many programs as fill it share the
            keys of the whole batch (`pagewise.flash_decoding`).
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
    splits = checked_splits(num_splits, split_size)
    options = DECODING._replace(scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes)
    tensors = (q, k_cache, v_cache, block_tables, seq_lens)
    inputs, options = checked_inputs(*tensors, options, k_scale=k_scale, v_scale=v_scale)
    learns = wants_gradient(q, k_cache, v_cache, alibi_slopes)
    if choose_backend(backend, q.device, refuses(DecodeInputs.paged(inputs)), learns=learns) == "torch":
        out, lse = gathered_attention(inputs, options, splits)
    else:
        if check or (check is None and not q.is_cuda):
            used_blocks(inputs, window)
        out, lse = (x.squeeze(2) for x in decode(DecodeInputs.paged(inputs), options, splits))
    return (out, lse) if return_lse else out
