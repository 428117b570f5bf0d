"""The tiles of FlashAttention's Triton kernels on each GPU, and the thresholds of their launches (lesson 6).

Tiles change a result by rounding only. A launch takes the first of a list that fits the GPU, so that equal inputs give
equal bits in every process. The lists were chosen by the instructions that the compiler emits for a score, and so that
little is spilled (tests/flash_attention/test_flash_resources.py). FASTEST was timed. `measure_tiles` times a list on
your GPU.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from pagewise.tools.architecture import Architecture
from pagewise.tools.sizes import cdiv, padded

MAX_ROW_STRIDE = 2**24  # elements from row to row. Beyond it an offset in a tile would not fit 32 bits
DELTA_ROWS = 32  # queries per program of the delta kernel, which only reads: any size serves
KEYS_PER_PROGRAM = 128  # assumed for the number of splits; the largest tile of keys in the lists below
LARGE_SHARED_BYTES = 200_000  # sm_90 and sm_100 have more, and keep operands of their products in shared memory


class Tiles(NamedTuple):
    """Tile sizes: `owned` rows per program and `visited` rows per step. The other fields are options of the launch."""

    owned: int
    visited: int
    num_warps: int
    num_stages: int


Direction = Literal["forward", "backward"]

# By compute capability · 10, direction and head size, in 16 bits and not heavy: tiles that beat the first of the lists
# on an H200 (Triton 3.6.0, 4,096 tokens, bfloat16; lessons/measurements/tile_times.json). The forward took 0.82 of its
# time if causal and 0.86 if not, though it has 0.33 instructions for a score instead of 0.24. The backward, which has
# as many as before, took 0.86 (causal; the other was not timed). An SM holds two of these programs and one of the
# others, so one may compute while the other waits. 128 × 64 in 4 warps was as fast in the forward, and spills.
FASTEST = {(90, "forward", 128): Tiles(64, 64, 4, 3), (90, "backward", 128): Tiles(64, 32, 4, 2)}


@functools.cache
def choices(direction: Direction, block_d: int, itemsize: int, gpu: Architecture, heavy: bool) -> tuple[Tiles, ...]:
    """The tiles of a launch that fit the shared memory of `gpu`, the likeliest first; at least one. heavy: `is_heavy`.

    The forward owns queries and visits keys. The backward owns keys and visits queries, and the reverse.
    """
    if not gpu.sm:  # interpreted
        return (Tiles(64, 64, 4, 1),)
    if direction == "forward":
        listed, needs = _forward_tiles, forward_shared_bytes
    else:
        listed, needs = _backward_tiles, backward_shared_bytes
    tiles = listed(block_d, itemsize, heavy, gpu.shared_bytes >= LARGE_SHARED_BYTES)
    fastest = FASTEST.get((gpu.sm, direction, block_d)) if itemsize == 2 and not heavy else None
    if fastest:
        tiles = (fastest, *(each for each in tiles if each != fastest))
    return tuple(each for each in tiles if needs(each, block_d, itemsize, gpu) <= gpu.shared_bytes) or tiles[-1:]


def _forward_tiles(block_d: int, itemsize: int, heavy: bool, large: bool) -> tuple[Tiles, ...]:
    if itemsize == 4:  # no tensor core multiplies float32 exactly
        wide = Tiles(32, 32, 4, 2) if block_d <= 64 else Tiles(16 if heavy else 32, 16, 8, 1)
        tiles = (wide, Tiles(16, 16, 8, 1))
    elif heavy:
        tiles = (Tiles(64, 64, 4, 2),) if block_d <= 64 else (Tiles(64, 32, 8, 2), Tiles(128, 32, 8, 2))
    elif block_d <= 64:
        tiles = (Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2))
        tiles = tiles[::-1] if large else tiles
    elif block_d <= 128:
        tiles = (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2))
        tiles = (*(tiles[::-1] if large else tiles), Tiles(64, 64, 4, 3))
    elif large:
        tiles = (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2))
    else:
        tiles = (Tiles(64, 32, 8, 2), Tiles(128, 32, 8, 2))
    return *tiles, Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)


def _backward_tiles(block_d: int, itemsize: int, heavy: bool, large: bool) -> tuple[Tiles, ...]:
    if itemsize == 4:
        tiles = (Tiles(32, 16, 4, 1) if block_d <= 64 else Tiles(16, 16, 8, 1),)
    elif heavy:
        tiles = (Tiles(64, 32, 8, 1), Tiles(32, 32, 4, 1)) if block_d <= 128 else (Tiles(32, 16, 8, 1),)
    elif block_d <= 64:
        tiles = (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2))
    elif block_d <= 128:
        tiles = (Tiles(128, 32, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2))[:: 1 if large else -1]
    else:
        tiles = (Tiles(32, 64, 8, 1) if large else Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1))
    return *tiles, Tiles(16, 16, 4, 1)


def forward_shared_bytes(tiles: Tiles, block_d: int, itemsize: int, gpu: Architecture) -> int:
    """An upper bound of the forward's shared memory: K and V of every stage, a tile of scores, and Q if it is kept."""
    row, kept = block_d * itemsize, tiles.owned * _keeps_owned(tiles, gpu)
    return 2 * tiles.num_stages * tiles.visited * row + 4 * tiles.owned * tiles.visited + kept * row


def backward_shared_bytes(tiles: Tiles, block_d: int, itemsize: int, gpu: Architecture) -> int:
    """An upper bound of the backward's shared memory: two visited tiles of every stage, P and dS, and the owned tiles.

    One of the owned matrices is converted in shared memory on every GPU. Where both stay there, one visited tile may be
    kept in two layouts, too. sm_75 has float32 sums there as well.
    """
    row = block_d * itemsize
    visited = 2 * tiles.num_stages * tiles.visited * row + 3 * 4 * tiles.num_stages * tiles.visited
    owned = (2 * tiles.owned + tiles.visited if _keeps_owned(tiles, gpu) else tiles.owned) * row
    sums = 2 * (tiles.owned + tiles.visited) * row + 4 * tiles.owned * block_d if gpu.sm < 80 else 0
    return max(sums, visited + owned + 2 * itemsize * tiles.owned * tiles.visited)


def _keeps_owned(tiles: Tiles, gpu: Architecture) -> bool:
    """Whether owned tiles stay in shared memory. sm_75 multiplies without tensor cores. With a single stage, the
    compiler orders the copies."""
    return gpu.shared_bytes >= LARGE_SHARED_BYTES or gpu.sm < 80 or tiles.num_stages == 1


_measured: dict[tuple, Tiles] = {}


def kind_of(direction: Direction, q: Tensor, gpu: Architecture, heavy: bool) -> tuple:
    """What the tiles of a launch for queries q depend on."""
    return direction, padded(q.shape[-1]), q.element_size(), gpu, heavy


def tiles_for(direction: Direction, q: Tensor, gpu: Architecture, heavy: bool) -> Tiles:
    """The tiles that a launch takes: those that `measure` has found for this kind of launch, or the likeliest."""
    kind = kind_of(direction, q, gpu, heavy)
    return _measured.get(kind) or choices(*kind)[0]


def measure(direction: Direction, q: Tensor, gpu: Architecture, heavy: bool, seconds: Callable[[], float]) -> Tiles:
    """Let later launches of this kind take the tiles with which `seconds()` is smallest, and return these tiles."""
    kind, found = kind_of(direction, q, gpu, heavy), {}
    for tiles in choices(*kind):
        _measured[kind] = tiles
        found[tiles] = seconds()
    _measured[kind] = min(found, key=found.get)
    return _measured[kind]


def num_tiles(length: int, tile: int, cu_seqlens: Tensor | None) -> int:
    """Return the number of tiles of `length` rows. Each packed sequence adds one, to begin its own."""
    return cdiv(length, tile) if cu_seqlens is None else length // tile + cu_seqlens.numel() - 1


def sequence_of_each_tile(length: int, tile: int, cu_seqlens: Int32[Tensor, " ends"]) -> Int32[Tensor, " num_tiles"]:
    """The sequence of each of `num_tiles` tiles, found on the device of cu_seqlens.

    Sequence b has the tiles from cu_seqlens[b] // tile + b on. These are enough for its rows, and perhaps one too many.
    """
    on_device = {"dtype": torch.int32, "device": cu_seqlens.device}
    first = cu_seqlens[:-1] // tile + torch.arange(cu_seqlens.numel() - 1, **on_device)
    tiles = torch.arange(num_tiles(length, tile, cu_seqlens), **on_device)
    return torch.searchsorted(first, tiles, right=True, out_int32=True) - 1


def num_splits(programs: int, group: int, num_sms: int) -> int:
    """Splits of a group of query heads in dK and dV: the smallest divisor of it that gives every SM a program."""
    return next((n for n in range(1, group) if group % n == 0 and n * programs >= num_sms), group)
