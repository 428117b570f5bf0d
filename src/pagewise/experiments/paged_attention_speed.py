"""How fast is paged decode? Every method on the same work, as a fraction of the memory's bandwidth (lesson 5).

    python -m pagewise.experiments.paged_attention_speed --record lessons/measurements/paged_attention.json

A decode step must read K and V once. The measure is therefore bytes of K and V over time, as a fraction of the rate of
a plain copy on the same machine, from a cold L2 cache. `pagewise.experiments.speed` says which shapes are timed where.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagewise.experiments import speed
from pagewise.experiments.decode_inputs import Shape, batches, paged
from pagewise.experiments.peers import PreparePagedDecode, Run, peers_of_paged_decode
from pagewise.experiments.speed import AGAIN
from pagewise.paged_attention import paged_attention, paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_blocks.cache import to_vllm_layout
from pagewise.tools.device import triton_mode
from pagewise.tools.records import Record

# Targets are set where K and V are 128 MB, a server's ordinary step, and more than 1 GB: these three come first.
FIRST = [paged(B, S, 64, 8) for B, S in ((1, 32768), (8, 8192), (64, 8192))]
_ALL = [paged(B, S, *heads) for heads in ((64, 8), (32, 32)) for B in (1, 8, 64) for S in (1024, 8192, 32768)]
SHAPES = list(dict.fromkeys(FIRST + _ALL))
SMALLEST = [paged(1, 1024, 8, 1), paged(1, 1024, 4, 4)]


class Trials(speed.Trials):
    """The benchmark of this module."""

    title, shapes, smallest = "paged decode", SHAPES, SMALLEST
    first = "3: those with targets"

    @classmethod
    def methods(cls, device: torch.device, shape: Shape) -> dict[str, PreparePagedDecode]:
        found = {
            "CUDA v1": partial(_cuda, paged_attention_v1),
            "CUDA v2": partial(_cuda, paged_attention_v2),
            "CUDA grouped": partial(_cuda, paged_attention_grouped),
            "Triton": _triton,
            "gather + SDPA": lambda inputs: [partial(_gathered, batch) for batch in inputs],
        }
        if triton_mode() == "unavailable":
            del found["Triton"]
        return {**found, **peers_of_paged_decode(device), f"CUDA v1{AGAIN}": found["CUDA v1"]}

    def build(self, shape: Shape) -> tuple[list[PagedInputs], list[Tensor]]:
        return batches(shape, self.dtype, self.device)


def _cuda(version: Callable[..., Tensor], inputs: Sequence[PagedInputs]) -> list[Run]:
    runs = []
    for q, k_cache, v_cache, tables, lens, _ in inputs:
        longest = tables.shape[1] * k_cache.shape[1]
        caches = to_vllm_layout(k_cache, v_cache)
        runs.append(partial(version, q, *caches, tables, lens, max_seq_len=longest, check=False))
    return runs


def _triton(inputs: Sequence[PagedInputs]) -> list[Run]:
    return [partial(paged_attention, *batch[:5], backend="triton", check=False) for batch in inputs]


def _gathered(batch: PagedInputs) -> Tensor:
    k, v = (cache[batch.block_tables].flatten(1, 2).transpose(1, 2) for cache in (batch.k_cache, batch.v_cache))
    return scaled_dot_product_attention(batch.q[:, :, None], k, v, enable_gqa=batch.q.shape[1] != k.shape[1])[:, :, 0]


def draw(found: Sequence[Record], *, num_kv_heads: int = 8) -> None:
    """Draw the bandwidth that each method reached, as a share of a copy's, for shapes with `num_kv_heads`.

    Raises:
        ValueError: no record has a time and that number of KV heads.
    """
    from pagewise import figures

    timed = speed.drawn([r for r in found if r.fraction is not None], num_kv_heads=num_kv_heads)
    reached = {(r.what, r.shape["num_seqs"], r.shape["longest"]): 100 * r.fraction for r in timed}
    shapes = sorted({key[1:] for key in reached})
    figures.bars(
        [f"{B} × {S // 1024} k" for B, S in shapes],
        {r.what: [reached.get((r.what, *shape), 0.0) for shape in shapes] for r in timed},
        title=f"How fast is a decode step? ({timed[0].shape['num_heads']} query heads, {num_kv_heads} KV heads)",
        ylabel="K and V per second (% of a copy's bandwidth)",
        caption=f"sequences × tokens; {speed.caption(timed)}",
        width=9.6,
    )


if __name__ == "__main__":
    speed.command(Trials)
