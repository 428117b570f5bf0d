"""The limits that depend on a kernel's own shared memory. The CPU refuses the launches that a GPU would refuse."""

import functools
import re

from cudascope.arguments.launch_shape import MAX_SHARED_BYTES, MAX_STATIC_SHARED_BYTES, Shape
from cudascope.cpp.file import File
from cudascope.cpp.signature import base_name
from cudascope.cpu.library import Library
from cudascope.gpus import H100, thread_blocks_per_sm

MAX_CONSTANT_BYTES = 64 << 10


def blocks_at_once(library: Library, block: Shape, shared_bytes: int) -> int:
    """How many thread blocks of `block` an H100 holds at once, by threads and shared memory."""
    shared = sum(array.bytes for array in library.shared) + shared_bytes
    return _on_h100(block[0] * block[1] * block[2], shared)


@functools.lru_cache(maxsize=256)
def _on_h100(threads: int, shared_bytes: int) -> int:
    fits = thread_blocks_per_sm(H100, threads, 1, shared_bytes)
    return H100.num_sms * max(1, min(fits.values()))


def check_grid(name: str, library: Library, grid: Shape, at_once: int) -> None:
    """ValueError for more thread blocks than can be, or than can wait for each other at a kernel's grid barrier."""
    blocks = grid[0] * grid[1] * grid[2]
    if blocks >= 2**32:
        raise ValueError(f"kernel {name}: grid {grid} has {blocks} thread blocks, more than 32 bits can count here")
    if library.has_grid_sync and blocks > at_once:
        raise ValueError(
            f"kernel {name}: grid {grid} has {blocks} thread blocks, but at a grid barrier all must run at once, and "
            f"an H100 holds {at_once} of this size: launch fewer and let each do more"
        )


def check_constants(name: str, library: Library, file: File) -> None:
    """The __constant__ variables of a kernel's file must fit into a GPU's constant memory, or ValueError."""
    pieces = (piece for piece in file.pieces if piece.is_variable)
    declared = set().union(*(each.names for each in pieces if "__constant__" in file.tokens[each.start : each.end]))
    total = sum(each.bytes for each in library.objects if each.name in declared)
    if total > MAX_CONSTANT_BYTES:
        raise ValueError(
            f"kernel {name}: the __constant__ variables of its file can have at most {MAX_CONSTANT_BYTES} bytes, got "
            f"{total}: pass the larger ones as const tensors"
        )


@functools.cache
def _own_arrays(name: str) -> re.Pattern:
    """The symbols of a kernel's shared arrays. Arrays of the functions that it calls are not counted."""
    function = base_name(name)
    return re.compile(rf"_ZZ(N.*)?{len(function)}{function}")


def own_shared_bytes(name: str, library: Library) -> int:
    """The bytes of a kernel's own shared arrays of fixed size, without those of the functions that it calls."""
    return sum(array.bytes for array in library.shared if _own_arrays(name).match(array.symbol))


def check_shared(name: str, library: Library, shared_bytes: int) -> None:
    """A kernel's own shared arrays, and they and the dynamic memory together, must fit, or ValueError."""
    static = own_shared_bytes(name, library)
    if static > MAX_STATIC_SHARED_BYTES:
        raise ValueError(
            f"kernel {name}: its __shared__ arrays of fixed size can have at most {MAX_STATIC_SHARED_BYTES} bytes, "
            f"got {static}: use extern __shared__"
        )
    if static + shared_bytes > MAX_SHARED_BYTES:
        raise ValueError(
            f"kernel {name}: shared_bytes = {shared_bytes}, but a thread block can have at most {MAX_SHARED_BYTES} "
            f"bytes of shared memory, got {static} + {shared_bytes} = {static + shared_bytes} with the arrays it "
            f"declares itself (an H100's limit, kept on the CPU too)"
        )
