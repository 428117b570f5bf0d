"""Paged attention: one new query per sequence over keys and values scattered in blocks (lessons 4 and 5).

`paged_attention` stands in front of every way to compute it over a cache [N, P, Hkv, D], in torch (`in_torch`) and in
Triton (`in_triton`). Kwon et al. 2023. Their kernels v1 and v2, and the variant that reads K and V once per KV head,
want a layout of their own (`in_cuda`). Everything is checked here, once.
"""

from typing import Literal

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention import in_cuda
from pagewise.paged_attention.inputs import DECODING, PagedInputs, checked_vllm_inputs, used_blocks
from pagewise.tools.checks import check_count, check_flag

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
    inputs, options = checked_vllm_inputs(
        q, k_cache, v_cache, block_tables, seq_lens, options, k_scale=k_scale, v_scale=v_scale
    )
    return _in_cuda(inputs, options, max_seq_len, check, return_lse)


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
    check_count("partition_size", partition_size)
    options = DECODING._replace(scale=scale, alibi_slopes=alibi_slopes)
    inputs, options = checked_vllm_inputs(
        q, k_cache, v_cache, block_tables, seq_lens, options, k_scale=k_scale, v_scale=v_scale
    )
    return _in_cuda(inputs, options, max_seq_len, check, return_lse, partition_size)


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
    check_count("partition_size", partition_size)
    options = DECODING._replace(scale=scale, alibi_slopes=alibi_slopes)
    inputs, options = checked_vllm_inputs(
        q, k_cache, v_cache, block_tables, seq_lens, options, k_scale=k_scale, v_scale=v_scale
    )
    heads = in_cuda.query_heads_per_thread_block(q.shape[1] // inputs.cache_sizes[2])
    return _in_cuda(inputs, options, max_seq_len, check, return_lse, partition_size, heads)


def _in_cuda(
    inputs: PagedInputs,
    options: ScoreOptions,
    max_seq_len: int | None,
    check: bool | None,
    return_lse: bool,
    partition_size: int | None = None,
    query_heads: int = 1,
) -> Output:
    """What the three have in common: v1 without a `partition_size`, grouped with several `query_heads`."""
    check_flag("return_lse", return_lse)
    if check is not None:
        check_flag("check", check)
    in_cuda.check_sizes(inputs)
    max_seq_len = _longest(inputs, max_seq_len, check)
    in_cuda.check_lengths(inputs, max_seq_len, partition_size, query_heads)
    sizes = {"max_seq_len": max_seq_len, "partition_size": partition_size, "query_heads": query_heads}
    out, lse = in_cuda.attend(inputs, options, **sizes)
    return (out, lse) if return_lse else out


def _longest(inputs: PagedInputs, max_seq_len: int | None, check: bool | None) -> int:
    """No sequence is longer: what the caller says or what is looked up, at most what a row of the tables holds."""
    (B, M), P, longest = inputs.block_tables.shape, inputs.v_cache.shape[-1], 0
    if max_seq_len is not None:
        check_count("max_seq_len", max_seq_len, minimum=0)
    if check or (check is None and not inputs.q.is_cuda):
        longest = used_blocks(inputs).longest
    elif B and max_seq_len is None:
        longest = int(inputs.seq_lens.max())
    if max_seq_len is None:
        return max(0, min(longest, M * P))
    if longest > max_seq_len:
        raise ValueError(f"max_seq_len must be at least the longest of seq_lens, {longest}, got {max_seq_len}")
    return min(max_seq_len, M * P)
