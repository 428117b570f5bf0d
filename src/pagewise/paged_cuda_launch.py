"""Launching kernels/paged_attention.cu: the custom ops behind `paged_cuda`, on checked arguments (lesson 5).

    torch.ops.pagewise.paged_attention_v1     one launch
    torch.ops.pagewise.paged_attention_v2     two: partitions, then their merge; query_heads > 1 is the grouped variant

Both return (out [B,H,D] in q's dtype, lse [B,H] float32), wait for nothing, and work under torch.compile.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

import pagewise.kernels
from pagewise.tools.cuda import CudaKernel
from pagewise.tools.cuda_limits import MAX_SHARED_BYTES
from pagewise.tools.work import counts_as

SOURCE = Path(pagewise.kernels.__file__).parent / "paged_attention.cu"
NUM_THREADS = 128
NUM_WARPS = NUM_THREADS // 32

_C_TYPES = {
    torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16",
    torch.float8_e4m3fn: "__nv_fp8_e4m3", torch.float8_e5m2: "__nv_fp8_e5m2",
}  # fmt: skip


@functools.cache
def attention_kernel(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_size: int, block_size: int, partition_size: int = 0,
    query_heads: int = 1,
) -> CudaKernel:  # fmt: skip
    """The instantiation for these types and sizes. `partition_size` 0: v1."""
    types = f"{_C_TYPES[dtype]}, {_C_TYPES[cache_dtype]}"
    sizes = f"{head_size}, {block_size}, {NUM_THREADS}, {partition_size}, {query_heads}"
    return CudaKernel(SOURCE, f"paged_attention_kernel<{types}, {sizes}>")


@functools.cache
def reduce_kernel(dtype: torch.dtype, head_size: int) -> CudaKernel:
    """The merge of v2's partitions."""
    name = f"paged_attention_reduce_kernel<{_C_TYPES[dtype]}, {head_size}, {NUM_THREADS}>"
    return CudaKernel(SOURCE, name)


def shared_bytes(tokens: int, q: Tensor, block_size: int, query_heads: int = 1) -> tuple[int, int]:
    """(static, dynamic) shared memory of a thread block that sees `tokens` tokens, padded to whole blocks.

    Static: the queries, and two numbers per warp and query. Dynamic: the scores, later the sums of half the warps.
    """
    head_size, padded = q.shape[-1], -(-tokens // block_size) * block_size
    static = query_heads * (head_size * q.element_size() + 2 * NUM_WARPS * 4)
    return static, 4 * query_heads * max(padded, NUM_WARPS // 2 * head_size)


def shared_bytes_limit(device: torch.device) -> int:
    """The shared memory that a thread block can have on `device`; on the CPU, what it can have on an H100."""
    if device.type != "cuda":
        return MAX_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def launch_v1(
    kernel: CudaKernel, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, scale: float, alibi_slopes: Tensor | None = None, v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) by this kernel, `attention_kernel`'s or a variant of it, in one pass. Arguments are not checked."""
    (B, H, _), P = q.shape, v_cache.shape[-1]
    out, lse = _outputs(q)
    if out.numel():
        dynamic = shared_bytes(max_seq_len, q, P)[1]
        inputs = _inputs(q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, max_seq_len, scale, v_scale)
        kernel[(H, B), NUM_THREADS, dynamic](out, lse, None, None, None, *inputs)
    return out, lse


@torch.library.custom_op("pagewise::paged_attention_v1", mutates_args=())
def _v1(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int,
    scale: float, alibi_slopes: Tensor | None, v_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kernel = attention_kernel(q.dtype, k_cache.dtype, q.shape[-1], v_cache.shape[-1])
    return launch_v1(kernel, q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, scale, alibi_slopes, v_scale)


@torch.library.custom_op("pagewise::paged_attention_v2", mutates_args=())
def _v2(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int,
    scale: float, alibi_slopes: Tensor | None, v_scale: float, partition_size: int, query_heads: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (B, H, D), P = q.shape, v_cache.shape[-1]
    out, lse = _outputs(q)
    if out.numel():
        num_partitions = max(1, -(-max_seq_len // partition_size))
        m, l = torch.empty(2, B, H, num_partitions, device=q.device)
        acc = torch.empty(B, H, num_partitions, D, device=q.device)
        kernel = attention_kernel(q.dtype, k_cache.dtype, D, P, partition_size, query_heads)
        dynamic = shared_bytes(partition_size, q, P, query_heads)[1]
        inputs = _inputs(q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, max_seq_len, scale, v_scale)
        kernel[(H // query_heads, B, num_partitions), NUM_THREADS, dynamic](None, None, m, l, acc, *inputs)
        reduce_kernel(q.dtype, D)[(H, B), NUM_THREADS](
            out, lse, m, l, acc, seq_lens.contiguous(), num_partitions, partition_size, max_seq_len, v_scale
        )
    return out, lse


@counts_as("pagewise::paged_attention_v1")
def _work_v1(q, k_cache, v_cache, block_tables, seq_lens, *_) -> tuple[int, int, int, int]:
    (B, H, D), P = q.shape, v_cache.shape[-1]
    tokens = int((-(-seq_lens.long() // P) * P).sum())  # blocks are read whole
    kv_bytes = 2 * tokens * H * D * k_cache.element_size()  # once per query head
    other_bytes = q.nbytes + 4 * (tokens // P + 1) * H  # the queries, the tables, the lengths
    return 4 * tokens * H * D, 5 * tokens * H, kv_bytes + other_bytes, q.nbytes + 4 * B * H


@counts_as("pagewise::paged_attention_v2")
def _work_v2(q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, scale, alibi_slopes, v_scale, size, heads):
    """As v1, keys and values once per `heads` query heads, and the partial results to memory and back."""
    matmul, other, read, written = _work_v1(q, k_cache, v_cache, block_tables, seq_lens)
    tokens, D = matmul // (4 * q.shape[1] * q.shape[2]), q.shape[2]
    kv_bytes = 2 * tokens * q.shape[1] * D * k_cache.element_size()
    partials = int((-(-seq_lens.long() // size)).sum()) * q.shape[1] * 4 * (D + 2)
    return matmul, other, read - kv_bytes + kv_bytes // heads + partials, written + partials


@_v1.register_fake
def _(q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, scale, alibi_slopes, v_scale):
    return _outputs(q)


@_v2.register_fake
def _(
    q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, scale, alibi_slopes, v_scale, partition_size, query_heads
):
    return _outputs(q)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, alibi_slopes: Tensor | None,
    max_seq_len: int, scale: float, v_scale: float,
) -> tuple:  # fmt: skip
    """The kernel's arguments from q on. Small tensors that do not lie as the kernel reads them are copied."""
    D = q.shape[-1]
    if q.stride(1) != D or q.stride(0) * q.element_size() % 16 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    return (
        q, k_cache, v_cache, block_tables, seq_lens.contiguous(), alibi_slopes, k_cache.shape[1], max_seq_len, scale,
        v_scale, q.stride(0), k_cache.stride(0), k_cache.stride(1), block_tables.stride(0),
    )  # fmt: skip
