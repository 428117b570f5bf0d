"""Reading paged memory in plain torch, two ways that agree up to rounding (lesson 4).

Sequence b has seq_lens[b] tokens, the query's own included. Token i is in block block_tables[b, i // P] at offset
i % P. Apart from that look-up this is causal attention with a query at position seq_lens[b] − 1, so different lengths
need no mask of their own.

    gathered    k = k_cache[block_tables] made contiguous, then dense attention (how vLLM tests its kernel)
    streamed    one block of every sequence at a time, with lesson 3's (m, l, acc). Nothing is gathered

Both look at the lengths and the tables first, for which the host waits for a GPU. Kwon et al. 2023.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagewise.naive_attention import grouped_matmul, masked_scores, query_positions, safe_softmax, visibility
from pagewise.online_softmax import Partial
from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import Keys, OfDecoding, OutAndLse, PagedInputs, Queries, Splits, used_blocks
from pagewise.tools.sizes import cdiv
from pagewise.tools.transforms import check_values, derivative_of, outside_graphs


@outside_graphs('paged_attention(backend="torch")', remedy='backend="triton"')
def gathered_attention(inputs: PagedInputs, options: ScoreOptions, splits: Splits | None = None) -> OfDecoding:
    """Return (out, lse) of `paged_attention`. K and V are made contiguous first: B · max(seq_lens) keys exist at once.

    With splits, each sequence is attended to by itself, and the results of its splits are merged.
    """
    tables, columns = _used_tables(inputs, options)
    if splits is None or not len(inputs.q):
        scores, values = _scores_and_values(inputs, tables, columns, options)
        weights, lse = safe_softmax(scores)
        out = grouped_matmul(weights, values)
    else:
        out, lse = attend_in_turn(_sequences(inputs, tables), options, splits)
    return (out * inputs.v_scale).squeeze(2).to(inputs.q.dtype), lse.squeeze(2)


def attend_in_turn(
    sequences: Iterable[tuple[Tensor, Tensor, Tensor]], options: ScoreOptions, splits: Splits
) -> OutAndLse:
    """Return (out, lse) of q [1,H,T,D], k and v [1,Hkv,S,D] of each sequence. Its bits depend on no other sequence."""
    outs, lses = zip(*(attend_in_splits(q, k, v, options, splits) for q, k, v in sequences), strict=True)
    return torch.cat(outs), torch.cat(lses)


def attend_in_splits(q: Queries, k: Keys, v: Keys, options: ScoreOptions, splits: Splits) -> OutAndLse:
    """Return (out, lse) of attention, out not yet rounded: each split of the keys by itself, then lesson 3's merge."""
    # not by lse: next to m = 60000, float32 rounds log l away
    whole = functools.reduce(Partial.merge, partials_of_splits(q, k, v, options, splits))
    return whole.output(), whole.lse()


def partials_of_splits(
    q: Queries, k: Keys, v: Keys, options: ScoreOptions, splits: Splits, partial_of: Callable = Partial.of_heads
) -> list[Partial]:
    """Return the summary of each split, which partial_of makes of scores [B,H,T,n] and values [B,Hkv,n,D]."""
    T, S = q.shape[2], k.shape[2]
    queries, partials = query_positions(T, S, q.device), []
    first = max(0, S - T + 1 - (options.window or S))
    for start, end in splits.bounds(min(first, S), S):
        keys = torch.arange(start, end, device=q.device)
        scores = masked_scores(q, k[:, :, start:end], queries, keys, options)
        partials.append(partial_of(scores, v[:, :, start:end]))
    return partials


@outside_graphs("streamed_attention", remedy='paged_attention(backend="triton")')
def streamed_attention(inputs: PagedInputs, options: ScoreOptions) -> OfDecoding:
    """Return (out, lse) of `paged_attention`, one block of each sequence at a time: B · P keys exist at once."""
    (tables, columns), q = _used_tables(inputs, options), inputs.q
    (B, H, D), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    seen = Partial.empty(B, H, 1, head_size=D, dtype=wide, device=q.device)
    for i in columns:
        scores, values = _scores_and_values(inputs, tables, range(i, i + 1), options)
        seen = seen.merge(Partial.of_heads(scores, values))
    return (seen.output() * inputs.v_scale).squeeze(2).to(q.dtype), seen.lse().squeeze(2)


def _used_tables(inputs: PagedInputs, options: ScoreOptions) -> tuple[Int[Tensor, "B M"], range]:
    """Return block tables that are safe to index with, in which unused entries are 0, and the columns in use."""
    tensors = {"block_tables": inputs.block_tables, "seq_lens": inputs.seq_lens}
    check_values('paged_attention(backend="torch")', remedy='backend="triton"', **tensors)
    used = used_blocks(inputs, options.window)
    return inputs.block_tables.masked_fill(~used.entries, 0).long(), used.columns


def _scores_and_values(
    inputs: PagedInputs, tables: Int[Tensor, "B M"], columns: range, options: ScoreOptions
) -> tuple[Float[Tensor, "B H 1 S"], Keys]:
    """Return the scores of all keys in these columns, −inf where hidden, and their values, 0 where hidden.

    Both are float32 (float64 for float64). Hidden values become 0 because a weight of 0 does not hide NaN. So do
    hidden keys if a gradient is needed: the gradient of q multiplies them by 0.
    """
    q, positions, (_, P, Hkv, _) = inputs.q, inputs.seq_lens.long()[:, None, None] - 1, inputs.k_cache.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    # cache[tables] with heads before tokens: one copy, and contiguous for the products
    blocks, heads = tables[:, None, columns.start : columns.stop], torch.arange(Hkv, device=q.device)[:, None]
    caches = (inputs.k_cache, inputs.v_cache)
    k, v = (cache.transpose(1, 2)[blocks, heads].flatten(2, 3).to(wide) for cache in caches)
    keys = torch.arange(columns.start * P, columns.stop * P, device=q.device)
    hidden = ~visibility(positions[..., None] - keys, options).mT  # [B, 1, S, 1]
    if derivative_of(q, k):
        k.masked_fill_(hidden, 0.0)
    return masked_scores(q[:, :, None], k, positions, keys, options), v.masked_fill_(hidden, 0.0)


def _sequences(inputs: PagedInputs, tables: Int[Tensor, "B M"]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield q [1,H,1,D] of each sequence, and its k and v [1,Hkv,S,D], gathered."""
    P, lens = inputs.k_cache.shape[1], inputs.seq_lens.tolist()
    for q, table, length in zip(inputs.q, tables, lens, strict=True):
        caches = (cache[table[: cdiv(length, P)]] for cache in (inputs.k_cache, inputs.v_cache))
        yield q[None, :, None], *(blocks.flatten(0, 1)[:length].transpose(0, 1)[None] for blocks in caches)
