"""Paged attention in CUDA, over a cache in vLLM's layout (lesson 5).

The inputs are checked here, and `in_cuda` launches the kernels. Kwon et al. 2023.
"""

from typing import Literal

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.paged_attention import in_cuda
from pagewise.paged_attention.inputs import DECODING, OfDecoding, PagedInputs, checked_options, used_blocks
from pagewise.tools.checks import FLOAT8, FLOATS, check_counts, check_heads, check_same, check_shape, check_tensor
from pagewise.tools.device import looks
from pagewise.tools.transforms import check_derivative, has_values

Output = Float[Tensor, "B H D"] | OfDecoding


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
    """Compute `paged_attention` with one CUDA kernel, over a cache in vLLM's layout (`to_vllm_layout`).

    The kernels take head sizes 32, 64, 80, 96, 112, 120, 128, 192 and 256, and block sizes 8, 16 and 32. q is float32,
    float16 or bfloat16. The cache has the dtype of q or a float8 dtype, which needs a head size that is a multiple of
    16. The kernels have no backward.

    Args:
        max_seq_len: the length that no sequence exceeds. The default is the longest of seq_lens; on a GPU, looking it
            up waits for the GPU once. The scores of max_seq_len tokens must fit in the shared memory of a thread block:
            about 57 600 scores on an H100, and 16 000 on a T4.
        The rest, the results and the errors are those of `paged_attention`. Unchecked, a sequence that is longer than
            max_seq_len gives NaN.
    """
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    return _attend("v1", inputs, scale, alibi_slopes, k_scale, max_seq_len, None, return_lse, check)


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
    """Compute `paged_attention_v1` with two kernels: partitions of the context in parallel, then their merge.

    The length of the context is then not limited, and a single long sequence keeps many SMs busy. `partition_size`
    counts context tokens and must be a multiple of the block size.
    """
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    return _attend("v2", inputs, scale, alibi_slopes, k_scale, max_seq_len, partition_size, return_lse, check)


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
    """Compute `paged_attention_v2`, reading K and V once for up to 8 query heads that share a KV head.

    v1 and v2 read K and V once per query head. A thread block of this kernel takes the largest divisor of H / Hkv that
    is at most 8. If that divisor is 1, as for groups of 11 or 13 heads, the kernel of v2 runs.
    """
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    return _attend("grouped", inputs, scale, alibi_slopes, k_scale, max_seq_len, partition_size, return_lse, check)


def choose_version(
    num_seqs: int, num_heads: int, max_seq_len: int, *, partition_size: int = 512
) -> Literal["v1", "v2"]:
    """Choose v1 or v2 by vLLM's rule.

        v1  if  max_seq_len ≤ 8192  and  (one partition  or  num_seqs · num_heads > 512)

    v2 costs a second launch, and its partial results go through global memory. v1 needs 4 bytes of shared memory per
    token, and leaves SMs idle when heads and sequences are few. vLLM chose 8192 for the 48 KB of a T4
    (`paged_attn.py`, until version 0.22).
    """
    check_counts(minimum=0, num_seqs=num_seqs, num_heads=num_heads, max_seq_len=max_seq_len)
    check_counts(partition_size=partition_size)
    one_pass = max_seq_len <= 8192 and (max_seq_len <= partition_size or int(num_seqs) * int(num_heads) > 512)
    return "v1" if one_pass else "v2"


def query_heads_per_thread_block(group_size: int) -> int:
    """Return the largest divisor of `group_size`, the query heads of a KV head, that is at most MAX_QUERY_HEADS."""
    return max(heads for heads in range(1, in_cuda.MAX_QUERY_HEADS + 1) if group_size % heads == 0)


def _attend(
    version: Literal["v1", "v2", "grouped"],
    inputs: PagedInputs,
    scale: float | None,
    alibi_slopes: Tensor | None,
    k_scale: float,
    max_seq_len: int | None,
    partition_size: int | None,
    return_lse: bool,
    check: bool | None,
) -> Output:
    """Check the arguments, and launch."""
    q, k_cache, v_cache, *_, v_scale = inputs
    _check_cache(q, k_cache, v_cache)
    remedy = 'paged_attention(backend="torch")'
    check_derivative(f"paged_attention_{version}", q, k_cache, v_cache, alibi_slopes, remedy=remedy)
    options = DECODING._replace(scale=scale, alibi_slopes=alibi_slopes)
    options = checked_options(inputs, options, k_scale, len(q))
    (_, Hkv, _, P), most = v_cache.shape, in_cuda.MAX_PARTITIONS
    max_seq_len = _longest(inputs, max_seq_len, check)
    if partition_size is not None:
        check_counts(partition_size=partition_size)
        if partition_size % P:
            raise ValueError(f"partition_size must be a multiple of the block size {P}, got {partition_size}")
        if max_seq_len > partition_size * most:
            partitions = f"{most} partitions of {partition_size} tokens"
            raise ValueError(f"max_seq_len = {max_seq_len} is more than {partitions}: choose a larger partition_size")
    query_heads = query_heads_per_thread_block(q.shape[1] // Hkv) if version == "grouped" else 1
    numbers = (float(v_scale), options.scale, alibi_slopes, max_seq_len, partition_size, query_heads)
    out, lse = in_cuda.attend(*inputs[:5], *numbers)
    return (out, lse) if return_lse else out


def _longest(inputs: PagedInputs, max_seq_len: int | None, check: bool | None) -> int:
    """Return a length that no sequence exceeds: `max_seq_len` or the longest, at most the capacity of a table row."""
    capacity = inputs.block_tables.shape[1] * inputs.v_cache.shape[-1]
    if max_seq_len is not None:
        check_counts(minimum=0, max_seq_len=max_seq_len)
    if looks(check, inputs.block_tables, inputs.seq_lens):
        longest = used_blocks(inputs).longest
        if max_seq_len is not None and longest > max_seq_len:
            raise ValueError(f"max_seq_len must be at least the longest of seq_lens, {longest}, got {max_seq_len}")
        max_seq_len = longest if max_seq_len is None else max_seq_len
    elif max_seq_len is None and len(inputs.seq_lens) and has_values(inputs.seq_lens):
        max_seq_len = max(0, int(inputs.seq_lens.max()))
    return capacity if max_seq_len is None else min(max_seq_len, capacity)


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless the kernels are built for queries and a cache of these shapes and dtypes."""
    check_tensor("q", q, "B H D", dtypes=FLOATS)
    check_tensor("k_cache", k_cache, "N Hkv D/x P x", dtypes=(q.dtype, *FLOAT8))
    check_tensor("v_cache", v_cache, "N Hkv D P", dtypes=(q.dtype, *FLOAT8))
    check_same("dtype", k_cache=k_cache, v_cache=v_cache)
    (B, H, D), (N, Hkv, _, P), x = q.shape, v_cache.shape, 16 // k_cache.dtype.itemsize
    remedy = "paged_attention takes any size, with a cache [N, P, Hkv, D]"
    if D % x:
        needed = f"a multiple of {x} (16 bytes) for a cache of {k_cache.dtype}"
        raise ValueError(f"q must have a head size D that is {needed}, got {D}: {remedy}")
    check_shape("k_cache", k_cache, (N, Hkv, D // x, P, x), "N Hkv D/x P x")
    check_shape("v_cache", v_cache, (N, Hkv, D, P), "N Hkv D P")
    check_heads(H, Hkv)
    if D not in in_cuda.HEAD_SIZES:
        raise ValueError(f"q must have a head size D of {str(in_cuda.HEAD_SIZES)[1:-1]}, got {D}: {remedy}")
    if P not in in_cuda.BLOCK_SIZES:
        raise ValueError(f"v_cache must have a block size P of 8, 16, 32, got {P}: {remedy}")
    if B > in_cuda.MAX_NUM_SEQS:
        raise ValueError(f"q must have at most {in_cuda.MAX_NUM_SEQS} sequences, got {B}: split the batch")
