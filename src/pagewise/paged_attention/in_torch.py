"""Reading paged memory in plain torch, two ways that agree up to rounding (lesson 4).

Sequence b has seq_lens[b] tokens, the query's own included; token i lies in block block_tables[b, i // P] at offset
i % P. Up to that look-up it is causal attention with a query at position seq_lens[b] − 1, so different lengths need no
mask of their own.

    gathered    k = k_cache[block_tables] made contiguous, then dense attention (how vLLM tests its kernel)
    streamed    one block of every sequence at a time, lesson 3's (m, l, acc) carried along; nothing is gathered

Both take what `checked_inputs` returns, and look at the lengths and the tables first, which on a GPU waits for it once.
What no query sees is never used: slots past the end and other blocks (NaN there does no harm), table entries past a
sequence's blocks or before its window (any number). Kwon et al. 2023.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagewise.naive_attention import grouped_matmul, masked_scores, safe_softmax, visibility
from pagewise.online_softmax import Partial, merge_attention
from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs, used_blocks

OutAndLse = tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]


def gathered_attention(inputs: PagedInputs, options: ScoreOptions, *, num_splits: int = 1) -> OutAndLse:
    """(out, lse) of `paged_attention`, K and V made contiguous first: B · max(seq_lens) keys exist at once.

    With num_splits > 1 the blocks are cut into as many runs, each attended to by itself, and the results merged.
    """
    blocks = _blocks(inputs, options)
    num_splits = max(1, min(num_splits, blocks.stop - blocks.start))
    bounds = [blocks.start + (blocks.stop - blocks.start) * i // num_splits for i in range(num_splits + 1)]
    outs, lses = [], []
    for start, stop in pairwise(bounds):
        scores, values = _scores_and_values(inputs, blocks._replace(start=start, stop=stop), options)
        weights, lse = safe_softmax(scores)
        outs.append(grouped_matmul(weights, values))
        lses.append(lse)
    out, lse = (outs[0], lses[0]) if num_splits == 1 else merge_attention(torch.stack(outs), torch.stack(lses))
    return (out * inputs.v_scale).squeeze(2).to(inputs.q.dtype), lse.squeeze(2)


def streamed_attention(inputs: PagedInputs, options: ScoreOptions) -> OutAndLse:
    """(out, lse) of `paged_attention`, one block of each sequence at a time: B · P keys exist at once."""
    blocks, q = _blocks(inputs, options), inputs.q
    (B, H, D), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    seen = Partial.empty(B, H, 1, head_size=D, dtype=wide, device=q.device)
    for i in range(blocks.start, blocks.stop):
        scores, values = _scores_and_values(inputs, blocks._replace(start=i, stop=i + 1), options)
        seen = seen.merge(Partial.of_heads(scores, values))
    return (seen.output() * inputs.v_scale).squeeze(2).to(q.dtype), seen.lse().squeeze(2)


class _Blocks(NamedTuple):
    """Columns start … stop − 1 of block tables that are safe to index with: unused entries are 0."""

    tables: Int[Tensor, "B M"]
    queries: Int[Tensor, "B 1 1"]  # their positions
    start: int
    stop: int


def _blocks(inputs: PagedInputs, options: ScoreOptions) -> _Blocks:
    """The columns that some query sees."""
    used = used_blocks(inputs, options.window)
    tables = inputs.block_tables.masked_fill(~used.entries, 0).long()
    return _Blocks(tables, inputs.seq_lens.long()[:, None, None] - 1, used.start, used.stop)


def _scores_and_values(
    inputs: PagedInputs, blocks: _Blocks, options: ScoreOptions
) -> tuple[Float[Tensor, "B H 1 S"], Float[Tensor, "B Hkv S D"]]:
    """The scores of all keys in these blocks, −inf where not visible, and their values, 0 where not visible.

    In float32 (float64 for float64). A weight of 0 does not hide a value of NaN, hence the zeros.
    """
    q, (_, P, Hkv, _) = inputs.q, inputs.k_cache.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    # cache[tables] with the heads in front of the tokens: one copy, and contiguous for the products
    tables, heads = blocks.tables[:, None, blocks.start : blocks.stop], torch.arange(Hkv, device=q.device)[:, None]
    caches = (inputs.k_cache, inputs.v_cache)
    k, v = (cache.transpose(1, 2)[tables, heads].flatten(2, 3).to(wide) for cache in caches)
    keys = torch.arange(blocks.start * P, blocks.stop * P, device=q.device)
    scores = masked_scores(q[:, :, None], k, blocks.queries, keys, options)
    visible = visibility(blocks.queries[..., None] - keys, options)  # [B, 1, 1, S]
    return scores, v.masked_fill_(~visible.mT, 0.0)
