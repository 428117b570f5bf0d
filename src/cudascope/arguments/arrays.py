"""The memory that a caller passes for a pointer: torch tensors, numpy arrays, and objects with DLPack.

A view of a torch tensor or of a numpy array brings all the memory that it is a view of. A kernel may leave the view and
stay in this memory, as on a GPU. A copy of the view (`clone()`, `copy()`) has its own ends. An object with DLPack ends
with its own elements. An object with only `data_ptr()` and `dtype` brings the memory of its `untyped_storage()`, or of
the tensor that is its attribute `base` or `_base`.

Types have their numpy names ("float32", "int8"). Those that numpy lacks have torch's ("bfloat16", "float8_e4m3fn",
"float8_e5m2"). torch is never imported here: a caller who passes a torch tensor has imported it.
"""

import functools
import math
import operator
import sys
from typing import Any, NamedTuple

import numpy as np


class Array(NamedTuple):
    """Memory that a launch may touch. Strides count elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str = "cpu"  # "cpu", or "cuda:0"
    writable: bool = True
    owner: Any = None  # keeps the memory alive
    storage: tuple[int, int] | None = None  # what it is a view of: first address, and the address after the last byte

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last one."""
        last = sum(map(operator.mul, self.shape, self.strides)) - sum(self.strides)  # Σ (size - 1) · stride
        return (last + 1) * self.itemsize

    @property
    def memory(self) -> tuple[int, int]:
        """Where the memory begins and ends that a kernel may touch. All elements lie in it.

        It has a whole number of elements before the first one and after the last one.
        """
        start, end, size = self.address, self.address + self.extent, self.itemsize
        if self.storage:
            start -= max(start - self.storage[0], 0) // size * size
            end += max(self.storage[1] - end, 0) // size * size
        return start, end

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie side by side, those of the last dimension first."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def as_array(value: object) -> Array | None:
    """Describe the memory of `value`; None if it has none. ValueError: a kernel cannot index it."""
    if isinstance(value, Array):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(value)
    if isinstance(value, np.ndarray):
        return _of_numpy(value)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        if value.__dlpack_device__()[0] == 1:  # the CPU
            return _of_numpy(np.from_dlpack(value))
        if torch is not None:
            return _of_torch(torch.from_dlpack(value))
    if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
        return _of_pointer(value)
    return None


def _of_pointer(value: Any) -> Array:
    """Describe an object that Triton takes for a tensor: it has `data_ptr()` and `dtype`, and perhaps nothing else."""
    address, dtype = value.data_ptr(), value.dtype
    itemsize = getattr(dtype, "itemsize", None)
    if itemsize is None:
        raise ValueError(f"has data_ptr(), so its dtype must be torch's or numpy's, got {dtype!r}")
    base = next((getattr(value, name) for name in ("base", "_base") if hasattr(value, name)), None)
    array = None if base is value else as_array(base)
    if hasattr(value, "untyped_storage"):
        storage, device = _storage_of_torch(value), str(getattr(value, "device", "cpu"))
    elif array is not None:
        storage, device = array.memory, array.device
    else:
        raise ValueError(
            "has data_ptr() and dtype, but nothing tells where its memory ends: pass a tensor, or give the object an "
            "attribute `base` that is the tensor it belongs to"
        )
    if not storage[0] <= address < storage[1]:
        raise ValueError(
            f"has a data_ptr() outside of the memory that it belongs to: {address:#x} is not in {storage[0]:#x} to "
            f"{storage[1]:#x}"
        )
    count = (storage[1] - address) // itemsize
    return Array(address, (count,), (1,), str(dtype).removeprefix("torch."), itemsize, device, True, value, storage)


def array_of(value: object, what: str, *, must: str) -> Array:
    """Describe the memory of an argument that must have some. Else ValueError or TypeError: `what`, `must` and why."""
    try:
        array = as_array(value)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from error
    if array is None:
        raise TypeError(f"{must}, got {type(value).__name__}")
    return array


def _of_torch(tensor: Any) -> Array:
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise ValueError(f"must be a dense tensor, got {tensor.layout}") from error
    dtype = str(tensor.dtype)[len("torch.") :]
    device = "cpu" if tensor.is_cpu else str(tensor.device)
    storage = _storage_of_torch(tensor) if tensor.is_cpu else None
    return Array(address, tensor.shape, tensor.stride(), dtype, tensor.element_size(), device, True, tensor, storage)


def _storage_of_torch(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _of_numpy(array: np.ndarray) -> Array:
    if not array.dtype.isnative:
        raise ValueError(f"must have this machine's byte order, got {array.dtype.str}")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"must have strides of whole elements, got strides of {array.strides} bytes")
    strides = tuple(stride // array.itemsize for stride in array.strides)
    if any(stride < 0 for stride, size in zip(strides, array.shape, strict=True) if size > 1):
        raise ValueError(f"must have no negative strides, got strides of {array.strides} bytes")
    dtype, writable, storage = array.dtype.name, array.flags.writeable, _storage_of_numpy(array)
    return Array(array.ctypes.data, array.shape, strides, dtype, array.itemsize, "cpu", writable, array, storage)


def _storage_of_numpy(array: np.ndarray) -> tuple[int, int]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array.base, torch.Tensor):  # of tensor.numpy()
        return _storage_of_torch(array.base)
    last = array.ctypes.data
    for size, stride in zip(array.shape, array.strides, strict=True):
        last += max((size - 1) * stride, 0)
    return array.ctypes.data, last + array.itemsize


def bits_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float64 `values` rounded to nearest, ties to even, in a type of one or two bytes, as bit patterns."""
    nan, midpoints = _FORMATS[dtype][-1], _midpoints(dtype)
    magnitudes = np.abs(values)
    nearest = np.searchsorted(midpoints[:-1], magnitudes)
    ties = midpoints[nearest] == magnitudes
    codes = np.where(np.isnan(values), nan, nearest + (ties & (nearest % 2 == 1)))
    is_short = nan > 0xFF
    return (codes | np.signbit(values) * (0x8000 if is_short else 0x80)).astype(np.uint16 if is_short else np.uint8)


def numbers_of(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values of an array whose dtype numpy may lack. The bit patterns of such a dtype become float32."""
    if dtype not in ITEMSIZES:
        return array
    known = _magnitudes(dtype)
    magnitudes = np.full(1 << 8 * ITEMSIZES[dtype] - 1, np.nan)
    magnitudes[: len(known)] = known
    if dtype != "float8_e4m3fn":  # which has no infinity
        magnitudes[len(known) - 1] = np.inf
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)[array]


def _magnitudes(dtype: str) -> np.ndarray:
    """The numbers of the bit patterns of `dtype`, in float64. That of infinity counts as the next power of two."""
    exponent_bits, mantissa_bits, last, _ = _FORMATS[dtype]
    codes = np.arange(last + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - (1 << exponent_bits - 1) + 1)


@functools.cache
def _midpoints(dtype: str) -> np.ndarray:
    magnitudes = _magnitudes(dtype)
    return np.append((magnitudes[1:] + magnitudes[:-1]) / 2, np.inf)


_FORMATS = {  # the bits of exponent and mantissa; the bit patterns of infinity, or the largest number, and of a NaN
    "float16": (5, 10, 0x7C00, 0x7E00),
    "bfloat16": (8, 7, 0x7F80, 0x7FC0),
    "float8_e4m3fn": (4, 3, 0x7E, 0x7F),
    "float8_e5m2": (5, 2, 0x7C, 0x7F),
}
ITEMSIZES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""The types that numpy lacks: bytes of an element."""
LARGEST = {"float64": float(np.finfo(np.float64).max), "float32": float(np.finfo(np.float32).max), "float16": 65504.0}
LARGEST |= {"bfloat16": float.fromhex("0x1.fep127")}
