"""Paged attention in Triton: how the kernels of `kernels/paged_attention.py` are launched (lesson 5).

One program attends with all query heads that share a KV head, so that keys and values are read once for all of them. A
decode step has few of these: B · Hkv programs may leave most of a GPU idle. The keys of each sequence are therefore cut
into splits by number, and a second kernel merges their (m, l, acc).

No batch size, length, number of blocks or width of a table is a constant of the kernels. They are compiled once per
dtype, head size, block size and group of heads, and the host never waits for a length.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_blocks.write import EXPONENT_BITS
from pagewise.tools.architecture import architecture
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import triton_mode, without_bfloat16
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv, padded
from pagewise.tools.tuning import LOADS, decode_tiles, splits_that_fill

INT32_MAX = NO_WINDOW = 2**31 - 1  # keys and queries are counted in int32
MAX_HEAD_SIZE = 256


def refuses(inputs: PagedInputs) -> str | None:
    """Return why the Triton kernels cannot take these tensors, or None."""
    P = inputs.k_cache.shape[1]
    if P > 256 or P & (P - 1):
        return f"needs a block size that is a power of two from 1 to 256, got {P}"
    return refuses_tensors(q=inputs.q, k_cache=inputs.k_cache, v_cache=inputs.v_cache)


def refuses_tensors(q: Tensor, **keys_and_values: Tensor) -> str | None:
    """Return why no decode kernel of lessons 5 to 9 can take these tensors, or None."""
    D = q.shape[-1]
    if q.dtype not in FLOATS:
        return f"takes q in float32, float16 or bfloat16, got {q.dtype}"
    if D > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, got {D}"
    for name, tensor in {"q": q, **keys_and_values}.items():
        if D > 1 and tensor.numel() and tensor.stride(-1) != 1:
            return f"needs {name} contiguous in its last dimension, got stride {tensor.stride(-1)}"
    return without_bfloat16(q.dtype, architecture(q.device))


def attend(
    inputs: PagedInputs, options: ScoreOptions, num_splits: int | None
) -> tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]:
    """Return (out, lse) of `paged_attention`, for inputs that the kernels take.

    num_splits: None cuts the keys so that the splits fill the GPU, as far as the shapes tell. On a CPU that is 1.
    """
    q, k_cache, v_cache, block_tables, seq_lens, v_scale = inputs
    numbers = (options.scale_for(q.shape[-1]), options.window, options.softcap, v_scale)
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, options.alibi_slopes)
    return torch.ops.pagewise.paged_attention(*tensors, *numbers, num_splits)


@torch.library.custom_op("pagewise::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    alibi_slopes: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float,
    v_scale: float,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    from pagewise.kernels.paged_attention import merge_splits_kernel, paged_attention_kernel

    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel():
        return out, lse
    (B, H, D), (_, P, Hkv, _), M = q.shape, k_cache.shape, block_tables.shape[1]
    tiles = decode_tiles(H // Hkv, D, q.dtype, k_cache.dtype)
    items, gpu = Hkv * cdiv(H // Hkv, tiles.rows), architecture(q.device)
    if num_splits is None:
        num_splits = splits_that_fill(B * items, M * P, tiles.keys, gpu.num_sms) if gpu.sm else 1
    num_splits = max(1, min(num_splits, cdiv(M * P, tiles.keys)))
    k_cache, v_cache, float8_bits = as_kernels_read(k_cache, v_cache)
    partials = partial_results(B * H * num_splits, D, q.device) if num_splits > 1 else None
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, out, lse, partials)
    limits = (min(M * P, INT32_MAX), min(window or NO_WINDOW, NO_WINDOW), num_splits)
    numbers = (H, *limits, scale, softcap or None, v_scale)
    sizes = {"P": P, "D": D, "BLOCK_D": padded(D), "GROUP": H // Hkv, "ROWS": tiles.rows, "TILE": tiles.keys}
    sizes |= {"FLOAT8_BITS": float8_bits, **tiles.launch_options}
    memory = {"outputs": (out, lse), "stored": (k_cache, v_cache)}
    launch(paged_attention_kernel, (B, items, num_splits), *tensors, *numbers, **sizes, **memory)
    if num_splits > 1:
        rows = (out.view(-1), lse.view(-1))
        sizes = {"D": D, "BLOCK_D": padded(D), "LOADS": LOADS}
        launch(merge_splits_kernel, (B * H,), partials, *rows, num_splits, v_scale, **sizes, outputs=rows)
    return out, lse


@_paged_attention.register_fake
def _(q, *_):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def partial_results(slots: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 memory for m [slots], l [slots] and acc [slots · D]."""
    return tuple(torch.empty(slots * n, dtype=torch.float32, device=device) for n in (1, 1, head_size))


def as_kernels_read(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return keys and values as the kernels read them, and FLOAT8_BITS.

    A GPU below sm_89 and the interpreter do not convert float8. They read bytes, and the kernel converts them:
    FLOAT8_BITS is then the number of exponent bits, 4 or 5.
    """
    bits = EXPONENT_BITS.get(k.dtype, 0)
    if not bits or (architecture(k.device).sm >= 89 and triton_mode() == "compiled"):
        return k, v, 0
    return k.view(torch.uint8), v.view(torch.uint8), bits
