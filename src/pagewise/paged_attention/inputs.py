"""The inputs of paged attention: tensors that belong together, and how the keys are cut (lessons 4 and 5)."""

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_blocks.write import cache_sizes
from pagewise.tools.checks import FLOAT32_MAX, check_count, check_number, check_same, check_shape, check_tensor
from pagewise.tools.sizes import cdiv

Queries = Float[Tensor, "B H T D"]
Keys = Shaped[Tensor, "B Hkv S D"]  # and values
OutAndLse = tuple[Queries, Float[Tensor, "B H T"]]
OfDecoding = tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]  # out and lse of one query per sequence
DECODING = ScoreOptions(causal=True)  # a sequence's query is its newest token and sees all of its tokens


class Splits(NamedTuple):
    """How keys are cut: splits of each sequence, keys of each split, or programs that share all work (lesson 7)."""

    way: Literal["num", "size", "share"]
    count: int

    def bounds(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the splits [start, end) of one sequence's keys first … end − 1, at least one. Not for "share"."""
        if self.way == "share":
            raise ValueError("the splits of programs that share all work depend on all sequences, not on one")
        if self.way == "size":
            return list(pairwise([*(range(first, end, self.count) or [first]), end]))
        n = max(1, min(self.count, end - first))
        return list(pairwise(first + (end - first) * i // n for i in range(n + 1)))


ONE_SPLIT = Splits("num", 1)


def checked_splits(num_splits: int | None, split_size: int | None = None) -> Splits | None:
    """Return the splits that a caller asks for, or None. An argument that is no positive int, or both, is refused."""
    if num_splits is not None and split_size is not None:
        raise ValueError(f"num_splits = {num_splits} and split_size = {split_size} exclude each other: give one")
    for name, count, way in (("num_splits", num_splits, "num"), ("split_size", split_size, "size")):
        if count is not None:
            check_count(name, count)
            return Splits(way, int(count))
    return None


class Used(NamedTuple):
    """The part of the block tables that sequences use."""

    entries: Bool[Tensor, "B M"]  # whether some query sees the block
    columns: range  # that hold all of these entries
    longest: int  # the largest of the lengths


class PagedInputs(NamedTuple):
    """Queries, a cache in either layout, and the blocks of each sequence.

    A scale of the cache is applied once, not to each number. k_scale is part of the scale of the scores, and v_scale
    multiplies the output.
    """

    q: Float[Tensor, "B H D"]  # or, packed, [total_q, H, D]
    k_cache: Shaped[Tensor, "..."]  # [N, P, Hkv, D], or vLLM's [N, Hkv, D/x, P, x]
    v_cache: Shaped[Tensor, "..."]  # [N, P, Hkv, D], or vLLM's [N, Hkv, D, P]
    block_tables: Int32[Tensor, "B M"]
    seq_lens: Int32[Tensor, " B"]
    v_scale: float = 1.0

    @property
    def cache_sizes(self) -> tuple[int, int, int, int]:
        """N, P, Hkv, D of the cache."""
        return cache_sizes(self.k_cache, self.v_cache)


def checked_options(inputs: PagedInputs, options: ScoreOptions, k_scale: float, num_seqs: int) -> ScoreOptions:
    """Return the options, k_scale included, if tables, lengths, devices, options and scales fit, in either layout."""
    q, block_tables, seq_lens = inputs.q, inputs.block_tables, inputs.seq_lens
    check_tensor("block_tables", block_tables, "B M", dtypes=(torch.int32,))
    check_tensor("seq_lens", seq_lens, "B", dtypes=(torch.int32,))
    caches = {"k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    check_same("device", q=q, **caches, block_tables=block_tables, seq_lens=seq_lens)
    if q.device.type == "meta":
        raise ValueError("q must be on the CPU or a GPU, got a meta tensor, which has no numbers")
    check_shape("block_tables", block_tables, (num_seqs, block_tables.shape[1]), "B M")
    check_shape("seq_lens", seq_lens, (num_seqs,), "B")
    options = options.checked(q[:, :, None], block_tables.shape[1] * inputs.cache_sizes[1])
    for name, scale in (("k_scale", k_scale), ("v_scale", inputs.v_scale)):
        check_number(name, scale, low=-FLOAT32_MAX, below=FLOAT32_MAX)
    scale = options.scale_for(q.shape[-1]) * float(k_scale)
    if not abs(scale) <= FLOAT32_MAX:
        raise ValueError(f"k_scale = {k_scale} times scale must fit float32, got scale = {options.scale}")
    return options._replace(scale=scale)


def used_blocks(inputs: PagedInputs, window: int | None = None, num_queries: Int32[Tensor, " B"] | int = 1) -> Used:
    """Return what sequences of num_queries queries use of their tables. On a GPU the host waits for this once.

    Raises:
        ValueError: a length does not fit its table, or an entry in use does not name a block of the cache.
    """
    block_tables, seq_lens, (num_blocks, P, _, _) = inputs.block_tables, inputs.seq_lens, inputs.cache_sizes
    (B, M), lens = block_tables.shape, seq_lens.long()
    if not B:
        return Used(torch.zeros_like(block_tables, dtype=torch.bool), range(0), 0)
    num_queries = torch.as_tensor(num_queries, device=lens.device)
    first_key = torch.zeros_like(lens) if window is None else (lens - window - (num_queries - 1)).clamp(min=0)
    columns, end_key = torch.arange(M, device=lens.device), lens * (num_queries > 0)
    used = (columns * P < end_key[:, None]) & ((columns + 1) * P > first_key[:, None])
    wrong = used & ((block_tables < 0) | (block_tables >= num_blocks))
    first = torch.where(lens > 0, first_key, M * P)
    facts = torch.stack([lens.min(), lens.max(), first.min(), wrong.any().long()])
    shortest, longest, start, any_wrong = facts.tolist()  # the one wait
    if shortest < 0 or longest > M * P:
        raise ValueError(
            f"seq_lens must be from 0 to M · P = {M} · {P} = {M * P}, the tokens that a row of block_tables can name, "
            f"got {shortest if shortest < 0 else longest}"
        )
    if any_wrong and num_blocks == 0:
        raise ValueError(f"the cache has no blocks (N = 0), but seq_lens has {longest} tokens")
    if any_wrong:
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables must hold blocks from 0 to {num_blocks - 1} where a sequence has tokens, got "
            f"{int(block_tables[b, i])} at [{b}, {i}]; sequence {b} has {int(seq_lens[b])} tokens"
        )
    stop = cdiv(longest, P)
    return Used(used, range(min(start // P, stop), stop), longest)
