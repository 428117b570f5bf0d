"""Paged attention in CUDA: vLLM's v1 and v2 and the variant that reads K and V once per KV head (lesson 5).

The kernels are in kernels/paged_attention.cu; this module checks what they take and launches them.

    v1       a thread block per head and sequence; its scores fill shared memory, which limits the context
    v2       a thread block per head, sequence and partition of 512 context tokens; a second kernel merges
    grouped  v2 with the query heads of a KV head in one thread block, so that keys and values are read once for all
"""

from typing import Literal

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_cuda_launch import shared_bytes, shared_bytes_limit
from pagewise.paged_inputs import DECODING, PagedInputs, checked_vllm_inputs, used_blocks
from pagewise.tools.checks import check_count, check_flag

HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32)
MAX_QUERY_HEADS = 8  # in one thread block of the grouped variant: what the registers hold
MAX_NUM_SEQS = MAX_PARTITIONS = 65535  # a CUDA grid's y and z

Output = Float[Tensor, "B H D"] | tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]


def choose_version(
    num_seqs: int, num_heads: int, max_seq_len: int, *, partition_size: int = 512
) -> Literal["v1", "v2"]:
    """v1 or v2, as vLLM chose: v1 where the context is short and there is one partition or work for every SM anyway.

        v1  if  max_seq_len ≤ 8192  and  (one partition  or  num_seqs · num_heads > 512)

    v2 costs a second launch and the partial results' way through memory, v1 leaves SMs idle when heads are few and
    needs 4 bytes of shared memory per token. 8192 was chosen for a T4's 48 KB (vLLM, `paged_attn.py`, until 0.22).
    """
    for name, count in (("num_seqs", num_seqs), ("num_heads", num_heads), ("max_seq_len", max_seq_len)):
        check_count(name, count, minimum=0)
    check_count("partition_size", partition_size)
    one_pass = max_seq_len <= 8192 and (max_seq_len <= partition_size or num_seqs * num_heads > 512)
    return "v1" if one_pass else "v2"


def paged_attention_v1(
    q: Float[Tensor, "B H D"],
    k_cache: Shaped[Tensor, "N Hkv D_x P x"],
    v_cache: Shaped[Tensor, "N Hkv D P"],
    block_tables: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, " B"],
    *,
    max_seq_len: int | None = None,
    scale: float | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
    check: bool | None = None,
) -> Output:
    """`paged_attention` in CUDA, in one pass, over a cache in vLLM's layout (`to_vllm_layout`).

    Head sizes 32 64 80 96 112 120 128 192 256, block sizes 8 16 32; q in float32, float16 or bfloat16, the cache in
    q's dtype or in float8 (head size then a multiple of 16). On a GPU it runs compiled, on the CPU as fibers. Forward
    only: `paged_attention(backend="torch")` is differentiable.

    Args:
        max_seq_len: no sequence is longer. Default: the longest, which on a GPU waits for it once. The scores of so
            many tokens must fit a thread block's shared memory: about 57 600 on an H100, 41 000 on an A100.
        scale, alibi_slopes: as in `paged_attention`.
        k_scale, v_scale: stored number · scale = the number meant.
        return_lse: also return the natural log-sum-exp of the scores, float32.
        check: look at lengths and table entries before launching. Default: where it is free, on the CPU. On a GPU
            True waits for it once. Unchecked, a sequence longer than max_seq_len gives NaN, and a table entry that is
            no block is followed.

    Returns:
        out [B, H, D] in q's dtype; with `return_lse` the pair (out, lse [B, H]).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, and the remedy.
    """
    options = DECODING._replace(scale=scale, alibi_slopes=alibi_slopes)
    inputs, max_seq_len, options = _check(
        q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, options, k_scale, v_scale, return_lse, check
    )
    _check_shared_bytes("max_seq_len", max_seq_len, q, v_cache.shape[-1], 1, "use paged_attention_v2")
    out, lse = torch.ops.pagewise.paged_attention_v1(
        q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, options.scale, alibi_slopes, inputs.v_scale
    )  # fmt: skip
    return (out, lse) if return_lse else out


def paged_attention_v2(
    q: Float[Tensor, "B H D"],
    k_cache: Shaped[Tensor, "N Hkv D_x P x"],
    v_cache: Shaped[Tensor, "N Hkv D P"],
    block_tables: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, " B"],
    *,
    max_seq_len: int | None = None,
    scale: float | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    partition_size: int = 512,
    return_lse: bool = False,
    check: bool | None = None,
) -> Output:
    """`paged_attention_v1` in two: partitions of `partition_size` context tokens side by side, then their merge.

    So the context's length is not limited, and a single long sequence keeps many SMs busy. The partial results are
    float32. `partition_size` must be a multiple of the block size; every new one compiles a kernel of its own.
    Everything else as for `paged_attention_v1`.
    """
    options = DECODING._replace(scale=scale, alibi_slopes=alibi_slopes)
    return _partitioned(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        max_seq_len,
        options,
        k_scale,
        v_scale,
        partition_size,
        1,
        return_lse,
        check,
    )


def paged_attention_grouped(
    q: Float[Tensor, "B H D"],
    k_cache: Shaped[Tensor, "N Hkv D_x P x"],
    v_cache: Shaped[Tensor, "N Hkv D P"],
    block_tables: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, " B"],
    *,
    max_seq_len: int | None = None,
    scale: float | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    partition_size: int = 512,
    return_lse: bool = False,
    check: bool | None = None,
) -> Output:
    """`paged_attention_v2` with up to 8 query heads of a KV head in one thread block: K and V are read once for them.

    v1 and v2 read them once per query head. A thread block takes the largest divisor of H / Hkv that is at most 8 (so
    groups of 11 or 13 gain nothing). Arguments, results and errors are those of `paged_attention_v2`.
    """
    options = DECODING._replace(scale=scale, alibi_slopes=alibi_slopes)
    return _partitioned(
        q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, options, k_scale, v_scale, partition_size,
        MAX_QUERY_HEADS, return_lse, check,
    )  # fmt: skip


def query_heads_per_thread_block(group_size: int, at_most: int = MAX_QUERY_HEADS) -> int:
    """The largest divisor of `group_size`, the query heads of a KV head, that is at most `at_most`."""
    return max(heads for heads in range(1, min(at_most, max(1, group_size)) + 1) if group_size % heads == 0)


def _partitioned(
    q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, options, k_scale, v_scale, partition_size,
    max_query_heads, return_lse, check,
) -> Output:  # fmt: skip
    check_count("partition_size", partition_size)
    inputs, max_seq_len, options = _check(
        q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, options, k_scale, v_scale, return_lse, check
    )
    Hkv, _, P = v_cache.shape[1:]
    if partition_size % P:
        raise ValueError(f"partition_size must be a multiple of the block size {P}, got {partition_size}")
    if max_seq_len > partition_size * MAX_PARTITIONS:
        raise ValueError(
            f"max_seq_len = {max_seq_len} is more than {MAX_PARTITIONS} partitions of {partition_size} tokens: "
            f"take a larger partition_size"
        )
    heads = query_heads_per_thread_block(q.shape[1] // Hkv, max_query_heads)
    _check_shared_bytes("partition_size", partition_size, q, P, heads, "take a smaller one")
    out, lse = torch.ops.pagewise.paged_attention_v2(
        q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, options.scale,
        options.alibi_slopes, inputs.v_scale, partition_size, heads,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check(
    q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, options, k_scale, v_scale, return_lse, check
) -> tuple[PagedInputs, int, ScoreOptions]:
    """Check everything; return the inputs, max_seq_len and the options as they go to the kernel."""
    tensors, sizes = (
        (q, k_cache, v_cache, block_tables, seq_lens),
        {"head_sizes": HEAD_SIZES, "block_sizes": BLOCK_SIZES},
    )
    inputs, options = checked_vllm_inputs(*tensors, options, k_scale=k_scale, v_scale=v_scale, **sizes)
    (B, M), P = block_tables.shape, v_cache.shape[-1]
    check_flag("return_lse", return_lse)
    if B > MAX_NUM_SEQS:
        raise ValueError(f"q must have at most {MAX_NUM_SEQS} sequences, got {B}: split the batch")
    if max_seq_len is not None:
        check_count("max_seq_len", max_seq_len, minimum=0)
    if check is not None:
        check_flag("check", check)
    longest = 0
    if check or (check is None and q.device.type == "cpu"):
        longest = used_blocks(inputs).longest
    elif B and max_seq_len is None:
        longest = int(seq_lens.max())
    if max_seq_len is None:
        return inputs, max(0, min(longest, M * P)), options
    if longest > max_seq_len:
        raise ValueError(f"max_seq_len must be at least the longest of seq_lens, {longest}, got {max_seq_len}")
    return inputs, min(max_seq_len, M * P), options


def _check_shared_bytes(name: str, tokens: int, q: Tensor, block_size: int, query_heads: int, remedy: str) -> None:
    """A thread block keeps a float32 score per token: they must fit its shared memory."""
    limit = shared_bytes_limit(q.device)
    static, dynamic = shared_bytes(tokens, q, block_size, query_heads)
    if static + dynamic > limit:
        most = (limit - static) // (4 * query_heads) // block_size * block_size
        raise ValueError(
            f"{name} = {tokens} needs {static + dynamic} bytes of shared memory for its scores, but a thread block on "
            f"{q.device} has at most {limit}, enough for {most} tokens: {remedy}"
        )
