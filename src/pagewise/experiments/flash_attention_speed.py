"""How fast is attention over whole sequences, forward and backward? Ours and others' on the same work (lesson 6).

    python -m pagewise.experiments.flash_attention_speed --record lessons/measurements/flash_attention.json

16 k tokens at a time. The measure is the operations of the matrix products that the visible scores need, over time,
against what torch's product of two large matrices reaches on the same machine. The backward counts as 2.5 forwards: it
has five products, not two. `pagewise.experiments.speed` says which shapes are timed where.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.experiments import speed
from pagewise.experiments.peers import Attend, Prepare, peers_of_attention
from pagewise.experiments.speed import AGAIN
from pagewise.flash_attention import flash_attention
from pagewise.naive_attention import attention
from pagewise.tools import benchmark
from pagewise.tools.benchmark import Candidate
from pagewise.tools.device import triton_mode
from pagewise.tools.records import Record

TOKENS, WIDTH = 16384, 2048  # B · S and H · D of all shapes
ROWS = 512  # of the oracle's scores at once: float64 takes room

Inputs = tuple[Float[Tensor, "B H S D"], ...]  # q, k, v and the gradient of out


class Shape(NamedTuple):
    """Self-attention over `batch` sequences of `seq_len` tokens, or the backward of it. Flags are 0 or 1."""

    seq_len: int
    head_size: int
    causal: int
    backward: int
    batch: int
    num_heads: int

    @property
    def flops(self) -> int:
        """Two per visible score and element of q, in each product: two products, and five in the backward."""
        visible = self.seq_len * (self.seq_len + 1) // 2 if self.causal else self.seq_len**2
        return 2 * self.batch * self.num_heads * visible * self.head_size * (5 if self.backward else 2)

    def bytes(self, itemsize: int) -> int:
        """q, k, v and out, and in the backward the gradient of each; the log-sum-exps."""
        rows = self.batch * self.num_heads * self.seq_len
        return rows * ((8 if self.backward else 4) * self.head_size * itemsize + 4)


def shape_of(seq_len: int, head_size: int, causal: int, backward: int) -> Shape:
    """16 k tokens of width 2048."""
    return Shape(seq_len, head_size, causal, backward, TOKENS // seq_len, WIDTH // head_size)


# Targets are set for D = 128 from 4 k tokens on: these come first.
LENGTHS, HEAD_SIZES = (4096, 16384, 512, 1024, 2048, 8192), (128, 64, 256)
SHAPES = [shape_of(S, D, c, b) for D in HEAD_SIZES for S in LENGTHS for c in (0, 1) for b in (0, 1)]
SMALLEST = [Shape(64, 32, c, b, 1, 2) for c in (0, 1) for b in (0, 1)]


def random_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """q, k, v and the gradient of out."""
    generator = torch.Generator(device=device).manual_seed(0)
    sizes = (4, shape.batch, shape.num_heads, shape.seq_len, shape.head_size)
    return tuple(torch.randn(sizes, generator=generator, device=device, dtype=dtype))


def exact(shape: Shape, inputs: Inputs) -> Tensor:
    """The oracle's result: out, or the gradients of q, k and v above each other; a few rows of scores at a time."""
    (*qkv, d_out), S = (x.double() for x in inputs), shape.seq_len
    q, k, v = (x.requires_grad_(bool(shape.backward)) for x in qkv)
    out = torch.empty_like(d_out)
    for b in range(shape.batch):
        for first in range(0, S, ROWS):
            rows = slice(first, min(first + ROWS, S))
            keys = rows.stop if shape.causal else S  # the last row of a causal tile is the last that sees any
            part = attention(q[b, None, :, rows], k[b, None, :, :keys], v[b, None, :, :keys], causal=bool(shape.causal))
            if shape.backward:
                part.backward(d_out[b, None, :, rows])
            else:
                out[b, :, rows] = part[0]
    return torch.stack((q.grad, k.grad, v.grad)) if shape.backward else out


def _ours(backend: str, seq_len: int, causal: bool) -> Attend:
    return partial(flash_attention, causal=causal, backend=backend)


def prepared(attend: Attend, shape: Shape, inputs: Inputs) -> Callable[[], Any]:
    """Return what is timed: the forward, or the backward alone after one forward."""
    *qkv, d_out = inputs
    if not shape.backward:
        return partial(attend, *qkv)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def gradients_fault(run: Callable[[], Sequence[Tensor]], exact: Tensor) -> str | None:
    """Return `benchmark.fault` of whole heads, because single rows of a gradient may be 0."""
    return benchmark.fault(lambda: torch.stack(tuple(run())).flatten(-2), exact.flatten(-2))


class Trials(speed.Trials):
    """The benchmark of this module."""

    title, against, shapes, smallest = "attention", "matmul", SHAPES, SMALLEST
    first = "8: D = 128, 4 k and 16 k"

    @classmethod
    def methods(cls, device: torch.device, shape: Shape) -> dict[str, Prepare]:
        found = {} if triton_mode() == "unavailable" else {"Triton": partial(_ours, "triton")}
        found |= {"CUDA": partial(_ours, "cuda")} | peers_of_attention(device)
        name = next(iter(found))
        return {**found, f"{name}{AGAIN}": found[name]}

    def build(self, shape: Shape) -> tuple[list[Inputs], list[Tensor]]:
        inputs = random_inputs(shape, self.dtype, self.device)
        return [inputs], [exact(shape, inputs)]

    def runs(self, method: str) -> list[Candidate]:
        attend = self.methods(self.device, self.shape)[method](self.shape.seq_len, bool(self.shape.causal))
        return [prepared(attend, self.shape, inputs) for inputs in self.inputs]

    def fault(self, run: Candidate, exact: Tensor) -> str | None:
        return (gradients_fault if self.shape.backward else benchmark.fault)(run, exact)


def draw(found: Sequence[Record], *, head_size: int = 128, causal: bool = True, backward: bool = False) -> None:
    """Draw the rate of each method over the length of the sequences.

    Raises:
        ValueError: no record has a time and this head size, mask and direction.
    """
    from pagewise import figures

    kind = {"head_size": head_size, "causal": int(causal), "backward": int(backward)}
    timed = speed.drawn(found, **kind)
    reached = {(r.what, r.shape["seq_len"]): r.flops / r.seconds / 1e12 for r in timed}
    lengths = sorted({S for _, S in reached})
    figures.lines(
        lengths,
        {r.what: [reached.get((r.what, S), float("nan")) for S in lengths] for r in timed},
        title=f"How fast is the {'backward' if backward else 'forward'}? (D = {head_size}{', causal' * causal})",
        xlabel="tokens of a sequence (16 k together)",
        ylabel="TFLOP/s",
        logx=True,
        caption=speed.caption(timed),
    )


if __name__ == "__main__":
    speed.command(Trials)
