"""Reading paged memory in plain torch, two ways that agree up to rounding (lesson 4).

Sequence b has seq_lens[b] tokens, the query's own included. Token i is in block block_tables[b, i // P] at offset
i % P. Apart from that look-up this is causal attention with a query at position seq_lens[b] − 1, so different lengths
need no mask of their own.

    gathered    k = k_cache[block_tables] made contiguous, then dense attention (how vLLM tests its kernel)
    streamed    one block of every sequence at a time, with lesson 3's (m, l, acc). Nothing is gathered

Both take what `checked_inputs` returns. They look at the lengths and the tables first, which makes the host wait for a
GPU. They ignore every slot and table entry that no query sees. Kwon et al. 2023.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagewise.naive_attention import grouped_matmul, masked_scores, query_positions, safe_softmax, visibility
from pagewise.online_softmax import Partial
from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs, used_blocks
from pagewise.tools.sizes import cdiv
from pagewise.tools.transforms import check_values, derivative_of, outside_graphs

OutAndLse = tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]
Cut = Callable[[int, int], list[tuple[int, int]]]
"""cut(first, end) -> the splits [start, end) of keys first … end − 1, at least one."""


@outside_graphs('paged_attention(backend="torch")', remedy='backend="triton"')
def gathered_attention(inputs: PagedInputs, options: ScoreOptions, num_splits: int | None = None) -> OutAndLse:
    """Return (out, lse) of `paged_attention`. K and V are made contiguous first: B · max(seq_lens) keys exist at once.

    With num_splits, each sequence is attended to by itself, in that many splits whose results are merged.
    """
    blocks = _blocks(inputs, options)
    if num_splits is None or not len(inputs.q):
        scores, values = _scores_and_values(inputs, blocks, options)
        weights, lse = safe_softmax(scores)
        out = grouped_matmul(weights, values)
    else:
        out, lse = attend_in_turn(_sequences(inputs, blocks), options, equal_splits(num_splits))
    return (out * inputs.v_scale).squeeze(2).to(inputs.q.dtype), lse.squeeze(2)


def equal_splits(num_splits: int) -> Cut:
    """Return a function that cuts keys first … end − 1 into `num_splits` equal splits, or one per key if fewer."""

    def cut(first: int, end: int) -> list[tuple[int, int]]:
        n = max(1, min(num_splits, end - first))
        return list(pairwise(first + (end - first) * i // n for i in range(n + 1)))

    return cut


def attend_in_turn(
    sequences: Iterable[tuple[Tensor, Tensor, Tensor]], options: ScoreOptions, cut: Cut
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Return (out, lse) of q [1,H,T,D], k and v [1,Hkv,S,D] of each sequence. Its bits depend on no other sequence."""
    outs, lses = zip(*(attend_in_splits(q, k, v, options, cut) for q, k, v in sequences), strict=True)
    return torch.cat(outs), torch.cat(lses)


def attend_in_splits(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    options: ScoreOptions,
    cut: Cut,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Return (out, lse) of attention, out not yet rounded: each split of the keys by itself, then lesson 3's merge."""
    # not by lse: next to m = 60000, float32 rounds log l away
    whole = functools.reduce(Partial.merge, partials_of_splits(q, k, v, options, cut))
    return whole.output(), whole.lse()


def partials_of_splits(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    options: ScoreOptions,
    cut: Cut,
    partial_of: Callable[[Tensor, Tensor], Partial] = Partial.of_heads,
) -> list[Partial]:
    """Return the summary of each split. partial_of makes it of scores [B,H,T,n] and values [B,Hkv,n,D]."""
    T, S = q.shape[2], k.shape[2]
    queries, partials = query_positions(T, S, q.device), []
    first = max(0, S - T + 1 - (options.window or S))
    for start, end in cut(min(first, S), S):
        keys = torch.arange(start, end, device=q.device)
        scores = masked_scores(q, k[:, :, start:end], queries, keys, options)
        partials.append(partial_of(scores, v[:, :, start:end]))
    return partials


@outside_graphs("streamed_attention", remedy='paged_attention(backend="triton")')
def streamed_attention(inputs: PagedInputs, options: ScoreOptions) -> OutAndLse:
    """Return (out, lse) of `paged_attention`, one block of each sequence at a time: B · P keys exist at once."""
    blocks, q = _blocks(inputs, options), inputs.q
    (B, H, D), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    seen = Partial.empty(B, H, 1, head_size=D, dtype=wide, device=q.device)
    for i in range(blocks.start, blocks.stop):
        scores, values = _scores_and_values(inputs, blocks._replace(start=i, stop=i + 1), options)
        seen = seen.merge(Partial.of_heads(scores, values))
    return (seen.output() * inputs.v_scale).squeeze(2).to(q.dtype), seen.lse().squeeze(2)


class _Blocks(NamedTuple):
    """Columns start … stop − 1 of block tables, safe to index with: unused entries are 0."""

    tables: Int[Tensor, "B M"]
    queries: Int[Tensor, "B 1 1"]  # their positions
    start: int
    stop: int


def _blocks(inputs: PagedInputs, options: ScoreOptions) -> _Blocks:
    """Return the columns that some query sees."""
    tensors = {"block_tables": inputs.block_tables, "seq_lens": inputs.seq_lens}
    check_values('paged_attention(backend="torch")', remedy='backend="triton"', **tensors)
    used = used_blocks(inputs, options.window)
    tables = inputs.block_tables.masked_fill(~used.entries, 0).long()
    return _Blocks(tables, inputs.seq_lens.long()[:, None, None] - 1, used.start, used.stop)


def _scores_and_values(
    inputs: PagedInputs, blocks: _Blocks, options: ScoreOptions
) -> tuple[Float[Tensor, "B H 1 S"], Float[Tensor, "B Hkv S D"]]:
    """Return the scores of all keys in these blocks, −inf where hidden, and their values, 0 where hidden.

    Both are float32 (float64 for float64). Hidden values become 0 because a weight of 0 does not hide NaN. So do
    hidden keys if a gradient is needed: the gradient of q multiplies them by 0.
    """
    q, (_, P, Hkv, _) = inputs.q, inputs.k_cache.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    # cache[tables] with heads before tokens: one copy, and contiguous for the products
    tables, heads = blocks.tables[:, None, blocks.start : blocks.stop], torch.arange(Hkv, device=q.device)[:, None]
    caches = (inputs.k_cache, inputs.v_cache)
    k, v = (cache.transpose(1, 2)[tables, heads].flatten(2, 3).to(wide) for cache in caches)
    keys = torch.arange(blocks.start * P, blocks.stop * P, device=q.device)
    hidden = ~visibility(blocks.queries[..., None] - keys, options).mT  # [B, 1, S, 1]
    if derivative_of(q, k):
        k.masked_fill_(hidden, 0.0)
    return masked_scores(q[:, :, None], k, blocks.queries, keys, options), v.masked_fill_(hidden, 0.0)


def _sequences(inputs: PagedInputs, blocks: _Blocks) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield q [1,H,1,D] of each sequence, and its k and v [1,Hkv,S,D], gathered."""
    P, lens = inputs.k_cache.shape[1], inputs.seq_lens.tolist()
    for q, table, length in zip(inputs.q, blocks.tables, lens, strict=True):
        caches = (cache[table[: cdiv(length, P)]] for cache in (inputs.k_cache, inputs.v_cache))
        yield q[None, :, None], *(blocks.flatten(0, 1)[:length].transpose(0, 1)[None] for blocks in caches)
