"""Decode steps for the benchmarks of lessons 5, 7 and 8, dense and paged, and their exact results."""

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
    """One query per sequence. Sequence b has seq_lens[b] keys, or S keys if seq_lens is None."""

    q: Float[Tensor, "B H 1 D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S D"]
    seq_lens: Int32[Tensor, " B"] | None


Inputs = DenseInputs | PagedInputs
ROTATED_BYTES = 2**28  # of K and V. Calls take turns on three inputs that are smaller than this.


def mixed(num_seqs: int, shortest: int, longest: int) -> list[int]:
    """Return lengths that are evenly spaced on a logarithmic axis, shuffled."""
    ratio, steps = longest / shortest, max(1, num_seqs - 1)
    lengths = [round(shortest * ratio ** (i / steps)) for i in range(num_seqs)]
    random.Random(0).shuffle(lengths)
    return lengths


class Shape(NamedTuple):
    """A decode step over `num_seqs` sequences. Flags are 0 or 1.

    Their lengths are `mixed` from `shortest` to `longest`. With `one_long`, one sequence has the longest length and all
    others have the shortest.
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
        """The same number of sequences and tokens, with one length for all sequences."""
        length = sum(self.seq_lens) // self.num_seqs
        return self._replace(shortest=length, longest=length, one_long=0)

    def bytes(self, itemsize: int) -> int:
        """Bytes of K and V that the step must read."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_size * itemsize

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each element of K and V and each query head on it."""
        return 4 * sum(self.seq_lens) * self.num_heads * self.head_size


def paged(num_seqs: int, seq_len: int, num_heads: int, num_kv_heads: int, head_size: int = 128) -> Shape:
    """Return a step over sequences of one length whose keys and values are in blocks."""
    return Shape(num_seqs, seq_len, seq_len, 0, 1, num_heads, num_kv_heads, head_size)


def batches(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[list[Inputs], list[Tensor]]:
    """Return inputs to be taken in turns, and the exact result for each."""
    seeds = range(3 if shape.bytes(dtype.itemsize) < ROTATED_BYTES else 1)
    inputs = [random_inputs(shape, dtype, device, seed) for seed in seeds]
    return inputs, [exact(one) for one in inputs]


def random_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Return contiguous keys and values, or keys and values in blocks that are scattered over the whole cache."""
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
    """Return the oracle's result, one sequence at a time, because float64 takes much memory."""
    out = torch.cat([attention(*(x.double() for x in sequence(inputs, b))) for b in range(len(inputs.q))])
    return out if isinstance(inputs, DenseInputs) else out[:, :, 0]


def sequence(inputs: Inputs, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [1, H, 1, D], k and v [1, Hkv, S, D] of one sequence."""
    if isinstance(inputs, DenseInputs):
        q, k, v, lens = inputs
        S = k.shape[2] if lens is None else int(lens[b])
        return q[b, None], k[b, None, :, :S], v[b, None, :, :S]
    table, S = inputs.block_tables[b].long(), int(inputs.seq_lens[b])
    k, v = (cache[table].flatten(0, 1)[None, :S].transpose(1, 2) for cache in (inputs.k_cache, inputs.v_cache))
    return inputs.q[b, None, :, None], k, v
