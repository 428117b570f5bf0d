"""`paged_attention`: one new query per sequence over keys and values in blocks (lessons 4 and 5).

The function checks its arguments once and chooses between torch (`in_torch`) and Triton (`in_triton`), for a cache
[N, P, Hkv, D]. vLLM's kernels need a layout of their own (`vllm`). Kwon et al. 2023.
"""

from typing import Literal

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention import in_triton
from pagewise.paged_attention.in_torch import gathered_attention
from pagewise.paged_attention.inputs import PagedInputs, checked_inputs, used_blocks
from pagewise.tools.checks import check_count
from pagewise.tools.device import choose_backend, looks
from pagewise.tools.remembered import remembers
from pagewise.tools.transforms import derivative_of


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

    Sequences may share blocks, and a table may name a block twice. The function ignores every slot and table entry
    that no query sees. Such slots may hold NaN, and such entries any number.

    Args:
        k_cache, v_cache: in the dtype of q, or both in one float8 dtype. Stored number · scale = the number meant.
        seq_lens: at most M · P. A sequence of 0 tokens is empty: its out is 0 and its lse −inf.
        scale, alibi_slopes, window, softcap: as in `naive_attention.attention`. The bias is
            slope · (j − (seq_len − 1)).
        num_splits: cut the keys of each sequence into that many splits, attend to each, and merge. The bits of a row
            then do not depend on the batch around it. Default: on a GPU as many as fill it, else 1.
        return_lse: also return the natural log-sum-exp of the scores, float32 (float64 for float64).
        check: look at lengths and table entries before launching. By default this is done on the CPU, where it is
            free, and never under torch.compile. On a GPU, True makes the host wait once. Unchecked, a length that the
            table cannot hold gives NaN, and an invalid table entry makes the kernel read outside the cache. The torch
            backend always checks, and its host waits. A CUDA graph can capture neither.
        backend: "torch" is `gathered_attention`. Its twin `streamed_attention` needs no memory for all keys.
            "triton" takes float32, float16 and bfloat16, D up to 256, block sizes that are powers of two up to 256, and
            tensors contiguous in D. It has no backward. "auto" is triton for tensors on a GPU that it takes and that
            need no gradient, else torch. On sm_75 (T4) "auto" is torch.

    Returns:
        out [B, H, D] in the dtype of q; with `return_lse` the pair (out, lse [B, H]).

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend cannot take it. The message names it.
    """
    numbers, refusal = _checked(
        q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap, k_scale, v_scale, num_splits
    )
    scale, window, softcap, v_scale, num_splits = numbers
    options = ScoreOptions(scale, True, window, softcap, alibi_slopes)
    if alibi_slopes is not None:
        options.checked(q[:, :, None], 1)
    derivative = derivative_of(q, k_cache, v_cache, alibi_slopes)
    if choose_backend(backend, q.device, refusal, derivative=derivative) == "torch":
        inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
        out, lse = gathered_attention(inputs, options, num_splits)
        return (out, lse) if return_lse else out
    if looks(check, block_tables, seq_lens):
        used_blocks(PagedInputs(q, k_cache, v_cache, block_tables, seq_lens), window)
    of_batch = {"block_tables": block_tables, "seq_lens": seq_lens, "v_scale": v_scale}
    out, lse = in_triton.attend(q.unsqueeze(2), k_cache, v_cache, options, ("num", num_splits or 0), **of_batch)
    return (out.squeeze(2), lse.squeeze(2)) if return_lse else out.squeeze(2)


@remembers
def _checked(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
    num_splits: int | None,
) -> tuple[tuple, str | None]:
    """Return scale with k_scale, window, softcap, v_scale and num_splits, and why Triton cannot take the tensors."""
    if num_splits is not None:
        check_count("num_splits", num_splits)
        num_splits = int(num_splits)
    options = ScoreOptions(scale, True, window, softcap)
    tensors = (q, k_cache, v_cache, block_tables, seq_lens)
    inputs, options = checked_inputs(*tensors, options, k_scale=k_scale, v_scale=v_scale)
    numbers = (options.scale, options.window, options.softcap, inputs.v_scale, num_splits)
    return numbers, in_triton.refuses(inputs)
