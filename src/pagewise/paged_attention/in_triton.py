"""Decoding in Triton: how the kernel of `kernels/paged_attention.py` is launched, and the merge (lessons 5 and 7).

One program attends with all query heads that share a KV head, and all newest queries of a sequence, so that keys and
values are read once for all of them. A decode step has few of these: B · Hkv programs may leave most of a GPU idle. So
keys are cut into pieces (`splits`), each gives lesson 3's `Partial` (m, l, acc), and a second kernel merges them. Dao
et al. 2023 (Flash-Decoding).

No size of the batch, no length and no number of blocks is a constant of the kernels: they are compiled once per dtype,
head size, block size and group of heads. The host never waits for a length.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int32, Shaped, UInt8
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_attention.splits import MAX_SPLITS, MIN_KEYS, Splits, num_splits_heuristic
from pagewise.paged_blocks.write import EXPONENT_BITS
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import num_sms, triton_launch
from pagewise.tools.sizes import cdiv, padded

PROGRAMS_PER_SM = 2  # that run at once: while one waits for memory, another computes
INT32_MAX = NO_WINDOW = 2**31 - 1  # keys and queries are counted in int32
LOG_FLOAT16_MAX = math.log(torch.finfo(torch.float16).max)
OutAndLse = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]


class DecodeInputs(NamedTuple):
    """What the kernel reads: queries that stand at the end of their sequences, and keys and values in blocks.

    Dense keys are one block per sequence, without tables.
    """

    q: Float[Tensor, "B H T D"]
    k: Shaped[Tensor, "N Hkv P D"]
    v: Shaped[Tensor, "N Hkv P D"]
    block_tables: Int32[Tensor, "B M"] | None = None
    seq_lens: Int32[Tensor, " B"] | None = None  # None: P keys each
    v_scale: float = 1.0

    @classmethod
    def paged(cls, inputs: PagedInputs) -> "DecodeInputs":
        """One query per sequence over a cache [N, P, Hkv, D]."""
        q, k, v, *rest = inputs
        return cls(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), *rest)

    @property
    def capacity(self) -> int:
        """The longest sequence that there is room for."""
        P = self.k.shape[2]
        return P if self.block_tables is None else P * self.block_tables.shape[1]


class Tiles(NamedTuple):
    """How a program's share of the work is cut, and the threads that do it."""

    rows: int  # queries and query heads of one KV head at once
    keys: int
    num_warps: int
    num_stages: int  # tiles on their way from memory at once, plus one


def tiles_for(rows: int, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tiles:
    """Tiles for `rows` query rows (T · H / Hkv) per KV head.

    What limits them is registers: they hold acc [rows, D], or [keys, D] for a single row, and in float32, which no
    tensor core multiplies exactly, the operands of the products too; so there is no room left to convert a float8 tile
    while the next is on its way.
    """
    block_d = padded(head_size)
    if rows == 1:
        return Tiles(rows=1, keys=max(16, min(64, 4096 // block_d)), num_warps=4, num_stages=2)
    same = cache_dtype == dtype
    if dtype == torch.float32:
        return Tiles(16, keys=32 if same and block_d <= 128 else 16, num_warps=8, num_stages=2 if same else 1)
    keys = max(32, min(64, 8192 // block_d))
    if rows <= 16 or block_d > 128:
        return Tiles(16, keys, num_warps=4, num_stages=3)
    keys = keys if same else 32
    if rows <= 32:
        return Tiles(32, keys, num_warps=4, num_stages=3)
    return Tiles(64, keys, num_warps=8, num_stages=2)


class Softmax(NamedTuple):
    """How sums of exp are kept within the floats: `kernels/partial.py` has the three folds."""

    kind: Literal["synchronised", "unified", "lazy"] = "synchronised"
    reference: float = 0.0  # φ of the unified one; how far the lazy one's m may lag behind
    low: float = 0.0  # low < m − φ < high is safe
    high: float = 0.0
    smallest: float = 0.0  # that an acc of weights below 1 may be


SYNCHRONISED = Softmax()


def refuses(inputs: DecodeInputs) -> str | None:
    """Why the Triton kernel cannot take these tensors, or None."""
    (_, _, P, D), dtype = inputs.k.shape, inputs.q.dtype
    if dtype not in FLOATS:
        return f"takes q in float32, float16 or bfloat16, got {dtype}"
    if inputs.block_tables is not None and (P > 256 or P & (P - 1)):
        return f"needs a block size that is a power of two from 1 to 256, got {P}"
    if D > 256:
        return f"takes head sizes up to 256, got {D}"
    if inputs.block_tables is None and P > INT32_MAX:
        return f"takes up to {INT32_MAX} keys, got {P}"
    cache = "" if inputs.block_tables is None else "_cache"
    for name, tensor in (("q", inputs.q), (f"k{cache}", inputs.k), (f"v{cache}", inputs.v)):
        if D > 1 and tensor.numel() and tensor.stride(-1) != 1:
            return f"needs {name} contiguous in its last dimension, got stride {tensor.stride(-1)}"
    return None


def decode(inputs: DecodeInputs, options: ScoreOptions, splits: Splits | None = None) -> OutAndLse:
    """(out, lse) by the Triton kernels, for inputs that `refuses` does not refuse. splits: default `filling`."""
    q, k, v, block_tables, seq_lens, v_scale = inputs
    tensors = (q, k, v, block_tables, seq_lens, options.alibi_slopes)
    numbers = (options.scale_for(q.shape[-1]), options.causal, options.window, options.softcap, v_scale)
    return torch.ops.pagewise.decode(*tensors, *numbers, *(splits or filling(inputs)))


def filling(inputs: DecodeInputs) -> Splits:
    """Splits that fill the GPU, chosen without a look at lengths that lie on it, which would wait for it.

    Lengths that are known are equal, and every item is cut alike. Others are not, and a captured CUDA graph needs one
    grid for all of them: as many programs as run at once share all work. One piece on a CPU.
    """
    (B, H, T, D), Hkv, device = inputs.q.shape, inputs.k.shape[1], inputs.q.device
    if device.type == "cpu" or not inputs.q.numel():
        return Splits("num", 1)
    at_once = PROGRAMS_PER_SM * num_sms(device, on_cpu=1)
    if inputs.seq_lens is not None:
        return Splits("share", at_once)
    tiles = tiles_for(T * H // Hkv, D, inputs.q.dtype, inputs.k.dtype)
    items = B * Hkv * cdiv(T * H // Hkv, tiles.rows)
    key_tiles = cdiv(inputs.capacity, max(tiles.keys, MIN_KEYS))
    return Splits("num", num_splits_heuristic(items, at_once, key_tiles, MAX_SPLITS))


@torch.library.custom_op("pagewise::decode", mutates_args=())
def _decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor | None,
    seq_lens: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    v_scale: float,
    way: str,
    count: int,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)
    if q.numel():
        inputs = DecodeInputs(q, k, v, block_tables, seq_lens, v_scale)
        launch(inputs, ScoreOptions(scale, causal, window, softcap, alibi_slopes), Splits(way, count), out, lse)
    return out, lse


@_decode_op.register_fake
def _(q, *others):
    B, H, T, D = q.shape
    return q.new_empty(B, H, T, D), q.new_empty(B, H, T, dtype=torch.float32)


def launch(
    inputs: DecodeInputs,
    options: ScoreOptions,
    splits: Splits,
    out: Float[Tensor, "B H T D"],
    lse: Float[Tensor, "B H T"],
    softmax: Softmax = SYNCHRONISED,
    flags: UInt8[Tensor, "B H T"] | None = None,
) -> None:
    """Compute out and lse, in place, of at least one row.

    Args:
        flags: rows that the unified softmax must not be trusted with: written by it. The others write only such rows.
    """
    from pagewise.kernels.flash_decoding import merge_splits_kernel
    from pagewise.kernels.paged_attention import decode_kernel

    q, k, v, block_tables, seq_lens, v_scale = inputs
    (B, H, T, D), (_, Hkv, P, _) = q.shape, k.shape
    group, bits = H // Hkv, float8_bits(k)
    tiles = tiles_for(T * group, D, q.dtype, k.dtype)
    items = B * Hkv * cdiv(T * group, tiles.rows)
    if bits:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    way, count = splits
    key_tiles = max(1, cdiv(inputs.capacity, tiles.keys))
    min_tiles = max(1, MIN_KEYS // tiles.keys)
    most = max(1, items * (key_tiles + 1) // min_tiles) if way == "share" else key_tiles
    cut = min(cdiv(count, tiles.keys) if way == "size" else count, most)
    slots = {"num": cut, "size": cdiv(key_tiles, cut), "share": 1}[way]
    split = slots > 1 or way == "share"
    programs = cut if way == "share" else items * slots

    kind, *band = softmax
    wide = q.dtype == torch.float16 and (kind == "unified" or softmax.reference > LOG_FLOAT16_MAX)
    sizes = {"D": D, "BLOCK_D": padded(D), "GROUP": group, "BLOCK_R": tiles.rows, "TILE": tiles.keys}
    sizes |= {"MIN_TILES": min_tiles, "CUT": way, "SOFTMAX": kind}
    variant = {"P": 1 if block_tables is None else P, "FLOAT8_BITS": bits, "SPLIT": split, "WIDE": wide}
    variant |= {"CAUSAL": options.causal and T > 1, "SOFTCAP": options.softcap > 0}
    with triton_launch(q.device) as readable:
        q, written = readable(q), readable(out)
        partials = [out] * 3
        if split:
            rows = (items + programs if way == "share" else programs, tiles.rows)
            partials = [*lse.new_empty(2, *rows), lse.new_empty(*rows, D)]
        lens = None if seq_lens is None else seq_lens.contiguous()
        slopes = None if options.alibi_slopes is None else options.alibi_slopes.contiguous()
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        strides += (0, 0) if block_tables is None else block_tables.stride()
        lengths = (B, H, T, min(inputs.capacity, INT32_MAX), min(options.window or NO_WINDOW, NO_WINDOW))
        decode_kernel[(programs,)](
            q, k, v, block_tables, lens, slopes, written, lse, *partials, flags,
            *strides, *lengths, options.scale_for(D), options.softcap, v_scale, cut, slots, *band,
            **sizes, **variant, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if split:
            merge_splits_kernel[(items, tiles.rows)](
                *partials, lens, written, lse, flags, *lengths, cut, slots, v_scale, *band, **sizes, AT_ONCE=16
            )
        if written is not out:
            out.copy_(written)


def float8_bits(cache: Tensor) -> int:
    """4 or 5 where the kernel converts the bytes of a float8 cache (that many exponent bits), 0 where the GPU does."""
    converts = cache.is_cuda and torch.cuda.get_device_capability(cache.device) >= (8, 9)
    return 0 if converts else EXPONENT_BITS.get(cache.dtype, 0)
