"""Two ratios of lesson 4, measured in one run: `python tests/speed_paged_blocks.py`. Not a test.

Each number is the best of many short runs, and what is compared is run in turns, so that a busy machine slows both.
"""

import itertools
import time

import torch
import torch.nn.functional as F

from pagewise.naive_attention import attention
from pagewise.paged_attention.in_torch import gathered_attention, streamed_attention
from pagewise.paged_attention.inputs import DECODING, PagedInputs
from pagewise.paged_blocks import BlockManager


def best_in_turns(calls: dict, rounds: int) -> dict:
    """Seconds of each call, best of `rounds`, one round of all calls after the other."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


STEPS = 4000


def appender(num_sequences: int, num_blocks: int, *, block_size: int = 16, taken: float = 0.5):
    """A call that appends STEPS tokens, to each sequence in turn, in a pool of which a share is taken.

    The sequences fill their blocks at different times, as in a running engine, and have all been appended to before.
    """
    manager = BlockManager(num_blocks, block_size, prefix_cache=True)
    for i in range(num_sequences):
        manager.allocate(i, [i] * (int(num_blocks * taken) // num_sequences * block_size + 1 + i % block_size))
        manager.append(i, 0)
    turns = itertools.cycle(range(num_sequences))

    def call():
        for i in itertools.islice(turns, STEPS):
            manager.append(i, 0)

    return call


def manager_overhead() -> None:
    """µs per appended token against the number of blocks and of sequences."""
    pools = [(1, 1_000), (100, 1_000), (100, 100_000), (10_000, 100_000)]
    best = dict.fromkeys(pools, float("inf"))
    for _ in range(15):
        for pool, seconds in best_in_turns({pool: appender(*pool) for pool in pools}, 1).items():
            best[pool] = min(best[pool], seconds)
    for (sequences, blocks), seconds in best.items():
        each = seconds / STEPS * 1e6
        print(f"append: {sequences:6d} sequences, {blocks:6d} blocks: {each:.2f} µs, × {seconds / best[pools[0]]:.2f}")


def paged_against_contiguous() -> None:
    """Torch paged decode against SDPA on contiguous K and V: 32 sequences × 1024 tokens, float32."""
    B, S, P, D = 32, 1024, 16, 64
    for H, Hkv in ((8, 8), (8, 2)):
        generator = torch.Generator().manual_seed(0)
        k_cache, v_cache = torch.randn(2, B * S // P, P, Hkv, D, generator=generator)
        tables = torch.randperm(B * S // P, generator=generator).view(B, S // P)
        k, v = (cache[tables].flatten(1, 2).transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
        q, lens = torch.randn(B, H, D, generator=generator), torch.full((B,), S, dtype=torch.int32)
        paged = PagedInputs(q, k_cache, v_cache, tables.int(), lens), DECODING
        times = best_in_turns(
            {
                "SDPA, contiguous": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
                    q[:, :, None], k, v, enable_gqa=True
                ),
                "naive, contiguous": lambda q=q, k=k, v=v: attention(q[:, :, None], k, v),
                "paged, gathered": lambda paged=paged: gathered_attention(*paged),
                "paged, streamed": lambda paged=paged: streamed_attention(*paged),
            },
            15,
        )
        print(f"decode, {H} heads over {Hkv} KV heads:")
        for name, seconds in times.items():
            print(f"  {name:18s} {seconds * 1e3:7.1f} ms, × {seconds / times['SDPA, contiguous']:.1f}")


if __name__ == "__main__":
    manager_overhead()
    paged_against_contiguous()
