"""The CUDA kernels of paged attention: instantiations, shared memory, launches and the custom op (lesson 5).

`pagewise.paged_attention.vllm` has the three public functions, and checks the inputs. The custom op never waits for the
GPU.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

import pagewise.kernels
from cudascope import CudaKernel
from cudascope.arguments.launch_shape import MAX_SHARED_BYTES
from pagewise.paged_attention.inputs import OfDecoding
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

C_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float8_e4m3fn: "__nv_fp8_e4m3",
    torch.float8_e5m2: "__nv_fp8_e5m2",
}


@functools.cache
def cuda_kernel(source: Path, name: str, *arguments: torch.dtype | int) -> CudaKernel:
    """Return the kernel `name` of a source in CUDA C++ for these template arguments."""
    in_c = ", ".join(C_TYPES.get(each, str(each)) for each in arguments)
    return CudaKernel(source, f"{name}<{in_c}>")


def static_bytes(q: Tensor, query_heads: int = 1) -> int:
    """Return the static shared memory of a thread block: its queries, and two numbers for each warp."""
    return query_heads * q.shape[-1] * q.element_size() + 2 * NUM_WARPS * 4


def shared_bytes_limit(device: torch.device) -> int:
    """Return the shared memory that a thread block can have on `device`. The CPU runner has the limit of an H100."""
    return architecture(device).shared_bytes if device.type == "cuda" else MAX_SHARED_BYTES


def _dynamic_bytes(name: str, tokens: int, q: Tensor, block_size: int, query_heads: int = 1) -> int:
    """Return the dynamic shared memory of a thread block that sees `tokens` tokens, if the device of q has as much.

    It holds the scores of whole blocks. v1 and v2 use it again for the sums of half of the warps. `tokens` is the
    argument `name` of a public function.
    """
    sums = NUM_WARPS // 2 * q.shape[-1] if query_heads == 1 else 0
    static, dynamic = static_bytes(q, query_heads), 4 * query_heads * max(cdiv(tokens, block_size) * block_size, sums)
    limit = shared_bytes_limit(q.device)
    if static + dynamic > limit:
        most = (limit - static) // (4 * query_heads) // block_size * block_size
        remedy = "use paged_attention_v2" if name == "max_seq_len" else "choose a smaller one"
        raise ValueError(
            f"{name} = {tokens} needs {static + dynamic} bytes of shared memory for its scores, but a thread block on "
            f"{q.device} has at most {limit}, enough for {most} tokens: {remedy}"
        )
    return dynamic


def is_in_vecs(x: Tensor) -> bool:
    """Return whether every row is contiguous, and begins and ends at a multiple of 16 bytes."""
    distances = (x.shape[-1], *x.stride()[:-1])
    return x.stride(-1) == 1 and not (x.data_ptr() % 16 or any(n * x.element_size() % 16 for n in distances))


def in_vecs(x: Tensor) -> Tensor:
    """Return x if `is_in_vecs`, else a copy."""
    return x if is_in_vecs(x) else x.clone(memory_format=torch.contiguous_format)


def _check_layout(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError unless strides and addresses are those that the kernels can read. Traced tensors have none."""
    if q.shape[-1] > 1 and q.stride(-1) != 1:
        raise ValueError(f"q must be contiguous in its last dimension, got strides {q.stride()}: pass q.contiguous()")
    if not k_cache.numel():
        return
    (N, Hkv, _, P, x), strides = k_cache.shape, []
    for name, cache, inner in (("k_cache", k_cache, (P * x, x, 1)), ("v_cache", v_cache, (P, 1))):
        if cache.stride()[2:] != inner:
            got = f"shape {list(cache.shape)} and strides {cache.stride()}"
            raise ValueError(f"{name} must be contiguous within a block's KV head, got {got}")
        strides.append([stride for stride, size in zip(cache.stride()[:2], (N, Hkv), strict=True) if size > 1])
        if cache.data_ptr() % 16 or any(stride * cache.element_size() % 16 for stride in strides[-1]):
            raise ValueError(f"{name} must begin, block by block and head by head, at a multiple of 16 bytes")
    if strides[0] != strides[1]:
        raise ValueError(f"v_cache must have k_cache's strides of blocks and KV heads, {strides[0]}, got {strides[1]}")


def _outputs(q: Tensor) -> OfDecoding:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@custom_op("paged_attention_cuda", fake=lambda q, *_: _outputs(q))
def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    v_scale: float,
    scale: float,
    alibi_slopes: Tensor | None,
    max_seq_len: int,
    partition_size: int | None,
    query_heads: int,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over a cache in vLLM's layout.

    v1 computes it without a `partition_size`, v2 with one, and the grouped kernel with several `query_heads`.
    """
    _check_layout(q, k_cache, v_cache)
    (B, H, D), (_, Hkv, _, P), (out, lse) = q.shape, v_cache.shape, _outputs(q)
    if not out.numel():
        return out, lse
    # Small tensors that the kernels could not read are copied.
    q = in_vecs(q) if q.stride(1) == D else q.clone(memory_format=torch.contiguous_format)
    block_tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    seq_lens = seq_lens.contiguous()
    strides = (q.stride(0), *k_cache.stride()[:2], block_tables.stride(0))
    arguments = (q, k_cache, v_cache, block_tables, seq_lens, slopes, Hkv, max_seq_len, scale, *strides)
    sizes = (q.dtype, k_cache.dtype, D, P)
    if partition_size is None:
        dynamic = _dynamic_bytes("max_seq_len", max_seq_len, q, P)
        kernel = cuda_kernel(SOURCE, "paged_attention_v1_kernel", *sizes)
        kernel[(H, B), NUM_THREADS, dynamic](out, lse, *arguments, v_scale)
        return out, lse
    dynamic = _dynamic_bytes("partition_size", partition_size, q, P, query_heads)
    num_partitions = max(1, cdiv(max_seq_len, partition_size))
    m, l = lse.new_empty(2, B, H, num_partitions)
    acc = lse.new_empty(B, H, num_partitions, D)
    if query_heads == 1:
        kernel = cuda_kernel(SOURCE, "paged_attention_v2_kernel", *sizes)
    else:
        kernel = cuda_kernel(GROUPED_SOURCE, "paged_attention_grouped_kernel", *sizes, query_heads)
    grid = (H // query_heads, B, num_partitions)
    kernel[grid, NUM_THREADS, dynamic](m, l, acc, *arguments, partition_size // P)
    lengths = (seq_lens, num_partitions, partition_size, max_seq_len)
    merge = cuda_kernel(SOURCE, "paged_attention_merge_kernel", q.dtype, D)
    merge[(H, B), NUM_THREADS](out, lse, m, l, acc, *lengths, v_scale)
    return out, lse


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
