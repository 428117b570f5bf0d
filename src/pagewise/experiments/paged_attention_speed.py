"""How fast is paged decode? Every way of it on the same work, as a fraction of the memory's bandwidth (lesson 5).

    python -m pagewise.experiments.paged_attention_speed --record lessons/measurements/paged_attention.json

A decode step must read K and V once. So the measure is bytes of K and V over time, against what a plain copy reaches on
the same machine, from a cold L2 cache. `pagewise.experiments.speed` says which shapes are timed where.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagewise.experiments import speed
from pagewise.experiments.paged_attention_peers import Batches, Run, peers, side_by_side
from pagewise.experiments.speed import AGAIN, ROTATED_BYTES
from pagewise.naive_attention import attention
from pagewise.paged_attention import paged_attention, paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_blocks.cache import to_vllm_layout
from pagewise.tools.benchmark import Record
from pagewise.tools.device import triton_mode


class Shape(NamedTuple):
    """A decode step: `num_seqs` sequences of `seq_len` tokens each."""

    num_seqs: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    block_size: int = 16

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of K and V that the step must read."""
        return 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_size * itemsize

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each element of K and V and each query head on it."""
        return 4 * self.num_seqs * self.seq_len * self.num_heads * self.head_size


# Targets are set where K and V are 128 MB, a server's ordinary step, and more than 1 GB: these three come first.
FIRST = [Shape(B, S, 64, 8) for B, S in ((1, 32768), (8, 8192), (64, 8192))]
_ALL = [Shape(B, S, *heads) for heads in ((64, 8), (32, 32)) for B in (1, 8, 64) for S in (1024, 8192, 32768)]
SHAPES = list(dict.fromkeys(FIRST + _ALL))
SMALLEST = [Shape(1, 1024, 8, 1), Shape(1, 1024, 4, 4)]


def random_batch(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> PagedInputs:
    """Sequences of one length, their blocks scattered over the whole cache."""
    B, S, H, Hkv, D, P = shape
    generator = torch.Generator(device=device).manual_seed(seed)
    N = B * (S // P)
    k_cache, v_cache = torch.randn(2, N, P, Hkv, D, generator=generator, device=device, dtype=dtype)
    tables = torch.randperm(N, generator=generator, device=device).view(B, -1).int()
    lens = torch.full((B,), S, dtype=torch.int32, device=device)
    q = torch.randn(B, H, D, generator=generator, device=device, dtype=dtype)
    return PagedInputs(q, k_cache, v_cache, tables, lens)


def exact(batch: PagedInputs) -> Tensor:
    """The oracle's result [B, H, D], a sequence at a time: float64 takes room."""
    out = []
    for b in range(len(batch.q)):
        q, k, v = side_by_side(batch._replace(q=batch.q[b : b + 1], block_tables=batch.block_tables[b : b + 1]))
        out.append(attention(q[:, :, None].double(), *(t.transpose(1, 2).double() for t in (k, v)))[:, :, 0])
    return torch.cat(out)


def methods(device: torch.device) -> dict[str, Callable[[Batches], list[Run]]]:
    """Every method that this machine has, by name: given batches, a call for each that returns [B, H, D].

    The first one comes again at the end: how far its two times are apart is the noise.
    """
    found = {
        "CUDA v1": partial(_cuda, paged_attention_v1),
        "CUDA v2": partial(_cuda, paged_attention_v2),
        "CUDA grouped": partial(_cuda, paged_attention_grouped),
        "Triton": lambda batches: [partial(paged_attention, *b[:5], backend="triton", check=False) for b in batches],
        "gather + SDPA": lambda batches: [partial(_gathered, batch) for batch in batches],
    }
    if triton_mode() == "unavailable":
        del found["Triton"]
    found |= peers(device)
    return {**found, f"CUDA v1{AGAIN}": found["CUDA v1"]}


def _cuda(version: Callable[..., Tensor], batches: Batches) -> list[Run]:
    runs = []
    for q, k_cache, v_cache, tables, lens, _ in batches:
        longest = tables.shape[1] * k_cache.shape[1]
        caches = to_vllm_layout(k_cache, v_cache)
        runs.append(partial(version, q, *caches, tables, lens, max_seq_len=longest, check=False))
    return runs


def _gathered(batch: PagedInputs) -> Tensor:
    q, k, v = side_by_side(batch)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=q.shape[1] != k.shape[1])[:, :, 0]


class Trials(speed.Trials):
    """Tries one method on one shape after the other."""

    def build(self, shape: Shape) -> tuple[Batches, list[Tensor]]:
        seeds = range(3 if shape.kv_bytes(self.dtype.itemsize) < ROTATED_BYTES else 1)
        batches = [random_batch(shape, self.dtype, self.device, seed) for seed in seeds]
        return batches, [exact(batch) for batch in batches]

    def runs(self, method: str) -> list[Run]:
        return methods(self.device)[method](self.inputs)


def records(
    shapes: Sequence[Shape],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    rate: float | None = None,
    limit: float = 120.0,
    **options: int,
) -> Iterator[Record]:
    """A record per shape and method, as they come.

    `rate`: bytes per second of a copy; `limit`: seconds per trial; `options`: `benchmark.trial`'s.
    """
    return speed.records(
        Trials,
        [(shape, method) for shape in shapes for method in methods(device)],
        "paged decode",
        device=device,
        dtype=dtype,
        options=options,
        nbytes=lambda shape: shape.kv_bytes(dtype.itemsize),
        bound=("copy", rate),
        limit=limit,
    )


def draw(found: Sequence[Record], *, num_kv_heads: int = 8) -> None:
    """The bandwidth that each method reached in records, as a share of a copy's; for shapes with so many KV heads."""
    from pagewise import figures

    timed = [r for r in found if r.fraction is not None and r.shape["num_kv_heads"] == num_kv_heads]
    timed = [r for r in timed if not r.what.endswith(AGAIN)]
    reached = {(r.what, r.shape["num_seqs"], r.shape["seq_len"]): 100 * r.fraction for r in timed}
    shapes = sorted({key[1:] for key in reached})
    figures.bars(
        [f"{B} × {S // 1024} k" for B, S in shapes],
        {r.what: [reached.get((r.what, *shape), 0.0) for shape in shapes] for r in timed},
        title=f"How fast is a decode step? ({timed[0].shape['num_heads']} query heads, {num_kv_heads} KV heads)",
        ylabel="K and V per second (% of a copy's bandwidth)",
        caption=f"sequences × tokens; {timed[0].device}, {timed[0].date[:10]}, torch {timed[0].versions['torch']}",
        width=9.6,
    )


def main() -> None:
    """The command line."""
    description = "Time every way of paged decode on this machine."
    speed.command(description, SHAPES, SMALLEST, records, against="copy", first="3: those with targets")


if __name__ == "__main__":
    main()
