"""Paged attention as a product with a sparse matrix: few queries of each sequence, nothing gathered (lesson 9).

Seen as matrices [N·P·Hkv, D] with a row for each slot and KV head, K and V are the cache itself. The block tables say
which of these rows a query's head attends to: they are the pattern of a sparse matrix, in which

    scores = Q Kᵀ at the places of the pattern          out = softmax(scores) @ V

The pattern is made once for all layers. Blocks that many sequences begin with are left out of it: one dense product
over them serves all these sequences, and lesson 3's merge joins the two (Juravsky et al. 2024, Hydragen).
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor
from torch.nn.functional import embedding_bag

from pagewise.naive_attention import finite, masked_scores
from pagewise.online_softmax import Partial
from pagewise.options import ScoreOptions

WORTH_SHARING = 512  # tokens that need not be read again, to pay for a product of their own
INT32_MAX = 2**31 - 1


class Queries(NamedTuple):
    """Queries start … stop − 1 of a batch: the last of a sequence's `length` tokens, which lie in `blocks`."""

    sequence: int
    start: int
    stop: int
    length: int
    blocks: list[int]

    @property
    def number(self) -> int:
        """How many there are."""
        return self.stop - self.start


class Rows(NamedTuple):
    """Queries by their index in the batch, each with its sequence and its keys: first … position, the last its own."""

    queries: Int64[Tensor, " R"]
    sequences: Int64[Tensor, " R"]
    first: Int64[Tensor, " R"]
    positions: Int64[Tensor, " R"]

    @classmethod
    def of(cls, batch: Sequence[Queries], first: Sequence[int], window: int | None) -> "Rows":
        """All queries of these sequences, with keys from `first` of the sequence on that the window leaves."""
        sequences, starts, stops, lengths = (torch.tensor(column) for column in list(zip(*batch, strict=True))[:4])
        number = stops - starts
        of = torch.arange(len(batch)).repeat_interleave(number)
        queries = torch.arange(len(of)) + (starts - number.cumsum(0) + number)[of]
        positions = queries + (lengths - stops)[of]
        first = torch.tensor(first)[of]
        return cls(
            queries, sequences[of], first if window is None else first.maximum(positions + 1 - window), positions
        )

    @property
    def num_keys(self) -> Int64[Tensor, " R"]:
        """How many each has."""
        return self.positions + 1 - self.first

    def __call__(self, index: Shaped[Tensor, " some"]) -> "Rows":
        """Some of them."""
        return Rows(*(column[index] for column in self))


def parts_of(
    batch: Sequence[Queries], block_tables: Int[Tensor, "B M"], block_size: int, window: int | None
) -> list["SharedKeys | SparseRows"]:
    """What few queries of many sequences are computed from, in the order of their keys."""
    if not batch:
        return []
    # the blocks that all queries of a sequence see to their end; a window may hide their beginning
    whole = {x.sequence: x.blocks[: (x.length - x.number + 1) // block_size] for x in batch}
    shared = [] if window else list(shared_beginnings(whole, block_size))
    first = {b: stop * block_size for group, _, stop in shared for b in group}
    rows = Rows.of(batch, [first.get(x.sequence, 0) for x in batch], window)
    parts = []
    for group, start, stop in shared:
        members = rows(torch.isin(rows.sequences, torch.tensor(group)))
        parts.append(SharedKeys(members, whole[group[0]][start:stop], start * block_size))
    return parts + [SparseRows(group, block_tables, block_size) for group in similar(rows)]


def similar(rows: Rows) -> Iterator[Rows]:
    """Those that have keys, in groups in which the longest has at most twice the keys of the shortest."""
    ordered, order = rows.num_keys.sort(descending=True)
    num_keys, start = [*ordered.tolist(), 0], 0
    for i, keys in enumerate(num_keys):
        if 2 * keys < num_keys[start]:
            yield rows(order[start:i].sort().values)
            start = i
        if keys == 0:
            return


class SparseRows:
    """Rows of similar lengths: the shorter repeat their last key, which is then hidden."""

    def __init__(self, rows: Rows, tables: Int[Tensor, "B M"], block_size: int) -> None:
        self.queries, sequences, first, positions = rows
        keys = first[:, None] + torch.arange(int(rows.num_keys.max()))
        self.distance = (positions[:, None] - keys)[:, None]  # [R, 1, S], negative where hidden
        self.hidden = self.distance < 0 if (self.distance < 0).any() else None
        keys = keys.minimum(positions[:, None])
        self.slots = tables[sequences[:, None], keys // block_size].long() * block_size + keys % block_size
        self._patterns = {}

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
        options: ScoreOptions,
    ) -> Partial:
        """The summary of all keys of these rows, [R, H]."""
        scores = self._scores(q, k_cache, options)
        m = scores.amax(dim=-1)
        weights = torch.exp(scores - finite(m)[..., None])
        return Partial(m, weights.sum(dim=-1), self._weighted(weights, v_cache))

    def output(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
        options: ScoreOptions,
    ) -> Float[Tensor, "R H D"]:
        """`attend(…).output()`, in fewer steps."""
        return self._weighted(self._scores(q, k_cache, options).softmax(dim=-1), v_cache)

    def _scores(self, q: Tensor, k_cache: Tensor, options: ScoreOptions) -> Float[Tensor, "R H S"]:
        (R, _, S), (total_q, H, D), Hkv = self.distance.shape, q.shape, k_cache.shape[2]
        if (H, Hkv) not in self._patterns:
            self._patterns[H, Hkv] = self._pattern(H, k_cache)
        pattern = self._patterns[H, Hkv]
        scores = pattern.values()
        scores.zero_()  # of the last layer: 0 · NaN would stay
        q = (q if total_q == R else q[self.queries]).reshape(R * H, D)
        k = k_cache.view(-1, D)
        torch.sparse.sampled_addmm(pattern, q, k.mT, beta=0.0, alpha=options.scale_for(D), out=pattern)
        scores = scores.view(R, H, S)
        if options.softcap > 0:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.alibi_slopes is not None:
            scores = scores - options.alibi_slopes[:, None] * self.distance
        return scores if self.hidden is None else scores.masked_fill(self.hidden, -torch.inf)

    def _weighted(self, weights: Float[Tensor, "R H S"], v_cache: Tensor) -> Float[Tensor, "R H D"]:
        (R, H, S), (_, _, Hkv, D) = weights.shape, v_cache.shape
        places = self._patterns[H, Hkv].col_indices().view(R * H, S)
        rows = embedding_bag(places, v_cache.view(-1, D), mode="sum", per_sample_weights=weights.view(R * H, S))
        return rows.view(R, H, D)

    def _pattern(self, H: int, k_cache: Shaped[Tensor, "N P Hkv D"]) -> Float[Tensor, "rows places"]:
        """The sparse matrix: row (r, h) has a place for each of its slots, that of the KV head of h."""
        (R, S), Hkv = self.slots.shape, k_cache.shape[2]
        index = torch.int32 if k_cache.numel() <= INT32_MAX else torch.int64
        kv_heads = torch.arange(H) // (H // Hkv)
        places = (self.slots[:, None] * Hkv + kv_heads[:, None]).to(index).flatten()
        ends = torch.arange(0, R * H * S + 1, S, dtype=index)
        sizes, values = (R * H, k_cache[..., 0].numel()), k_cache.new_zeros(R * H * S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sparse matrices are in beta
            return torch.sparse_csr_tensor(ends, places, values, sizes, check_invariants=False)


class SharedKeys:
    """Rows whose sequences have the same blocks from key `start` on, which all of them see."""

    def __init__(self, rows: Rows, blocks: Sequence[int], start: int) -> None:
        self.queries, self.positions = rows.queries, rows.positions
        self.blocks, self.start = indices(blocks), start

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
        options: ScoreOptions,
    ) -> Partial:
        """The summary of these keys, [R, H]."""
        q = q[self.queries].transpose(0, 1)[None]
        k, v = (cache[self.blocks].flatten(0, 1).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        keys = torch.arange(self.start, self.start + k.shape[2])
        scores = masked_scores(q, k, self.positions, keys, options._replace(causal=False))
        return Partial(*(x[0].transpose(0, 1) for x in Partial.of_heads(scores, v)))


def shared_beginnings(
    tables: Mapping[int, Sequence[int]], block_size: int, start: int = 0
) -> Iterator[tuple[list[int], int, int]]:
    """(sequences, start, stop): sequences that have columns start … stop − 1 of their tables in common.

    What a sequence shares with many comes before what it shares with fewer, and begins where that ends.
    """
    groups = defaultdict(list)
    for sequence, table in tables.items():
        if start < len(table):
            groups[table[start]].append(sequence)
    for group in groups.values():
        if len(group) == 1:
            continue
        rest = [tables[sequence][start:] for sequence in group]
        ends = zip(min(rest), max(rest), strict=False)  # in the order of words; the others begin as these both do
        stop = start + sum(1 for _ in takewhile(lambda blocks: blocks[0] == blocks[1], ends))
        if (len(group) - 1) * (stop - start) * block_size >= WORTH_SHARING:
            yield group, start, stop
            yield from shared_beginnings({sequence: tables[sequence] for sequence in group}, block_size, stop)


def indices(blocks: Sequence[int], device: torch.device | None = None) -> slice | Int[Tensor, " blocks"]:
    """What to index a cache with: neighbours are a slice, of which it gives a view."""
    if all(b - a == 1 for a, b in pairwise(blocks)):
        return slice(blocks[0], blocks[-1] + 1) if blocks else slice(0)
    return torch.tensor(blocks, device=device)
