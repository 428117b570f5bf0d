"""Choices that only a GPU can justify, for the decode kernels: tiles, splits, programs (lessons 5, 7, 8 and 9).

Each has its reason. An H200 has tested two of them (27 November 2026, Triton 3.6.0, bfloat16, 64 query and 8 KV heads,
head size 128), and `make gpu-check` tests them on your GPU.

- Tiles. With 1 and 8 sequences of 8,192 keys, not paged, no tiles of 24 were more than 4 % faster than these
  (lessons/measurements/tile_times.json). Other shapes were not timed.
- Splits (lessons/measurements/flash_decoding.json). Where lengths differ, equal shares of all keys took 0.06 to 0.57 of
  the time of `splits_that_fill`. Where they are equal, it depends on the batch: one sequence of 131,072 keys took 0.90
  of that time, 16 of 14,737 took 0.99, 32 of 5,088 took 1.02, and 64 of 7,897 took 1.13. The heuristic does not cut the
  last ones, so 512 programs run, where equal shares are 264. Whether more PROGRAMS_PER_SM would close that gap was not
  timed, so the constants are as they were.
"""

from typing import NamedTuple

import torch

from pagewise.tools.checks import check_count
from pagewise.tools.sizes import cdiv, padded

PROGRAMS_PER_SM = 2  # programs that run at once: while one waits for memory, the other computes
MIN_KEYS = 128  # fewest keys per split, on average: a shorter split takes longer to merge than to compute
CHUNK_KEYS = 4096  # keys per split of a chunk of a prompt, whose tile of queries is work enough for a program
MAX_SPLITS = 128  # most splits of a sequence, as in FlashAttention-2
LOADS = 8  # partial results that a merge reads at once


class Tiles(NamedTuple):
    """The rows and keys that a program handles at once, and the threads that do it."""

    rows: int  # query rows of one KV head: pairs of a query and a head
    keys: int
    num_warps: int
    num_stages: int  # tiles on their way from memory at once, plus one

    @property
    def launch_options(self) -> dict[str, int]:
        """The options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def decode_tiles(rows: int, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tiles:
    """Return tiles for `rows` query rows per KV head.

    Registers limit the tiles. They hold acc [rows, D], and in float32 the operands of the products too, because no
    tensor core multiplies float32 exactly. Shared memory holds `num_stages` tiles of K and V. All choices fit the
    99 KB that a thread block has on sm_86, sm_89 and sm_120.
    """
    block_d = padded(head_size)
    same = cache_dtype == dtype
    if dtype == torch.float32:
        return Tiles(16, keys=32 if same and block_d <= 128 else 16, num_warps=8, num_stages=2 if same else 1)
    keys = max(32, min(64, 8192 // block_d))
    if rows <= 16 or block_d > 128:
        return Tiles(16, keys, num_warps=2 if block_d <= 128 else 4, num_stages=3)
    keys = keys if same else 32  # no registers are left to convert a float8 tile while the next one is on its way
    if rows <= 32:
        return Tiles(32, keys, num_warps=4, num_stages=3)
    if rows <= 64:
        return Tiles(64, keys, num_warps=4, num_stages=2)
    return Tiles(128, keys, num_warps=8, num_stages=2)  # 16 rows per warp: no row is shared by two warps


def num_splits_heuristic(num_tiles: int, num_sms: int, num_key_tiles: int, max_splits: int) -> int:
    """Return the number of splits per thread block that fills a GPU's last wave.

        waves(s) = num_tiles · s / num_sms        efficiency(s) = waves(s) / ⌈waves(s)⌉

    The result is 1 if efficiency(1) is at least 0.8, because a merge has its price too. Otherwise the result is the
    smallest s that reaches 0.85 of the best efficiency. If the longest split of s has as many tiles,
    ⌈num_key_tiles / s⌉, as that of s − 1, then s gains nothing and is left out.

    Args:
        num_tiles: thread blocks without splitting.
        num_sms: thread blocks that run at once.
        num_key_tiles: tiles of keys in each thread block.
        max_splits: the largest result.

    Returns:
        1 <= splits <= min(max_splits, num_key_tiles), and 1 where there are no tiles.

    Raises:
        ValueError, TypeError: an argument is not a count.

    The efficiency and the 0.85 are FlashAttention-2's. It does not split from 0.8 · num_sms thread blocks on.
    """
    for name, count in (("num_tiles", num_tiles), ("num_key_tiles", num_key_tiles)):
        check_count(name, count, minimum=0)
    for name, count in (("num_sms", num_sms), ("max_splits", max_splits)):
        check_count(name, count)
    counts = num_tiles, num_sms, num_key_tiles, max_splits
    num_tiles, num_sms, num_key_tiles, max_splits = map(int, counts)  # numpy's integers would wrap around

    def efficiency(s: int) -> float:
        return num_tiles * s / num_sms / max(1, cdiv(num_tiles * s, num_sms))

    limit = max(1, min(max_splits, num_key_tiles))
    if limit == 1 or num_tiles == 0 or efficiency(1) >= 0.8:
        return 1
    shorter = [s for s in range(1, limit + 1) if s == 1 or cdiv(num_key_tiles, s) < cdiv(num_key_tiles, s - 1)]
    best = max(map(efficiency, shorter))
    return next(s for s in shorter if efficiency(s) >= 0.85 * best)


def splits_that_fill(num_items: int, num_keys: int, tile: int, num_sms: int) -> int:
    """Return the number of splits per item that fills a GPU, for `num_items` items of at most `num_keys` keys."""
    return num_splits_heuristic(num_items, PROGRAMS_PER_SM * num_sms, cdiv(num_keys, max(tile, MIN_KEYS)), MAX_SPLITS)
