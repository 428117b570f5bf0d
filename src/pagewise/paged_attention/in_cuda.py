"""Paged attention in CUDA: vLLM's v1 and v2 and the variant that reads K and V once per KV head (lesson 5).

    v1       a thread block per head and sequence; its scores fill shared memory, which limits the context
    v2       a thread block per head, sequence and partition of 512 context tokens; a second kernel merges
    grouped  v2 with the query heads of a KV head in one thread block, so that keys and values are read once for all

The kernels are in kernels/paged_attention.cu. Here: which instantiation, how much shared memory, the launches, and the
custom ops around them, which wait for nothing and work under torch.compile. The doors are in `pagewise.paged_attention`
and check everything, with the `check_…` functions below for what these kernels in particular cannot take.
"""

import functools
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import pagewise.kernels
from pagewise.cuda import CudaKernel
from pagewise.cuda.limits import MAX_SHARED_BYTES
from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.tools.sizes import cdiv
from pagewise.tools.work import counts_as

SOURCE = Path(pagewise.kernels.__file__).parent / "paged_attention.cu"
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32)
NUM_THREADS = 128
NUM_WARPS = NUM_THREADS // 32
MAX_QUERY_HEADS = 8  # in one thread block of the grouped variant: what the registers hold
MAX_NUM_SEQS = MAX_PARTITIONS = 65535  # a CUDA grid's y and z

OutAndLse = tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]

_C_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float8_e4m3fn: "__nv_fp8_e4m3",
    torch.float8_e5m2: "__nv_fp8_e5m2",
}


def v1_kernel(dtype: torch.dtype, cache_dtype: torch.dtype, head_size: int, block_size: int) -> CudaKernel:
    """A thread block sees a whole sequence."""
    return _kernel("paged_attention_v1_kernel", dtype, cache_dtype, head_size, block_size, NUM_THREADS)


def v2_kernel(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_size: int,
    block_size: int,
    partition_size: int,
    query_heads: int = 1,
) -> CudaKernel:
    """A thread block sees a partition of a sequence, for `query_heads` heads at once."""
    sizes = (head_size, block_size, NUM_THREADS, partition_size, query_heads)
    return _kernel("paged_attention_v2_kernel", dtype, cache_dtype, *sizes)


def merge_kernel(dtype: torch.dtype, head_size: int) -> CudaKernel:
    """The merge of v2's partitions."""
    return _kernel("paged_attention_merge_kernel", dtype, head_size, NUM_THREADS)


@functools.cache
def _kernel(template: str, *arguments: torch.dtype | int) -> CudaKernel:
    return CudaKernel(SOURCE, f"{template}<{', '.join(_C_TYPES.get(each, str(each)) for each in arguments)}>")


# ---------------------------------------------------------------------------------------------- what fits


def query_heads_per_thread_block(group_size: int) -> int:
    """The largest divisor of `group_size`, the query heads of a KV head, that is at most MAX_QUERY_HEADS."""
    return max(heads for heads in range(1, min(MAX_QUERY_HEADS, max(1, group_size)) + 1) if group_size % heads == 0)


def shared_bytes(tokens: int, q: Tensor, block_size: int, query_heads: int = 1) -> tuple[int, int]:
    """(static, dynamic) shared memory of a thread block that sees `tokens` tokens, padded to whole blocks.

    Static: the queries, and two numbers per warp and query. Dynamic: the scores, later the sums of half the warps.
    """
    head_size, padded = q.shape[-1], cdiv(tokens, block_size) * block_size
    static = query_heads * (head_size * q.element_size() + 2 * NUM_WARPS * 4)
    return static, 4 * query_heads * max(padded, NUM_WARPS // 2 * head_size)


def shared_bytes_limit(device: torch.device) -> int:
    """The shared memory that a thread block can have on `device`; on the CPU, what it can have on an H100."""
    if device.type != "cuda":
        return MAX_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def check_sizes(inputs: PagedInputs) -> None:
    """There must be a kernel for the head and block size, and room in its grid for the sequences."""
    (B, _, D), P = inputs.q.shape, inputs.v_cache.shape[-1]
    for name, size, sizes in (
        ("q must have a head size D", D, HEAD_SIZES),
        ("v_cache: a block size P", P, BLOCK_SIZES),
    ):
        if size not in sizes:
            raise ValueError(
                f"{name} of {', '.join(map(str, sizes))}, got {size}: paged_attention takes any, with a cache "
                f"[N, P, Hkv, D]"
            )
    if B > MAX_NUM_SEQS:
        raise ValueError(f"q must have at most {MAX_NUM_SEQS} sequences, got {B}: split the batch")


def check_lengths(inputs: PagedInputs, max_seq_len: int, partition_size: int | None, query_heads: int) -> None:
    """Shared memory must hold a float32 score per token; partitions must be whole blocks and fit the grid."""
    P, device = inputs.v_cache.shape[-1], inputs.q.device
    name, tokens, remedy = "max_seq_len", max_seq_len, "use paged_attention_v2"
    if partition_size is not None:
        name, tokens, remedy = "partition_size", partition_size, "take a smaller one"
        if partition_size % P:
            raise ValueError(f"partition_size must be a multiple of the block size {P}, got {partition_size}")
        if max_seq_len > partition_size * MAX_PARTITIONS:
            raise ValueError(
                f"max_seq_len = {max_seq_len} is more than {MAX_PARTITIONS} partitions of {partition_size} tokens: "
                f"take a larger partition_size"
            )
    limit, (static, dynamic) = shared_bytes_limit(device), shared_bytes(tokens, inputs.q, P, query_heads)
    if static + dynamic > limit:
        most = (limit - static) // (4 * query_heads) // P * P
        raise ValueError(
            f"{name} = {tokens} needs {static + dynamic} bytes of shared memory for its scores, but a thread block on "
            f"{device} has at most {limit}, enough for {most} tokens: {remedy}"
        )


# ---------------------------------------------------------------------------------------------- launching


def attend(
    inputs: PagedInputs,
    options: ScoreOptions,
    *,
    max_seq_len: int,
    partition_size: int | None = None,
    query_heads: int = 1,
) -> OutAndLse:
    """(out, lse) over a cache in vLLM's layout: v1 without a `partition_size`, else v2, grouped if query_heads > 1."""
    *tensors, v_scale = inputs
    flat = (*tensors, max_seq_len, options.scale, options.alibi_slopes, v_scale)
    if partition_size is None:
        return torch.ops.pagewise.paged_attention_v1(*flat)
    return torch.ops.pagewise.paged_attention_v2(*flat, partition_size, query_heads)


def launch_v1(kernel: CudaKernel, inputs: PagedInputs, options: ScoreOptions, max_seq_len: int) -> OutAndLse:
    """(out, lse) in one launch, of `v1_kernel` or a variant of it."""
    (B, H, _), P = inputs.q.shape, inputs.v_cache.shape[-1]
    out, lse = _outputs(inputs.q)
    if out.numel():
        dynamic = shared_bytes(max_seq_len, inputs.q, P)[1]
        kernel[(H, B), NUM_THREADS, dynamic](out, lse, *_arguments(inputs, options, max_seq_len), inputs.v_scale)
    return out, lse


def launch_v2(
    inputs: PagedInputs, options: ScoreOptions, max_seq_len: int, partition_size: int, query_heads: int
) -> OutAndLse:
    """(out, lse) in two launches: partitions side by side, then their merge."""
    q, (B, H, D), P = inputs.q, inputs.q.shape, inputs.v_cache.shape[-1]
    out, lse = _outputs(q)
    if out.numel():
        num_partitions = max(1, cdiv(max_seq_len, partition_size))
        m, l = lse.new_empty(2, B, H, num_partitions)
        acc = lse.new_empty(B, H, num_partitions, D)
        kernel = v2_kernel(q.dtype, inputs.k_cache.dtype, D, P, partition_size, query_heads)
        grid, dynamic = (H // query_heads, B, num_partitions), shared_bytes(partition_size, q, P, query_heads)[1]
        kernel[grid, NUM_THREADS, dynamic](m, l, acc, *_arguments(inputs, options, max_seq_len))
        lengths = (inputs.seq_lens.contiguous(), num_partitions, partition_size, max_seq_len)
        merge_kernel(q.dtype, D)[(H, B), NUM_THREADS](out, lse, m, l, acc, *lengths, inputs.v_scale)
    return out, lse


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _arguments(inputs: PagedInputs, options: ScoreOptions, max_seq_len: int) -> tuple:
    """What both kernels take, from q on. Small tensors that do not lie as the kernels read them are copied."""
    q, k_cache, v_cache, block_tables, seq_lens, _ = inputs
    D, slopes = q.shape[-1], options.alibi_slopes
    if q.stride(1) != D or q.stride(0) * q.element_size() % 16 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    slopes = None if slopes is None else slopes.contiguous()
    numbers = (v_cache.shape[1], max_seq_len, options.scale_for(D))
    strides = (q.stride(0), *k_cache.stride()[:2], block_tables.stride(0))
    return q, k_cache, v_cache, block_tables, seq_lens.contiguous(), slopes, *numbers, *strides


# ---------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("pagewise::paged_attention_v1", mutates_args=())
def _v1(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    alibi_slopes: Tensor | None,
    v_scale: float,
) -> tuple[Tensor, Tensor]:
    kernel = v1_kernel(q.dtype, k_cache.dtype, q.shape[-1], v_cache.shape[-1])
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    return launch_v1(kernel, inputs, ScoreOptions(scale, causal=True, alibi_slopes=alibi_slopes), max_seq_len)


@torch.library.custom_op("pagewise::paged_attention_v2", mutates_args=())
def _v2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    alibi_slopes: Tensor | None,
    v_scale: float,
    partition_size: int,
    query_heads: int,
) -> tuple[Tensor, Tensor]:
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    options = ScoreOptions(scale, causal=True, alibi_slopes=alibi_slopes)
    return launch_v2(inputs, options, max_seq_len, partition_size, query_heads)


@_v1.register_fake
@_v2.register_fake
def _(q, *_):
    return _outputs(q)


@counts_as("pagewise::paged_attention_v1")
def _work_v1(q, k_cache, v_cache, block_tables, seq_lens, *_) -> tuple[int, int, int, int]:
    (B, H, D), P = q.shape, v_cache.shape[-1]
    tokens = sum(cdiv(length, P) for length in seq_lens.tolist()) * P  # blocks are read whole
    kv_bytes = 2 * tokens * H * D * k_cache.element_size()  # once per query head
    other_bytes = q.nbytes + 4 * (tokens // P + 1) * H  # the queries, the tables, the lengths
    return 4 * tokens * H * D, 5 * tokens * H, kv_bytes + other_bytes, q.nbytes + 4 * B * H


@counts_as("pagewise::paged_attention_v2")
def _work_v2(q, k_cache, v_cache, block_tables, seq_lens, *options) -> tuple[int, int, int, int]:
    """As v1, keys and values once per `query_heads`, and the partial results to memory and back."""
    (*_, partition_size, query_heads), (_, H, D) = options, q.shape
    matmul, other, read, written = _work_v1(q, k_cache, v_cache, block_tables, seq_lens)
    kv_bytes = matmul // 2 * k_cache.element_size()  # of v1: two operations per element of K and of V
    partials = sum(cdiv(length, partition_size) for length in seq_lens.tolist()) * H * 4 * (D + 2)
    return matmul, other, read - kv_bytes + kv_bytes // query_heads + partials, written + partials
