"""The limits of a launch, and their check. The numbers are an H100's, and they hold on the CPU too."""

import operator
from typing import Any, NamedTuple

from cudascope.gpus import H100

Shape = tuple[int, int, int]

MAX_GRID: Shape = (2**31 - 1, 65535, 65535)
MAX_BLOCK: Shape = (1024, 1024, 64)
MAX_THREADS = 1024  # of a thread block
MAX_SHARED_BYTES = H100.shared_bytes  # of a thread block, static and dynamic together. A GPU is asked for its own limit
MAX_STATIC_SHARED_BYTES = 48 * 1024  # beyond it shared memory is dynamic, and a GPU wants to be asked for it


class LaunchShape(NamedTuple):
    """How a kernel is launched: x first, and dynamic shared memory in bytes."""

    grid: Shape
    block: Shape
    shared_bytes: int


def read_launch(function: str, written: Any, max_threads: int | None) -> LaunchShape:
    """Read the brackets of `kernel[grid, block, shared_bytes]`. `max_threads`: the kernel's __launch_bounds__.

    Raises:
        TypeError, ValueError: it is no launch, or none that CUDA allows. The launch itself checks the shared memory.
    """
    if not isinstance(written, tuple) or len(written) not in (2, 3):
        raise TypeError(f"kernel {function}: launch as kernel[grid, block] or kernel[grid, block, shared_bytes]")
    grid = _shape(function, "grid", written[0], MAX_GRID)
    block = _shape(function, "block", written[1], MAX_BLOCK)
    shared_bytes = _count(function, "shared_bytes", written[2]) if len(written) == 3 else 0
    threads, most = block[0] * block[1] * block[2], min(MAX_THREADS, max_threads or MAX_THREADS)
    if threads > most:
        why = "its __launch_bounds__" if most < MAX_THREADS else "CUDA's limit"
        raise ValueError(f"kernel {function}: block {block} has {threads} threads, at most {most} ({why})")
    return LaunchShape(grid, block, shared_bytes)


def _shape(function: str, name: str, value: object, limits: Shape) -> Shape:
    sizes = list(value) if isinstance(value, tuple | list) else [value]
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"kernel {function}: {name} must be an int or a tuple of 1 to 3, got {value!r}")
    shape = tuple(_count(function, name, size) for size in sizes) + (1,) * (3 - len(sizes))
    if 0 in shape:
        raise ValueError(f"kernel {function}: {name} must be at least 1 everywhere, got {value!r}: launch nothing")
    if any(size > limit for size, limit in zip(shape, limits, strict=True)):
        raise ValueError(f"kernel {function}: {name} must be at most {limits}, got {shape}")
    return shape


def _count(function: str, name: str, value: object) -> int:
    try:
        if isinstance(value, bool) or hasattr(value, "__dlpack__"):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"kernel {function}: {name} must be made of ints, got {value!r}") from None
    if count < 0:
        raise ValueError(f"kernel {function}: {name} must not be negative, got {value!r}")
    return count
