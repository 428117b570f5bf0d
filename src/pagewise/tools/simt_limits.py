"""The limits of a launch that a GPU would keep, kept on the CPU too."""

import math
import re
from collections.abc import Sequence

from pagewise.tools import simt_library

GRID_LIMITS, BLOCK_LIMITS, MAX_THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024


def check_limits(name: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int) -> None:
    """Grid, thread block and dynamic shared memory must be what CUDA allows, or ValueError."""
    for what, sizes, limits in (("grid", grid, GRID_LIMITS), ("block", block, BLOCK_LIMITS)):
        least = int(what == "block")
        for axis, size, limit in zip("xyz", sizes, limits, strict=True):
            if not least <= size <= limit:
                raise ValueError(f"{name}: {what}.{axis} must be between {least} and {limit}, got {size}")
    if math.prod(block) > MAX_THREADS:
        raise ValueError(
            f"{name}: a thread block has at most {MAX_THREADS} threads, got {_dims(block)} = {math.prod(block)}"
        )
    if not 0 <= shared_bytes <= simt_library.MAX_SHARED_BYTES:
        raise ValueError(
            f"{name}: a thread block has at most {simt_library.MAX_SHARED_BYTES} bytes of shared memory, "
            f"got {shared_bytes}"
        )


def check_shared(name: str, library: simt_library.Library, shared_bytes: int) -> None:
    """A kernel's own shared arrays, and they and the dynamic memory together, must fit, or ValueError."""
    function = name.partition("<")[0].rpartition("::")[2]
    # what belongs to the functions it calls is not counted
    mangled = re.compile(rf"_ZZ(N.*)?{len(function)}{function}")
    static = sum(array.bytes for array in library.shared if mangled.match(array.symbol))
    if static > simt_library.MAX_STATIC_SHARED_BYTES:
        raise ValueError(
            f"{name}: a kernel's __shared__ arrays of fixed size have at most "
            f"{simt_library.MAX_STATIC_SHARED_BYTES} bytes, got {static}: use extern __shared__"
        )
    if static + shared_bytes > simt_library.MAX_SHARED_BYTES:
        raise ValueError(
            f"{name}: a thread block has at most {simt_library.MAX_SHARED_BYTES} bytes of shared memory, "
            f"got {static} + {shared_bytes} = {static + shared_bytes}"
        )


def _dims(dims: Sequence[int]) -> str:
    return " × ".join(map(str, dims))
