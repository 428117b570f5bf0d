"""FlashAttention-2 in CUDA C++, forward only: small enough to be read and observed (lesson 6).

The kernel is in kernels/flash_attention.cu. A thread block has Br = 128 queries, one per thread, and K and V come past
in tiles of Bc = 32. It computes on CUDA cores; where speed matters, the Triton kernels use tensor cores.
"""

from pathlib import Path

import torch
from torch import Tensor

import pagewise.kernels
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.inputs import Keys, OfRows, Out, empty_like
from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_cuda import cuda_kernel, in_vecs
from pagewise.tools.architecture import architecture
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import without_bfloat16
from pagewise.tools.ops import custom_op
from pagewise.tools.sizes import cdiv

SOURCE = Path(pagewise.kernels.__file__).parent / "flash_attention.cu"
HEAD_SIZES = (32, 64, 80, 96, 112, 128)
NUM_WARPS = 4
TILE_ROWS = 32 * NUM_WARPS  # Br: a query per thread
TILE_KEYS = 32  # Bc
MAX_GRID_YZ = 65535


def tile_bytes(dtype: torch.dtype, head_size: int) -> int:
    """Shared memory for Q_i, whose rows are padded by 16 bytes, K_j and V_j."""
    row = head_size * dtype.itemsize
    return TILE_ROWS * (row + 16) + 2 * TILE_KEYS * row


def refuses(q: Out, options: ScoreOptions, dropout: Dropout) -> str | None:
    """The reason why this kernel cannot take these arguments, to follow 'backend="cuda"', or None."""
    B, H, _, D = q.shape
    if q.dtype not in FLOATS:
        return f"takes float32, float16 or bfloat16, got {q.dtype}"
    if D not in HEAD_SIZES:
        return f"takes head sizes {', '.join(map(str, HEAD_SIZES))}, got {D}"
    if max(B, H) > MAX_GRID_YZ:
        return f"takes at most {MAX_GRID_YZ} sequences and heads, got {B} and {H}"
    others = options.window, options.softcap or None, options.alibi_slopes, options.attn_mask, dropout.p or None
    for name, given in zip(("window", "softcap", "alibi_slopes", "attn_mask", "dropout_p"), others, strict=True):
        if given is not None:
            return f"takes no {name}"
    return without_bfloat16(q.dtype, architecture(q.device))


def forward(q: Out, k: Keys, v: Keys, options: ScoreOptions) -> tuple[Out, OfRows]:
    """(out, lse) of `flash_attention`. `refuses` must have returned None."""
    return _flash_attention_cuda(q, k, v, options.causal, options.scale_for(q.shape[-1]))


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("flash_attention_cuda", fake=lambda q, *_: _outputs(q))
def _flash_attention_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    out, lse = _outputs(q)
    if out.numel():
        q, k, v = map(in_vecs, (q, k, v))  # tensors that do not lie as the kernel reads them are copied
        strides = (stride for x in (out, q, k, v) for stride in x.stride()[:3])
        grid = (cdiv(T, TILE_ROWS), H, B)
        kernel = cuda_kernel(SOURCE, "flash_attention_kernel", q.dtype, D)
        kernel[grid, TILE_ROWS, tile_bytes(q.dtype, D)](out, lse, q, k, v, T, S, Hkv, scale, causal, *strides)
    return out, lse
