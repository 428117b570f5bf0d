"""Reading paged memory in plain torch, two ways that agree up to rounding (lesson 4).

Sequence b has seq_lens[b] tokens, the query's own included; token i lies in block block_tables[b, i // P] at offset
i % P. Up to that look-up it is causal attention with a query at position seq_lens[b] − 1, so different lengths need no
mask of their own.

    gathered    k = k_cache[block_tables] made contiguous, then dense attention (how vLLM tests its kernel)
    streamed    one block of every sequence at a time, lesson 3's (m, l, acc) carried along; nothing is gathered

What no query sees is never used: slots past the end and other blocks (NaN there does no harm), table entries past a
sequence's blocks or before its window (any number). Kwon et al. 2023.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int32, Shaped
from torch import Tensor

from pagewise.naive_attention import grouped_matmul, masked_scores, safe_softmax, visibility
from pagewise.online_softmax import Partial, merge_attention
from pagewise.paged_kv_cache import FLOAT8
from pagewise.tools import checks
from pagewise.tools.checks import FLOATS, check_count, check_number, check_same, check_shape, check_tensor

OutAndLse = tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]


def gathered_attention(
    q: Float[Tensor, "B H D"],
    k_cache: Shaped[Tensor, "N P Hkv D"],
    v_cache: Shaped[Tensor, "N P Hkv D"],
    block_tables: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, " B"],
    *,
    scale: float | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_splits: int = 1,
) -> OutAndLse:
    """(out, lse) of `paged_attention`, K and V made contiguous first: B · max(seq_lens) keys exist at once.

    With num_splits > 1 the blocks are cut into as many runs, each attended to by itself, and the results merged.
    """
    check_count("num_splits", num_splits)
    options = _Options(scale, alibi_slopes, window, softcap, k_scale)
    blocks = _check(q, k_cache, v_cache, block_tables, seq_lens, options, v_scale)
    num_splits = max(1, min(num_splits, blocks.stop - blocks.start))
    bounds = [blocks.start + (blocks.stop - blocks.start) * i // num_splits for i in range(num_splits + 1)]
    outs, lses = [], []
    for start, stop in pairwise(bounds):
        scores, values = _scores_and_values(q, k_cache, v_cache, blocks._replace(start=start, stop=stop), options)
        weights, lse = safe_softmax(scores)
        outs.append(grouped_matmul(weights, values))
        lses.append(lse)
    out, lse = (outs[0], lses[0]) if num_splits == 1 else merge_attention(torch.stack(outs), torch.stack(lses))
    return (out * v_scale).squeeze(2).to(q.dtype), lse.squeeze(2)


def streamed_attention(
    q: Float[Tensor, "B H D"],
    k_cache: Shaped[Tensor, "N P Hkv D"],
    v_cache: Shaped[Tensor, "N P Hkv D"],
    block_tables: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, " B"],
    *,
    scale: float | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> OutAndLse:
    """(out, lse) of `paged_attention`, one block of each sequence at a time: B · P keys exist at once."""
    options = _Options(scale, alibi_slopes, window, softcap, k_scale)
    blocks = _check(q, k_cache, v_cache, block_tables, seq_lens, options, v_scale)
    (B, H, D), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    seen = Partial.empty(B, H, 1, head_size=D, dtype=wide, device=q.device)
    for i in range(blocks.start, blocks.stop):
        scores, values = _scores_and_values(q, k_cache, v_cache, blocks._replace(start=i, stop=i + 1), options)
        seen = seen.merge(Partial.of_heads(scores, values))
    return (seen.output() * v_scale).squeeze(2).to(q.dtype), seen.lse().squeeze(2)


class _Options(NamedTuple):
    scale: float | None
    alibi_slopes: Tensor | None
    window: int | None
    softcap: float
    k_scale: float


class _Blocks(NamedTuple):
    """Columns start … stop − 1 of block tables that are safe to index with: unused entries are 0."""

    tables: Int[Tensor, "B M"]
    seq_lens: Int[Tensor, " B"]
    start: int
    stop: int


def _scores_and_values(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: _Blocks, options: _Options
) -> tuple[Float[Tensor, "B H 1 S"], Float[Tensor, "B Hkv S D"]]:
    """The scores of all keys in these blocks, −inf where not visible, and their values, 0 where not visible.

    In float32 (float64 for float64). A weight of 0 does not hide a value of NaN, hence the zeros. The cache's scales
    are linear, so k_scale multiplies the scores, and v_scale later the output, rather than every number read.
    """
    wide, (_, P, Hkv, D) = torch.promote_types(q.dtype, torch.float32), k_cache.shape
    # cache[tables] with the heads in front of the tokens: one copy, and contiguous for the products
    tables, heads = blocks.tables[:, None, blocks.start : blocks.stop], torch.arange(Hkv, device=q.device)[:, None]
    k, v = (cache.transpose(1, 2)[tables, heads].flatten(2, 3).to(wide) for cache in (k_cache, v_cache))
    keys = torch.arange(blocks.start * P, blocks.stop * P, device=q.device)
    queries = blocks.seq_lens[:, None, None] - 1  # [B, 1, 1]
    scores = masked_scores(
        q[:, :, None], k, queries, keys, causal=True, window=options.window, softcap=options.softcap,
        scale=(D**-0.5 if options.scale is None else options.scale) * options.k_scale,
        alibi_slopes=options.alibi_slopes,
    )  # fmt: skip
    visible = visibility(queries[..., None] - keys, causal=True, window=options.window)  # [B, 1, 1, S]
    return scores, v.masked_fill_(~visible.mT, 0.0)


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, options: _Options,
    v_scale: float,
) -> _Blocks:  # fmt: skip
    """Check everything; return tables safe to index with, and the range of columns that some query sees."""
    check_tensor("q", q, "B H D", dtypes=(*FLOATS, torch.float64))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, "N P Hkv D", dtypes=(q.dtype, *FLOAT8))
    check_tensor("block_tables", block_tables, "B M", dtypes=(torch.int32,))
    check_tensor("seq_lens", seq_lens, "B", dtypes=(torch.int32,))
    check_same("dtype", k_cache=k_cache, v_cache=v_cache)
    check_same("device", q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, seq_lens=seq_lens)
    (B, H, D), (N, P, Hkv, _), M = q.shape, k_cache.shape, block_tables.shape[1]
    check_shape("k_cache", k_cache, (N, P, Hkv, D), "N P Hkv D")
    check_shape("v_cache", v_cache, k_cache.shape, "N P Hkv D")
    check_shape("block_tables", block_tables, (B, M), "B M")
    check_shape("seq_lens", seq_lens, (B,), "B")
    checks.check_heads(H, Hkv)
    if D == 0 or P == 0:
        raise ValueError(f"k_cache must have a block size P and a head size D of at least 1, got {list(k_cache.shape)}")
    checks.check_score_options(
        q[:, :, None], M * P, causal=True, window=options.window, scale=options.scale, softcap=options.softcap,
        alibi_slopes=options.alibi_slopes, attn_mask=None,
    )  # fmt: skip
    check_number("k_scale", options.k_scale)
    check_number("v_scale", v_scale)
    return _check_tables(block_tables, seq_lens, N, P, options.window)


def _check_tables(block_tables: Tensor, seq_lens: Tensor, N: int, P: int, window: int | None) -> _Blocks:
    (B, M), lens = block_tables.shape, seq_lens.long()
    first_key = torch.zeros_like(lens) if window is None else (lens - window).clamp(min=0)
    columns = torch.arange(M, device=lens.device)
    used = (columns * P < lens[:, None]) & ((columns + 1) * P > first_key[:, None])
    wrong = used & ((block_tables < 0) | (block_tables >= N))
    # one look at the device for all that must be known on the host
    first = torch.where(lens > 0, first_key, M * P)
    facts = torch.stack([lens, -lens, -first, wrong.any(dim=1).long()]).amax(dim=1).tolist() if B else [0, 0, 0, 0]
    longest, shortest, start, any_wrong = facts[0], -facts[1], -facts[2] // P, facts[3]
    if shortest < 0 or longest > M * P:
        raise ValueError(
            f"seq_lens must be from 0 to M · P = {M} · {P} = {M * P}, what a row of block_tables can hold, "
            f"got {shortest if shortest < 0 else longest}"
        )
    if any_wrong:
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables must hold blocks from 0 to {N - 1} where a sequence has tokens, got "
            f"{int(block_tables[b, i])} at [{b}, {i}]; sequence {b} has {int(seq_lens[b])} tokens"
        )
    stop = -(-longest // P)
    return _Blocks(block_tables.masked_fill(~used, 0).long(), lens, min(start, stop), stop)
