"""Paged decode in Triton: how the kernels of `kernels/paged_attention.py` are launched (lesson 5).

One program attends with all query heads that share a KV head, so that keys and values are read once for all of them.
A decode step has few queries: B · Hkv programs may leave most of a GPU idle. So each sequence is cut into num_splits
pieces, each gives lesson 3's `Partial` (m, l, acc), and a second kernel merges them. Dao et al. 2023 (Flash-Decoding).

No size of the batch, no length and no number of blocks is a constant of the kernels: they are compiled once per dtype,
head size, block size and group of heads.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_blocks.write import EXPONENT_BITS
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import triton_launch
from pagewise.tools.sizes import cdiv, padded

MAX_SPLITS = 64
MIN_TOKENS_PER_SPLIT = 128
MAX_GRID_Z = 65535
NO_WINDOW = 2**31 - 1
OutAndLse = tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]


class Tiles(NamedTuple):
    """How a program's share of the work is cut, and the threads that do it."""

    heads: int  # query heads of one group at once
    keys: int
    num_warps: int
    num_stages: int  # tiles on their way from memory at once, plus one


def tiles_for(group: int, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tiles:
    """Tiles for `group` query heads per KV head.

    What limits them is registers: they hold acc [heads, D], or [keys, D] for a single head, and in float32, which no
    tensor core multiplies exactly, the operands of the products too; so there is no room left to convert a float8 tile
    while the next is on its way.
    """
    block_d = padded(head_size)
    if group == 1:
        return Tiles(heads=1, keys=max(16, min(64, 4096 // block_d)), num_warps=4, num_stages=2)
    if dtype == torch.float32:
        return Tiles(heads=16, keys=32, num_warps=8, num_stages=2 if cache_dtype == dtype else 1)
    return Tiles(heads=16 if group <= 16 else 32, keys=max(32, min(64, 8192 // block_d)), num_warps=4, num_stages=3)


def default_num_splits(batch_size: int, programs_per_sequence: int, capacity: int, num_sms: int) -> int:
    """Splits per sequence that give a GPU of `num_sms` multiprocessors about two programs each, and no more.

    Args:
        capacity: M · P, what a row of the block table can hold. Not the lengths: they are on the GPU, and reading them
            would wait for it; a captured CUDA graph needs one number for all lengths, too.

    At most one split per MIN_TOKENS_PER_SPLIT tokens of capacity, at most MAX_SPLITS, at least 1.
    """
    programs = max(1, batch_size * programs_per_sequence)
    return max(1, min(cdiv(2 * num_sms, programs), capacity // MIN_TOKENS_PER_SPLIT, MAX_SPLITS))


def refuses(inputs: PagedInputs) -> str | None:
    """Why the Triton kernel cannot take these tensors, or None."""
    _, P, _, D = inputs.cache_sizes
    if inputs.q.dtype not in FLOATS:
        return f"takes q in float32, float16 or bfloat16, got {inputs.q.dtype}"
    if P > 256 or P & (P - 1):
        return f"needs a block size that is a power of two from 1 to 256, got {P}"
    if D > 256:
        return f"takes head sizes up to 256, got {D}"
    for name in ("q", "k_cache", "v_cache"):
        tensor = getattr(inputs, name)
        if D > 1 and tensor.numel() and tensor.stride(-1) != 1:
            return f"needs {name} contiguous in its last dimension, got stride {tensor.stride(-1)}"
    return None


def decode_attention(inputs: PagedInputs, options: ScoreOptions, *, num_splits: int | None = None) -> OutAndLse:
    """(out, lse) of `paged_attention` by the Triton kernels, for inputs that `refuses` does not refuse."""
    (B, H, D), (_, P, Hkv, _), device = inputs.q.shape, inputs.cache_sizes, inputs.q.device
    capacity = inputs.block_tables.shape[1] * P
    if num_splits is None:
        group = H // Hkv
        programs = Hkv * cdiv(group, tiles_for(group, D, inputs.q.dtype, inputs.k_cache.dtype).heads) if group else 1
        num_splits = default_num_splits(B, programs, capacity, _num_sms(device)) if device.type == "cuda" else 1
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, inputs.seq_lens, options.alibi_slopes)
    numbers = (options.scale_for(D), options.window, options.softcap, inputs.v_scale)
    return torch.ops.pagewise.paged_decode(*tensors, *numbers, min(num_splits, max(1, capacity), MAX_GRID_Z))


@torch.library.custom_op("pagewise::paged_decode", mutates_args=())
def _paged_decode_op(
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
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    from pagewise.kernels.paged_attention import merge_splits_kernel, paged_decode_kernel

    (B, H, D), (_, P, Hkv, _), M = q.shape, k_cache.shape, block_tables.shape[1]
    lse = q.new_empty(B, H, dtype=torch.float32)
    if not q.numel():
        return q.new_empty(B, H, D), lse
    group, float8_bits, split = H // Hkv, _float8_bits(k_cache), num_splits > 1
    tiles = tiles_for(group, D, q.dtype, k_cache.dtype)
    if float8_bits:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    slopes = lse if alibi_slopes is None else alibi_slopes.contiguous()  # lse: any pointer, it is not read
    sizes = {"P": P, "D": D, "BLOCK_D": padded(D), "GROUP": group, "BLOCK_H": tiles.heads, "TILE": tiles.keys}
    variant = {"FLOAT8_BITS": float8_bits, "SOFTCAP": softcap > 0, "ALIBI": alibi_slopes is not None, "SPLIT": split}
    with triton_launch(q.device) as readable:
        q_read = readable(q)
        out = q_read.new_empty(B, H, D)
        partials = [out] * 3
        if split:
            partials = [*lse.new_empty(2, B, H, num_splits), lse.new_empty(B, H, num_splits, D)]
        tensors = (q_read, k_cache, v_cache, block_tables, seq_lens.contiguous(), slopes, out, lse, *partials)
        strides = (*q_read.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *block_tables.stride())
        numbers = (H, min(M * P, NO_WINDOW), min(window or NO_WINDOW, NO_WINDOW), scale, softcap, v_scale)
        threads = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        grid = (B, Hkv * cdiv(group, tiles.heads), num_splits)
        paged_decode_kernel[grid](*tensors, *strides, *numbers, **sizes, **variant, **threads)
        if split:
            constants = {"D": D, "BLOCK_D": padded(D), "SPLITS": 16, "num_warps": 4}
            merge_splits_kernel[(B, H)](*partials, out, lse, num_splits, v_scale, **constants)
    return out.to(q.dtype), lse


@_paged_decode_op.register_fake
def _(q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, scale, window, softcap, v_scale, num_splits):
    B, H, D = q.shape
    return q.new_empty(B, H, D), q.new_empty(B, H, dtype=torch.float32)


def _float8_bits(cache: Tensor) -> int:
    """4 or 5 where the kernel converts the bytes of a float8 cache (that many exponent bits), 0 where the GPU does."""
    converts = cache.is_cuda and torch.cuda.get_device_capability(cache.device) >= (8, 9)
    return 0 if converts else EXPONENT_BITS.get(cache.dtype, 0)


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
