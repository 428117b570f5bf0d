"""Flat GEMM: the matrix products of a decode step, in which x has few rows (lesson 8).

    out = x wᵀ         out[m, n] = Σ_k x[m, k] · w[n, k]        summed in float32, rounded to the dtype of x at the end

Each weight is used only M times. Reading w therefore sets the time, if enough reads are in flight at all times.

    gemv       on CUDA cores: M ≤ 2, float32, and GPUs before sm_80
    flat_gemm  on tensor cores: pads M to a multiple of 8, and reads the weights through a ring of asynchronous copies

FlashDecoding++, Hong et al. 2023, section 4. The double buffer of that paper is a ring of two stages.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import pagewise.kernels
from cudascope.arguments.launch_shape import MAX_SHARED_BYTES
from cudascope.gpus import H200
from pagewise.paged_attention.in_cuda import cuda_kernel, in_vecs, is_in_vecs, shared_bytes_limit
from pagewise.tools.architecture import architecture
from pagewise.tools.checks import FLOATS, check_same, check_shape, check_tensor
from pagewise.tools.ops import custom_op
from pagewise.tools.sizes import cdiv
from pagewise.tools.transforms import check_derivative

SOURCE = Path(pagewise.kernels.__file__).parent / "flat_gemm.cu"
MAX_ROWS = 64  # M
GEMV_ROWS = 2  # up to this M the CUDA cores are chosen
NUM_WARPS = 4  # of a thread block; they share K
NUM_THREADS = 32 * NUM_WARPS
COLUMNS = 4  # columns of out that a thread block on CUDA cores owns
ROWS_AT_ONCE = (1, 2, 4, 8)  # rows of x that CUDA cores multiply at a time
B_N = 32  # columns of out that a thread block on tensor cores owns: N / B_N = 128 for N = 4096, on 108 or 132 SMs
TILE_M = 8  # M is padded to a multiple of this
TILE_K = 64  # columns of w in one stage of a warp's ring
IN_FLIGHT_BYTES = 32 * 1024  # bytes of w that an SM of an H200 must have in flight to use its share of the bandwidth
RESERVED_BYTES = 1024  # shared memory that an SM reserves for each thread block


def gemv(x: Float[Tensor, "K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "N"]:
    """Compute w @ x on CUDA cores, the linear layer without bias of one token.

    Tensors are float32, float16 or bfloat16, and the sum is in float32. The rows of `w` may have any stride, but its
    columns must be contiguous. The kernel is fastest where K, the stride of rows and the address are multiples of 16
    bytes. It has no gradient. With tensors on the CPU, the kernel runs in the CPU runner.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_tensor("x", x, "K", dtypes=FLOATS)
    _check_weights("gemv", x, w)
    return few_rows(x[None], w, False)[0]


def flat_gemm(x: Float[Tensor, "M K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "M N"]:
    """Compute x @ wᵀ for M ≤ 64 rows, the linear layer without bias of a batch that decodes.

    float16 and bfloat16 use tensor cores, 8 rows at a time. CUDA cores take M ≤ 2 and float32, and on GPUs before sm_80
    (T4) they take everything. The sum is in float32, and its order depends only on K and on this choice. All else is as
    in `gemv`.

    Raises:
        TypeError, ValueError: as in `gemv`, or M > 64.
    """
    check_tensor("x", x, "M K", dtypes=FLOATS)
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"x must have at most {MAX_ROWS} rows, got {len(x)}: use x @ w.T")
    _check_weights("flat_gemm", x, w)
    return few_rows(x, w, x.shape[0] > GEMV_ROWS)


def _check_weights(function: str, x: Tensor, w: Tensor) -> None:
    check_derivative(function, x, w, remedy="torch.nn.functional.linear")
    check_tensor("w", w, "N K", dtypes=FLOATS)
    check_same("dtype", x=x, w=w)
    check_same("device", x=x, w=w)
    check_shape("w", w, (len(w), x.shape[-1]), "N K")
    if w.shape[1] > 1 and w.stride(1) != 1:
        raise ValueError(
            f"w must have contiguous rows, got strides {w.stride()}: keep w.contiguous(), because a copy for each "
            f"product would cost more than the product"
        )


def on_cuda_cores(x: Float[Tensor, "M K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "M N"]:
    """Return x @ wᵀ for any M, computed by `gemv_kernel`, up to 8 rows at a time."""
    (M, K), N = x.shape, len(w)
    out = x.new_empty(M, N)
    if out.numel():
        x, vec = _in_vecs(x, w)
        kernel = cuda_kernel(SOURCE, "gemv_kernel", x.dtype, rows_at_once(M), vec)
        kernel[cdiv(N, COLUMNS), NUM_THREADS](out, x, w, M, N, K, x.stride(0), w.stride(0))
    return out


def on_tensor_cores(
    x: Float[Tensor, "M K"], w: Float[Tensor, "N K"], *, num_stages: int | None = None
) -> Float[Tensor, "M N"]:
    """Return x @ wᵀ for M ≤ 64 rows of float16 or bfloat16, computed by `flat_gemm_kernel`.

    num_stages: the length of each warp's ring. The default is `stages_for`.
    """
    if not tensor_cores_take(x):
        raise ValueError(
            f"flat_gemm on tensor cores needs float16 or bfloat16 and a GPU from sm_80 on, got {x.dtype} on sm_"
            f"{architecture(x.device).sm}: use flat_gemm, which then uses CUDA cores, or torch's matmul"
        )
    (M, K), N, limit = x.shape, len(w), shared_bytes_limit(x.device)
    if 2 * stage_bytes(M) > limit:  # from M = 57 on with 99 KiB: half of the rows at a time
        return torch.cat([on_tensor_cores(rows, w, num_stages=num_stages) for rows in x.chunk(2)])
    out = x.new_empty(M, N)
    if out.numel():
        # The CPU runner has the number of SMs and the other limits of an H200.
        num_sms = architecture(x.device).num_sms if x.is_cuda else H200.num_sms
        num_stages = num_stages or stages_for(M, N, num_sms, limit)
        x, vec = _in_vecs(x, w)
        kernel = cuda_kernel(SOURCE, "flat_gemm_kernel", x.dtype, cdiv(M, TILE_M), num_stages, vec)
        shared_bytes = num_stages * stage_bytes(M)
        kernel[cdiv(N, B_N), NUM_THREADS, shared_bytes](out, x, w, M, N, K, x.stride(0), w.stride(0))
    return out


def rows_at_once(M: int) -> int:
    """Return how many rows of x CUDA cores multiply at a time: all M, or the most they can."""
    return next((rows for rows in ROWS_AT_ONCE if rows >= M), ROWS_AT_ONCE[-1])


def stage_bytes(M: int) -> int:
    """Return the shared memory of one stage in the rings of all warps: tiles of w and x, rows padded by 16 bytes."""
    return NUM_WARPS * (B_N + TILE_M * cdiv(M, TILE_M)) * (TILE_K * 2 + 16)


def stages_for(M: int, N: int, num_sms: int, shared_limit: int = MAX_SHARED_BYTES) -> int:
    """Return how many stages a ring needs so that an SM uses its share of the memory bandwidth.

    A warp multiplies one of S stages, and another may have just arrived, so at least S − 2 are in flight. A stage of a
    thread block holds 16 KiB of weights, and ⌈N / 32 / SMs⌉ thread blocks share an SM. An H200 moves 4.8 TB/s, which is
    36 bytes per SM and nanosecond. A read takes 0.7 to 0.9 µs, so 25 to 32 KiB must be in flight. The ring is shorter,
    but never below two stages, where these thread blocks would not fit into `shared_limit` bytes of the SM together.
    """
    thread_blocks = cdiv(cdiv(N, B_N), num_sms)  # of an SM
    weight_bytes = NUM_WARPS * B_N * TILE_K * 2  # of a stage
    wanted = 2 + cdiv(IN_FLIGHT_BYTES, thread_blocks * weight_bytes)
    room = (shared_limit + RESERVED_BYTES) // thread_blocks - RESERVED_BYTES
    return max(2, min(wanted, room // stage_bytes(M)))


def _in_vecs(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    """Return (x, elements per read). A read is 16 bytes if the rows of w allow that. x is copied if it does not fit."""
    if is_in_vecs(w):
        return in_vecs(x), 16 // w.element_size()
    return x if x.stride(1) == 1 else x.clone(memory_format=torch.contiguous_format), 1


def tensor_cores_take(x: Tensor) -> bool:
    """Return whether `flat_gemm_kernel` can multiply x. It needs 16-bit floats, and sm_80 for asynchronous copies."""
    return x.dtype != torch.float32 and not 0 < architecture(x.device).sm < 80


@custom_op("flat_gemm", fake=lambda x, w, _: x.new_empty(x.shape[0], w.shape[0]))
def few_rows(x: Tensor, w: Tensor, tensor_cores: bool) -> Tensor:
    """Return x @ wᵀ, computed on tensor cores if they are asked for and take x, else on CUDA cores."""
    return (on_tensor_cores if tensor_cores and tensor_cores_take(x) else on_cuda_cores)(x, w)
