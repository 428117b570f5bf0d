"""The CUDA kernels of paged attention: instantiations, shared memory, launches and custom ops (lesson 5).

    v1       one thread block per head and sequence; its scores fill shared memory, which limits the context
    v2       one thread block per head, sequence and partition of 512 context tokens; a second kernel merges
    grouped  v2 with the query heads of a KV head in one thread block, which reads keys and values once for all of them

The kernels are in kernels/paged_attention.cu and kernels/paged_attention_grouped.cu. The public functions are in
`pagewise.paged_attention.vllm`, which checks the inputs. The custom op never waits for the GPU.
"""

import functools
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import pagewise.kernels
from cudascope import CudaKernel
from cudascope.arguments.launch_shape import MAX_SHARED_BYTES
from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.tools.architecture import architecture
from pagewise.tools.ops import custom_op
from pagewise.tools.sizes import cdiv
from pagewise.tools.work import counts_as

SOURCE = Path(pagewise.kernels.__file__).parent / "paged_attention.cu"
GROUPED_SOURCE = SOURCE.with_name("paged_attention_grouped.cu")
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32)
NUM_THREADS = 128
NUM_WARPS = NUM_THREADS // 32
MAX_QUERY_HEADS = 8  # heads in one thread block of the grouped kernel, limited by its registers
MAX_NUM_SEQS = MAX_PARTITIONS = 65535  # limits of a CUDA grid in y and z

OutAndLse = tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]

_C_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float8_e4m3fn: "__nv_fp8_e4m3",
    torch.float8_e5m2: "__nv_fp8_e5m2",
}


def attention_kernel(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_size: int, block_size: int, *parts: int
) -> CudaKernel:
    """Return v1; with a partition size in `parts` v2; and with a number of query heads after it the grouped kernel."""
    name = ("v1", "v2", "grouped")[len(parts)]
    return _kernel(name, dtype, cache_dtype, head_size, block_size, NUM_THREADS, *parts)


def merge_kernel(dtype: torch.dtype, head_size: int) -> CudaKernel:
    """Return the kernel that merges the partitions of v2 and of the grouped kernel."""
    return _kernel("merge", dtype, head_size, NUM_THREADS)


@functools.cache
def _kernel(name: str, *arguments: torch.dtype | int) -> CudaKernel:
    in_c = ", ".join(_C_TYPES.get(each, str(each)) for each in arguments)
    return CudaKernel(GROUPED_SOURCE if name == "grouped" else SOURCE, f"paged_attention_{name}_kernel<{in_c}>")


# ---------------------------------------------------------------------------------------------- shared memory


def shared_bytes(tokens: int, q: Tensor, block_size: int, query_heads: int = 1) -> tuple[int, int]:
    """Return the (static, dynamic) shared memory of a thread block that sees `tokens` tokens, padded to whole blocks.

    Static memory holds the queries and two numbers per warp. Dynamic memory holds the scores. v1 and v2 use it
    again for the sums of half of the warps.
    """
    head_size, padded = q.shape[-1], cdiv(tokens, block_size) * block_size
    static = query_heads * head_size * q.element_size() + 2 * NUM_WARPS * 4
    sums = NUM_WARPS // 2 * head_size if query_heads == 1 else 0
    return static, 4 * query_heads * max(padded, sums)


def shared_bytes_limit(device: torch.device) -> int:
    """Return the shared memory that a thread block can have on `device`. The CPU runner has the limit of an H100."""
    return architecture(device).shared_bytes if device.type == "cuda" else MAX_SHARED_BYTES


def _dynamic_bytes(name: str, tokens: int, q: Tensor, block_size: int, query_heads: int = 1) -> int:
    """Return the dynamic part of `shared_bytes`. `tokens` is the value of the argument `name`.

    Raises:
        ValueError: a thread block cannot have that much shared memory on the device of q.
    """
    static, dynamic = shared_bytes(tokens, q, block_size, query_heads)
    limit = shared_bytes_limit(q.device)
    if static + dynamic > limit:
        most = (limit - static) // (4 * query_heads) // block_size * block_size
        remedy = "use paged_attention_v2" if name == "max_seq_len" else "choose a smaller one"
        raise ValueError(
            f"{name} = {tokens} needs {static + dynamic} bytes of shared memory for its scores, but a thread block on "
            f"{q.device} has at most {limit}, enough for {most} tokens: {remedy}"
        )
    return dynamic


# ---------------------------------------------------------------------------------------------- launches


def attend(
    inputs: PagedInputs,
    options: ScoreOptions,
    *,
    max_seq_len: int,
    partition_size: int | None = None,
    query_heads: int = 1,
) -> OutAndLse:
    """Return (out, lse) over a cache in vLLM's layout.

    v1 computes it without a `partition_size`, v2 with one, and the grouped kernel with several `query_heads`.
    """
    *tensors, v_scale = inputs
    numbers = (max_seq_len, options.scale_for(inputs.q.shape[-1]), options.alibi_slopes, v_scale)
    return _paged_attention(*tensors, *numbers, partition_size, query_heads)


def check_layout(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError unless strides and addresses are those that the kernels can read. Traced tensors have none."""
    if q.shape[-1] > 1 and q.stride(-1) != 1:
        raise ValueError(f"q must be contiguous in its last dimension, got strides {q.stride()}: pass q.contiguous()")
    N, Hkv, _, P, x = k_cache.shape
    if not k_cache.numel():
        return
    for name, cache, inner in (("k_cache", k_cache, (P * x, x, 1)), ("v_cache", v_cache, (P, 1))):
        if cache.stride()[2:] != inner:
            got = f"shape {list(cache.shape)} and strides {cache.stride()}"
            raise ValueError(f"{name} must be contiguous within a block's KV head, got {got}")
        outer = [stride for stride, size in zip(cache.stride()[:2], (N, Hkv), strict=True) if size > 1]
        if cache.data_ptr() % 16 or any(stride * cache.element_size() % 16 for stride in outer):
            raise ValueError(f"{name} must begin, block by block and head by head, at a multiple of 16 bytes")
        if any(a != b for a, b, size in zip(cache.stride(), k_cache.stride(), (N, Hkv), strict=False) if size > 1):
            strides = f"{k_cache.stride()[:2]}, got {cache.stride()[:2]}"
            raise ValueError(f"v_cache must have k_cache's strides of blocks and KV heads, {strides}")


def _arguments(
    inputs: tuple[Tensor, ...], max_seq_len: int, scale: float, alibi_slopes: Tensor | None
) -> tuple[Tensor | float | None, ...]:
    """Return the arguments that v1, v2 and the grouped kernel have in common, in their order.

    Small tensors whose layout the kernels cannot read are copied.
    """
    q, k_cache, v_cache, block_tables, seq_lens = inputs
    check_layout(q, k_cache, v_cache)
    if q.stride(1) != q.shape[2] or q.stride(0) * q.element_size() % 16 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    tensors = (q, k_cache, v_cache, block_tables, seq_lens.contiguous(), slopes)
    strides = (q.stride(0), *k_cache.stride()[:2], block_tables.stride(0))
    return *tensors, v_cache.shape[1], max_seq_len, scale, *strides


def launch_v1(kernel: CudaKernel, inputs: PagedInputs, options: ScoreOptions, max_seq_len: int) -> OutAndLse:
    """Return (out, lse) of one launch of `kernel`: v1, or a variant of its source that a lesson made."""
    q, v_cache, (out, lse) = inputs.q, inputs.v_cache, _outputs(inputs.q)
    arguments = _arguments(inputs[:5], max_seq_len, options.scale_for(q.shape[-1]), options.alibi_slopes)
    if out.numel():
        dynamic = _dynamic_bytes("max_seq_len", max_seq_len, q, v_cache.shape[-1])
        kernel[(q.shape[1], q.shape[0]), NUM_THREADS, dynamic](out, lse, *arguments, inputs.v_scale)
    return out, lse


def _in_partitions(
    inputs: PagedInputs, options: ScoreOptions, max_seq_len: int, partition_size: int, query_heads: int
) -> OutAndLse:
    """Return (out, lse) of two launches: all partitions in parallel, then their merge."""
    q, k_cache, v_cache, _, seq_lens, v_scale = inputs
    (B, H, D), P, num_partitions = q.shape, v_cache.shape[-1], max(1, cdiv(max_seq_len, partition_size))
    arguments = _arguments(inputs[:5], max_seq_len, options.scale, options.alibi_slopes)
    out, lse = _outputs(q)
    if out.numel():
        dynamic = _dynamic_bytes("partition_size", partition_size, q, P, query_heads)
        m, l = lse.new_empty(2, B, H, num_partitions)
        acc = lse.new_empty(B, H, num_partitions, D)
        parts = (partition_size,) if query_heads == 1 else (partition_size, query_heads)
        kernel = attention_kernel(q.dtype, k_cache.dtype, D, P, *parts)
        kernel[(H // query_heads, B, num_partitions), NUM_THREADS, dynamic](m, l, acc, *arguments)
        lengths = (seq_lens.contiguous(), num_partitions, partition_size, max_seq_len)
        merge_kernel(q.dtype, D)[(H, B), NUM_THREADS](out, lse, m, l, acc, *lengths, v_scale)
    return out, lse


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


# ---------------------------------------------------------------------------------------------- custom op


@custom_op("paged_attention_cuda", fake=lambda q, *_: _outputs(q))
def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    alibi_slopes: Tensor | None,
    v_scale: float,
    partition_size: int | None,
    query_heads: int,
) -> tuple[Tensor, Tensor]:
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    options = ScoreOptions(scale, True, alibi_slopes=alibi_slopes)
    if partition_size is not None:
        return _in_partitions(inputs, options, max_seq_len, partition_size, query_heads)
    kernel = attention_kernel(q.dtype, k_cache.dtype, q.shape[-1], v_cache.shape[-1])
    return launch_v1(kernel, inputs, options, max_seq_len)


@counts_as("pagewise::paged_attention_cuda")
def _work(q, k_cache, v_cache, block_tables, seq_lens, *options) -> tuple[int, int, int, int]:
    """Whole blocks are read, once per `query_heads` heads. Partial results are written, and read once."""
    (*_, partition_size, query_heads), (B, H, D), P, lengths = options, q.shape, v_cache.shape[-1], seq_lens.tolist()
    tokens = sum(cdiv(length, P) for length in lengths) * P
    partitions = sum(cdiv(length, partition_size) for length in lengths) if partition_size else 0
    partials = partitions * H * 4 * (D + 2)
    kv_bytes = 2 * tokens * H * D * k_cache.element_size() // query_heads
    other_bytes = q.nbytes + 4 * (tokens // P + 1) * H  # the queries, the tables, the lengths
    return 4 * tokens * H * D, 5 * tokens * H, kv_bytes + other_bytes + partials, q.nbytes + 4 * B * H + partials
