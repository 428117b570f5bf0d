"""Writing keys and values into one layer of a paged cache, in torch and Triton, float8 conversion included (lesson 5).

    stored = float8(clamp(x / scale, −largest, largest))        read back as stored · scale

Nearest, ties to even; what is too large for the format becomes its largest finite number, as in vLLM; NaN stays NaN.
Both backends give the same bits.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from pagewise.tools.checks import FLOAT8, FLOATS, check_number, check_same, check_shape, check_tensor
from pagewise.tools.cpp import NAMES, CTensor, functions
from pagewise.tools.device import choose_backend
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv
from pagewise.tools.transforms import apart_from, is_in_memory, is_plain

EXPONENT_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


def write_kv_cache(
    k_cache: Shaped[Tensor, "..."],
    v_cache: Shaped[Tensor, "..."],
    slots: Int64[Tensor, " T"],
    k: Shaped[Tensor, "T Hkv D"],
    v: Shaped[Tensor, "T Hkv D"],
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    check: bool = True,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> None:
    """`PagedKVCache.write` into one layer's tensors, in either layout: the one with [N, P, Hkv, D], or vLLM's.

    Everything is checked before anything is written, unless `check` is False. Takes no part in differentiation.
    """
    if check:
        _check(k_cache, v_cache, slots, k, v, k_scale, v_scale)
    scales, backend = {"k_scale": float(k_scale), "v_scale": float(v_scale)}, choose_backend(backend, k.device)
    kv_writer([k_cache], [v_cache], slots, **scales, backend=backend)(0, *apart_from((k_cache, v_cache), k, v))


def cache_sizes(k_cache: Tensor, v_cache: Tensor) -> tuple[int, int, int, int]:
    """N, P, Hkv, D of caches in either layout."""
    if k_cache.dim() == 4:
        return tuple(k_cache.shape)
    N, Hkv, D, P = v_cache.shape
    return N, P, Hkv, D


def to_float8(x: Float[Tensor, "*any"], dtype: torch.dtype, scale: float) -> Shaped[Tensor, "*any"]:
    """x / scale in `dtype`, saturated; NaN as 0x7F."""
    # by a tensor on the device: torch would multiply by the inverse of a Python number, which rounds twice
    x = x.float() / torch.full((1,), scale, dtype=torch.float32, device=x.device)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).masked_fill(x.isnan(), torch.nan).to(dtype)


def _check(
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, k_scale: float, v_scale: float
) -> None:
    N, P, Hkv, D = cache_sizes(k_cache, v_cache)
    check_tensor("slots", slots, "T", dtypes=(torch.int64,))
    for name, new in (("k", k), ("v", v)):
        check_tensor(name, new, "T Hkv D")
        check_shape(name, new, (len(slots), Hkv, D), "T Hkv D")
    _check_dtypes(k_cache, k, v, k_scale, v_scale)
    check_same("device", cache=k_cache, slots=slots, k=k, v=v)
    check_slots(slots[slots != -1], N * P)


def check_slots(slots: Int64[Tensor, " T"], num_slots: int) -> None:
    """Slots, −1 taken out, must be within the cache and distinct."""
    ordered = slots.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(ordered) and (ordered[0] < 0 or ordered[-1] >= num_slots):
        wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
        raise ValueError(f"slots must be -1 (write nowhere) or from 0 to {num_slots - 1}, got {int(wrong)}")
    if len(repeated):
        raise ValueError(f"slots must be distinct, got {int(repeated[0])} more than once")


def check_scales(k_scale: float, v_scale: float) -> None:
    """Raise ValueError or TypeError unless both scales are positive numbers that float32 represents."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_number(name, scale, low=torch.finfo(torch.float32).tiny, below=torch.finfo(torch.float32).max)


def _check_dtypes(cache: Tensor, k: Tensor, v: Tensor, k_scale: float, v_scale: float) -> None:
    """Same dtypes and scales of 1, or floats that become float8."""
    check_scales(k_scale, v_scale)
    if cache.dtype in FLOAT8 and k.dtype in FLOATS:
        check_same("dtype", k=k, v=v)
        return
    check_same("dtype", cache=cache, k=k)
    check_same("dtype", cache=cache, v=v)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale != 1.0:
            raise ValueError(
                f"{name} must be 1.0 where {k.dtype} is stored as it is, got {scale}: a float8 cache divides float32, "
                f"float16 or bfloat16 by it"
            )


def kv_writer(
    k_caches: Sequence[Tensor] | Tensor,
    v_caches: Sequence[Tensor] | Tensor,
    slots: Int64[Tensor, " T"],
    *,
    k_scale: float,
    v_scale: float,
    backend: Literal["torch", "triton"],
) -> Callable[[int, Tensor, Tensor], None]:
    """Return write(layer, k, v), which is `PagedKVCache.write` into these slots without checks.

    The caches are those of all layers. All layers of an engine's step write into the same slots, which are looked at
    once. On a CPU kernels/paged_blocks.cpp writes what it can read, and torch the rest.
    """
    if backend == "triton":

        def launch_for(layer: int, k: Tensor, v: Tensor) -> None:
            torch.ops.pagewise.write_kv_cache(k_caches[layer], v_caches[layer], slots, k, v, k_scale, v_scale)

        return launch_for
    in_torch = functools.partial(_writer_in_torch, k_caches, v_caches, slots, k_scale, v_scale)
    is_read = is_plain() and is_in_memory(k_caches[0]) and is_in_memory(v_caches[0]) and is_in_memory(slots)
    if not (is_read and slots.device.type == "cpu" and _fits(k_caches[0], v_caches[0], slots)):
        return in_torch()
    (_, P, *sizes), dtype = k_caches[0].shape, k_caches[0].dtype
    kernel, shape = _library()["write", dtype], (len(slots), *sizes)

    def write(layer: int, k: Tensor, v: Tensor) -> None:
        for x in (k, v):
            # is_in_memory, without a call per tensor and layer
            implied = type(x) is not Tensor or x.is_neg() or x._is_zerotensor()
            if x.shape != shape or x.dtype != dtype or not x.is_cpu or x.stride(-1) != 1 or implied:
                in_torch()(layer, k, v)
                return
        for x, cache in ((k, k_caches[layer]), (v, v_caches[layer])):
            places = CTensor(x.data_ptr(), x.stride()), CTensor(cache.data_ptr(), cache.stride()[:3])
            kernel(*places, slots.data_ptr(), *shape, P)
            if not cache.is_inference():
                torch.autograd.graph.increment_version(cache)

    return write


def _writer_in_torch(
    k_caches: Sequence[Tensor] | Tensor,
    v_caches: Sequence[Tensor] | Tensor,
    slots: Tensor,
    k_scale: float,
    v_scale: float,
) -> Callable[[int, Tensor, Tensor], None]:
    _, P, _, _ = cache_sizes(k_caches[0], v_caches[0])
    kept = (slots != -1).nonzero()[:, 0]
    block, offset = slots[kept] // P, slots[kept] % P

    def write(layer: int, k: Tensor, v: Tensor) -> None:
        k_cache, v_cache, k, v = k_caches[layer], v_caches[layer], k[kept], v[kept]
        if k.dtype != k_cache.dtype:
            k, v = to_float8(k, k_cache.dtype, k_scale), to_float8(v, v_cache.dtype, v_scale)
        if k_cache.dim() == 4:
            k_cache[block, offset] = k
            v_cache[block, offset] = v
        else:
            k_cache[block, :, :, offset] = k.unflatten(-1, (-1, k_cache.shape[-1]))  # [T, Hkv, D/x, x]
            v_cache[block, :, :, offset] = v

    return write


@functools.cache
def _library() -> dict:
    return functions("paged_blocks.cpp", write=[CTensor, CTensor, ctypes.c_void_p, *[ctypes.c_int64] * 4])


def _fits(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> bool:
    """Whether kernels/paged_blocks.cpp can write into these slots. torch raises IndexError for those beyond a cache."""
    if not _library() or k_cache.ndim != 4 or k_cache.dtype not in NAMES or k_cache.stride(-1) != 1:
        return False
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype or v_cache.stride(-1) != 1:
        return False
    low, high = slots.aminmax() if len(slots) else (-1, -1)
    return low >= -1 and high < k_cache.shape[0] * k_cache.shape[1] and slots.is_contiguous()


@torch.library.custom_op("pagewise::write_kv_cache", mutates_args=("k_cache", "v_cache"))
def _write_kv_cache_op(
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, k_scale: float, v_scale: float
) -> None:
    from pagewise.kernels.paged_blocks import write_kv_cache_kernel

    _, P, Hkv, D = cache_sizes(k_cache, v_cache)
    if not k.numel():
        return
    float8_bits = 0 if k.dtype == k_cache.dtype else EXPONENT_BITS[k_cache.dtype]
    if k_cache.dtype in FLOAT8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        if k.dtype in FLOAT8:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
    if k_cache.dim() == 4:  # in the order of vLLM's axes, with X = D
        k_cache, v_cache = k_cache.transpose(1, 2)[:, :, None], v_cache.permute(0, 2, 3, 1)
    block = min(1024, 1 << (Hkv * D - 1).bit_length())
    sizes = {"P": P, "HKV": Hkv, "D": D, "X": k_cache.shape[-1], "FLOAT8_BITS": float8_bits, "BLOCK": block}
    grid, caches = (len(slots), cdiv(Hkv * D, block)), {"k_cache": k_cache, "v_cache": v_cache}
    tensors, scales = {"slots_ptr": slots, "k": k, "v": v} | caches, {"k_scale": k_scale, "v_scale": v_scale}
    memory = {"outputs": tuple(caches.values()), "stored": tuple(caches) if float8_bits else ("k", "v", *caches)}
    launch(write_kv_cache_kernel, grid, **tensors, **scales, **sizes, **memory)


@_write_kv_cache_op.register_fake
def _(k_cache, v_cache, slots, k, v, k_scale, v_scale):
    return None
