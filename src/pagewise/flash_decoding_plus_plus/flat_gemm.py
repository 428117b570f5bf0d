"""Flat GEMM: the matrix products of decoding, whose x has few rows (lesson 8).

    out = x wᵀ         out[m, n] = Σ_k x[m, k] · w[n, k]        summed in float32, rounded to x's dtype at the end

Every weight is used M times only, so that the time is that of reading w, if enough of it is on its way at any time.

    gemv       on CUDA cores, a multiplication per row and weight: M ≤ 2, and float32
    flat_gemm  on tensor cores, M padded to a multiple of 8, weights through a ring of asynchronous copies

The kernels are in kernels/flat_gemm.cu. Here: the doors, which instantiation, how long the ring is, the launches, and
custom ops around them, which wait for nothing and work under torch.compile. FlashDecoding++, Hong et al. 2023,
section 4, whose double buffer is a ring of two.
"""

import functools
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import pagewise.kernels
from pagewise.cuda import CudaKernel
from pagewise.cuda.limits import MAX_SHARED_BYTES
from pagewise.paged_attention.in_cuda import shared_bytes_limit
from pagewise.tools.checks import FLOATS, check_same, check_shape, check_tensor
from pagewise.tools.device import num_sms
from pagewise.tools.sizes import cdiv
from pagewise.tools.work import counts_as

SOURCE = Path(pagewise.kernels.__file__).parent / "flat_gemm.cu"
MAX_ROWS = 64  # M
GEMV_ROWS = 2  # M up to which CUDA cores are chosen
NUM_WARPS = 4  # of a thread block, which share K
NUM_THREADS = 32 * NUM_WARPS
COLUMNS = 4  # of out, that a thread block on CUDA cores owns
ROWS_AT_ONCE = (1, 2, 4, 8)  # of x, on CUDA cores
B_N = 32  # columns of out that a thread block on tensor cores owns: N / B_N = 128 for N = 4096, on 108 or 132 SMs
TILE_M = 8  # what M is padded to
TILE_K = 64  # of K, in one stage of a warp's ring
IN_FLIGHT_BYTES = 32 * 1024  # of w, that an SM of an H200 must wait for at any time to get its share of memory
RESERVED_BYTES = 1024  # of an SM's shared memory, for each thread block: an SM has as much more than a thread block may

_C_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def gemv(x: Float[Tensor, "K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "N"]:
    """w @ x, on CUDA cores: what a linear layer without bias makes of one token.

    float32, float16 or bfloat16, summed in float32; any N and K. The rows of `w` may lie apart, its columns may not.
    Fast where K, the distance of rows and the address are multiples of 16 bytes. Without gradients. On CPU tensors the
    kernel runs in the CPU runner.

    Raises:
        TypeError, ValueError: an argument is no tensor of this shape and dtype, dtypes or devices differ, or columns of
            `w` lie apart.
    """
    check_tensor("x", x, "K", dtypes=FLOATS)
    _check_weights(x, w)
    return torch.ops.pagewise.gemv(x, w)


def flat_gemm(x: Float[Tensor, "M K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "M N"]:
    """x @ wᵀ for M ≤ 64 rows: what a linear layer without bias makes of a batch that decodes.

    float16 and bfloat16 by tensor cores, which take 8 rows at a time; M ≤ 2 and float32 by CUDA cores. Summed in
    float32, in an order that K alone decides for either of them; any N and K. The rest as in `gemv`.

    Raises:
        TypeError, ValueError: as `gemv` does; or M > 64, for which torch's matmul is right.
    """
    check_tensor("x", x, "M K", dtypes=FLOATS)
    if len(x) > MAX_ROWS:
        raise ValueError(f"x must have at most {MAX_ROWS} rows, got {len(x)}: use x @ w.T")
    _check_weights(x, w)
    return torch.ops.pagewise.flat_gemm(x, w)


def _check_weights(x: Tensor, w: Tensor) -> None:
    """w must be [N, K] for x [..., K], of its dtype and on its device, with rows that are whole."""
    check_tensor("w", w, "N K", dtypes=FLOATS)
    check_same("dtype", x=x, w=w)
    check_same("device", x=x, w=w)
    N, K = len(w), x.shape[-1]
    check_shape("w", w, (N, K), "N K")
    if K > 1 and w.stride(1) != 1:
        raise ValueError(
            f"w must have columns that lie side by side, got strides {w.stride()}: keep w.contiguous(), "
            f"a copy at each product would cost more than the product"
        )


# ---------------------------------------------------------------------------------------------- launching


def on_cuda_cores(x: Float[Tensor, "M K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "M N"]:
    """x @ wᵀ for any M, up to 8 rows at a time."""
    (M, K), N = x.shape, len(w)
    out = _output(x, w)
    if out.numel():
        x, vec = _in_vecs(x, w)
        kernel = gemv_kernel(x.dtype, rows_at_once(M), vec)
        kernel[cdiv(N, COLUMNS), NUM_THREADS](out, x, w, M, N, K, x.stride(0), w.stride(0))
    return out


def on_tensor_cores(
    x: Float[Tensor, "M K"], w: Float[Tensor, "N K"], *, num_stages: int | None = None
) -> Float[Tensor, "M N"]:
    """x @ wᵀ for M ≤ 64 rows of float16 or bfloat16, through rings of `num_stages` stages (default: `stages_for`)."""
    (M, K), N, limit = x.shape, len(w), shared_bytes_limit(x.device)
    if 2 * stage_bytes(M) > limit:  # 99 KiB, from M = 57 on: half of the rows at a time
        return torch.cat([on_tensor_cores(rows, w, num_stages=num_stages) for rows in x.chunk(2)])
    out = _output(x, w)
    if out.numel():
        # on a CPU an H200's number of SMs, as its other limits are
        num_stages = num_stages or stages_for(M, N, num_sms(x.device, on_cpu=132), limit)
        x, vec = _in_vecs(x, w)
        kernel = flat_gemm_kernel(x.dtype, cdiv(M, TILE_M), num_stages, vec)
        shared_bytes = num_stages * stage_bytes(M)
        kernel[cdiv(N, B_N), NUM_THREADS, shared_bytes](out, x, w, M, N, K, x.stride(0), w.stride(0))
    return out


@functools.cache
def gemv_kernel(dtype: torch.dtype, rows: int, vec: int) -> CudaKernel:
    """On CUDA cores, `rows` rows of x at once, `vec` elements in a read."""
    return CudaKernel(SOURCE, f"gemv_kernel<{_C_TYPES[dtype]}, {rows}, {vec}>")


@functools.cache
def flat_gemm_kernel(dtype: torch.dtype, m_tiles: int, num_stages: int, vec: int) -> CudaKernel:
    """On tensor cores, `m_tiles` times 8 rows of x, `vec` elements in a copy."""
    return CudaKernel(SOURCE, f"flat_gemm_kernel<{_C_TYPES[dtype]}, {m_tiles}, {num_stages}, {vec}>")


def rows_at_once(M: int) -> int:
    """Rows of x that CUDA cores take at a time: all if they can, else as many as they can."""
    return next((rows for rows in ROWS_AT_ONCE if rows >= M), ROWS_AT_ONCE[-1])


def stage_bytes(M: int) -> int:
    """Shared memory of one stage, in the rings of all warps: tiles of w and of x, rows padded by 16 bytes."""
    return NUM_WARPS * (B_N + TILE_M * cdiv(M, TILE_M)) * (TILE_K * 2 + 16)


def stages_for(M: int, N: int, num_sms: int, shared_limit: int = MAX_SHARED_BYTES) -> int:
    """Stages that keep an SM's share of memory bandwidth busy; `shared_limit`: bytes that a thread block may have.

    Of S stages one is multiplied and one is about to land: S − 2 are surely on their way. A stage holds 16 KiB of
    weights in a thread block, and ⌈N / 32 / SMs⌉ thread blocks share an SM. An H200 moves 4.8 TB/s, 36 bytes per SM and
    nanosecond; if a read takes 0.7 to 0.9 µs, 25 to 32 KiB must be on their way. Fewer stages where else those thread
    blocks do not fit together, but two at least.
    """
    thread_blocks = cdiv(cdiv(N, B_N), num_sms)  # of an SM
    weight_bytes = NUM_WARPS * B_N * TILE_K * 2  # of a stage
    wanted = 2 + cdiv(IN_FLIGHT_BYTES, thread_blocks * weight_bytes)
    room = (shared_limit + RESERVED_BYTES) // thread_blocks - RESERVED_BYTES
    return max(2, min(wanted, room // stage_bytes(M)))


def _output(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(len(x), len(w))


def _in_vecs(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    """(x, elements in a read): 16 bytes if the rows of w lie so, else one. x is small: it is copied if it does not."""
    vec = 16 // w.element_size() if _lies_in_vecs(w) else 1
    fits = x.stride(1) == 1 and (vec == 1 or _lies_in_vecs(x))
    return x if fits else x.clone(memory_format=torch.contiguous_format), vec


def _lies_in_vecs(x: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes and are as long as some."""
    return not any(n % 16 for n in (x.data_ptr(), x.stride(0) * x.element_size(), x.shape[1] * x.element_size()))


# ---------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("pagewise::gemv", mutates_args=())
def _gemv(x: Tensor, w: Tensor) -> Tensor:
    return on_cuda_cores(x[None], w)[0]


@torch.library.custom_op("pagewise::flat_gemm", mutates_args=())
def _flat_gemm(x: Tensor, w: Tensor) -> Tensor:
    return (on_cuda_cores if _suits_cuda_cores(x) else on_tensor_cores)(x, w)


def _suits_cuda_cores(x: Tensor) -> bool:
    return len(x) <= GEMV_ROWS or x.dtype == torch.float32


@_gemv.register_fake
def _(x, w):
    return x.new_empty(len(w))


@_flat_gemm.register_fake
def _(x, w):
    return _output(x, w)


@counts_as("pagewise::gemv")
def _gemv_work(x, w) -> tuple[int, int, int, int]:
    return _work_on_cuda_cores(x[None], w)


@counts_as("pagewise::flat_gemm")
def _flat_gemm_work(x, w) -> tuple[int, int, int, int]:
    return (_work_on_cuda_cores if _suits_cuda_cores(x) else _work_on_tensor_cores)(x, w)


def _work_on_cuda_cores(x, w) -> tuple[int, int, int, int]:
    """As if M and N were multiples of what is done at once. Each thread block reads all of x, and w for each time."""
    (M, K), N, at_once = x.shape, len(w), rows_at_once(len(x))
    thread_blocks, times = cdiv(N, COLUMNS), cdiv(M, at_once)
    sums = thread_blocks * COLUMNS * times * at_once
    read = thread_blocks * times * (COLUMNS + at_once) * K
    per_sum = 5 * NUM_THREADS + NUM_WARPS  # additions between lanes, and between warps
    return 2 * sums * K, sums * per_sum, read * x.element_size(), M * N * x.element_size()


def _work_on_tensor_cores(x, w) -> tuple[int, int, int, int]:
    """Products of whole tiles. Each thread block reads all of x; what does not exist is not read."""
    (M, K), N = x.shape, len(w)
    thread_blocks = cdiv(N, B_N)
    rows, columns, depth = cdiv(M, TILE_M) * TILE_M, thread_blocks * B_N, cdiv(K, TILE_K) * TILE_K
    read = (N + thread_blocks * M) * K
    return 2 * rows * columns * depth, NUM_WARPS * M * columns, read * x.element_size(), M * N * x.element_size()
