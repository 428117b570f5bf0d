"""`paged_attention`: one new query per sequence over keys and values in blocks (lessons 4 and 5).

The cache is [N, P, Hkv, D]. vLLM's kernels need a layout of their own (`vllm`). Kwon et al. 2023.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention import in_triton
from pagewise.paged_attention.in_torch import gathered_attention
from pagewise.paged_attention.inputs import PagedInputs, checked_options, checked_splits, used_blocks
from pagewise.tools.checks import FLOAT8, FLOATS, check_heads, check_same, check_shape, check_tensor
from pagewise.tools.device import choose_backend, looks
from pagewise.tools.remembered import remembers
from pagewise.tools.transforms import Derivative, derivative_of


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
    """Return attention of each sequence's newest token over its whole context, read through its block table.

        keys    = k_cache[block_tables[b]].flatten(0, 1)[: seq_lens[b]] · k_scale,   values likewise · v_scale
        out[b]  = attention(q[b], keys, values, causal=True, …)

    Sequences may share blocks, and a table may name a block twice. Slots that no query sees may hold NaN, and table
    entries that none needs any number.

    Args:
        k_cache, v_cache: in the dtype of q, or both in one float8 dtype. Stored number · scale = the number meant.
        seq_lens: at most M · P. A sequence of 0 tokens is empty: its out is 0 and its lse −inf.
        scale, alibi_slopes, window, softcap: as in `naive_attention.attention`. The bias is
            slope · (j − (seq_len − 1)).
        num_splits: cut the keys of each sequence into that many splits, attend to each, and merge. The bits of a row
            then do not depend on the batch around it. Default: on a GPU as many as fill it, else 1.
        return_lse: also return the natural log-sum-exp of the scores, float32 (float64 for float64).
        check: look at lengths and table entries before launching. Default: on the CPU, where this is free, but never
            under torch.compile. On a GPU the host waits, which no CUDA graph can capture. Unchecked, a length that the
            table cannot hold gives NaN, and an invalid table entry makes the kernel read outside the cache.
        backend: "torch" is `gathered_attention`, which always checks. "triton" takes float32, float16 and bfloat16, D
            up to 256, block sizes that are powers of two up to 256, and tensors contiguous in D. It has no backward.
            "auto" is triton for tensors on a GPU that it takes and that need no gradient, else torch. On sm_75 (T4)
            "auto" is torch.

    Returns:
        out [B, H, D] in the dtype of q; with `return_lse` the pair (out, lse [B, H]).

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend cannot take it. The message names it.
    """
    derivative = derivative_of(q, k_cache, v_cache, alibi_slopes)
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    options = ScoreOptions(scale, causal=True, window=window, softcap=softcap)
    options, backend = checked(inputs, None, options, k_scale, backend, derivative)
    splits, v_scale = checked_splits(num_splits), float(v_scale)
    if alibi_slopes is not None:
        options = options._replace(alibi_slopes=alibi_slopes).checked(q[:, :, None], 1)
    if backend == "torch":
        out, lse = gathered_attention(inputs._replace(v_scale=v_scale), options, splits)
        return (out, lse) if return_lse else out
    if looks(check, block_tables, seq_lens):
        used_blocks(inputs, options.window)
    tensors = (q.unsqueeze(2), k_cache, v_cache, options, splits or in_triton.FILLING, block_tables, seq_lens)
    out, lse = in_triton.attend(in_triton.DecodeInputs(*tensors, None, v_scale))
    return (out.squeeze(2), lse.squeeze(2)) if return_lse else out.squeeze(2)


@remembers
def checked(
    inputs: PagedInputs,
    cu_seqlens_q: Tensor | None,
    options: ScoreOptions,
    k_scale: float,
    backend: str,
    derivative: Derivative | None,
) -> tuple[ScoreOptions, str]:
    """Return the checked options, with k_scale, and the backend that computes; for packed queries too (lesson 9)."""
    q, k_cache, v_cache, *_ = inputs
    check_tensor("q", q, "B H D", dtypes=(*FLOATS, torch.float64))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, "N P Hkv D", dtypes=(q.dtype, *FLOAT8))
    check_same("dtype", k_cache=k_cache, v_cache=v_cache)
    (num_seqs, H, D), (N, P, Hkv, _) = q.shape, k_cache.shape
    check_shape("k_cache", k_cache, (N, P, Hkv, D), "N P Hkv D")
    check_shape("v_cache", v_cache, k_cache.shape, "N P Hkv D")
    check_heads(H, Hkv)
    if D == 0 or P == 0:
        raise ValueError(f"k_cache must have a block size P and a head size D of at least 1, got {list(k_cache.shape)}")
    if cu_seqlens_q is not None:
        check_tensor("cu_seqlens_q", cu_seqlens_q, "B+1", dtypes=(torch.int32,))
        check_same("device", q=q, cu_seqlens_q=cu_seqlens_q)
        num_seqs = len(cu_seqlens_q) - 1
        if num_seqs < 0 or (num_seqs == 0 and len(q)):
            got = f"{num_seqs + 1} for {len(q)} queries"
            raise ValueError(f"cu_seqlens_q must have B + 1 entries, the first 0, got {got}")
    options = checked_options(inputs, options, k_scale, num_seqs)
    return options, choose_backend(backend, q.device, in_triton.refuses(inputs), derivative=derivative)
