"""Decode steps over sequences of equal and of different lengths, dense and paged, and their exact results.

For Flash-Decoding's benchmark (lessons 7 and 8).
"""

import random
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from pagewise.naive_attention import attention
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.tools.sizes import cdiv


class DenseInputs(NamedTuple):
    """One query per sequence; sequence b has seq_lens[b] keys, where they are not S each."""

    q: Float[Tensor, "B H 1 D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S D"]
    seq_lens: Int32[Tensor, " B"] | None


Inputs = DenseInputs | PagedInputs


def mixed(num_seqs: int, shortest: int, longest: int) -> list[int]:
    """Lengths evenly spaced on a logarithmic axis, in an order that is no order."""
    ratio, steps = longest / shortest, max(1, num_seqs - 1)
    lengths = [round(shortest * ratio ** (i / steps)) for i in range(num_seqs)]
    random.Random(0).shuffle(lengths)
    return lengths


class Shape(NamedTuple):
    """A decode step over `num_seqs` sequences. Flags are 0 or 1.

    Their lengths are `mixed`, from `shortest` to `longest`; with `one_long` only one is longest, all others shortest.
    """

    num_seqs: int
    shortest: int
    longest: int
    one_long: int = 0
    paged: int = 0
    num_heads: int = 64
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def seq_lens(self) -> list[int]:
        """The tokens of each sequence."""
        if self.one_long:
            return [self.longest] + [self.shortest] * (self.num_seqs - 1)
        return mixed(self.num_seqs, self.shortest, self.longest)

    @property
    def equal(self) -> "Shape":
        """As many sequences with as many tokens, but of one length."""
        length = sum(self.seq_lens) // self.num_seqs
        return self._replace(shortest=length, longest=length, one_long=0)

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of K and V that the step must read."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_size * itemsize

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each element of K and V and each query head on it."""
        return 4 * sum(self.seq_lens) * self.num_heads * self.head_size


def random_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Keys and values side by side, or blocks scattered over the whole cache."""
    generator = torch.Generator(device=device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    B, Hkv, D, P = shape.num_seqs, shape.num_kv_heads, shape.head_size, shape.block_size
    q = normal(B, shape.num_heads, D)
    lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
    if not shape.paged:
        k, v = normal(2, B, Hkv, shape.longest, D)
        return DenseInputs(q[:, :, None], k, v, lens.to(device) if shape.shortest < shape.longest else None)
    counts = [cdiv(length, P) for length in lens.tolist()]
    k_cache, v_cache = normal(2, sum(counts), P, Hkv, D)
    blocks = torch.randperm(sum(counts), generator=generator, device=device).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True).int()
    return PagedInputs(q, k_cache, v_cache, tables, lens.to(device))


def exact(inputs: Inputs) -> Tensor:
    """The oracle's result, a sequence at a time: float64 takes room."""
    out = torch.cat([attention(*(x.double() for x in sequence(inputs, b))) for b in range(len(inputs.q))])
    return out if isinstance(inputs, DenseInputs) else out[:, :, 0]


def sequence(inputs: Inputs, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, H, 1, D], k and v [1, Hkv, S, D] of one sequence."""
    if isinstance(inputs, DenseInputs):
        q, k, v, lens = inputs
        S = k.shape[2] if lens is None else int(lens[b])
        return q[b, None], k[b, None, :, :S], v[b, None, :, :S]
    table, S = inputs.block_tables[b].long(), int(inputs.seq_lens[b])
    k, v = (cache[table].flatten(0, 1)[None, :S].transpose(1, 2) for cache in (inputs.k_cache, inputs.v_cache))
    return inputs.q[b, None, :, None], k, v
