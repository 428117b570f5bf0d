"""Cases of paged decode that all its tests share, and the dense attention they are held against."""

from itertools import pairwise

import torch

from conftest import assert_results
from pagewise.naive_attention import attention


def paged_inputs(
    seq_lens, heads, kv_heads, head_size, *, block_size=16, dtype, device, cache_dtype=None, spare=3, seed=0
):
    """q, caches, tables and lengths, shuffled; all that no query may see is poison.

    NaN in every slot past a sequence's end and in blocks of no sequence; in the tables −1 or 10⁹ past its blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    num_used = [-(-n // block_size) for n in seq_lens]
    N, M = sum(num_used) + spare, max(num_used, default=0) + 2
    order = torch.randperm(N, generator=generator)
    kv = torch.randn(2, N, block_size, kv_heads, head_size, generator=generator)
    tables = torch.full((len(seq_lens), M), -1, dtype=torch.int32)
    tables[::2] = 10**9
    live = torch.zeros(N, block_size, dtype=torch.bool)
    start = 0
    for b, (n, used) in enumerate(zip(seq_lens, num_used, strict=True)):
        blocks = order[start : start + used]
        tables[b, :used] = blocks.int()
        live.view(-1)[(blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:n]] = True
        start += used
    kv[:, ~live] = torch.nan
    k_cache, v_cache = kv.to(dtype if cache_dtype is None else cache_dtype).to(device)
    q = torch.randn(len(seq_lens), heads, head_size, generator=generator).to(dtype).to(device)
    return q, k_cache, v_cache, tables.to(device), torch.tensor(seq_lens, dtype=torch.int32, device=device)


ARGUMENTS = ("q", "k_cache", "v_cache", "block_tables", "seq_lens")


def changed(inputs, changes):
    """Return {name: argument}. A change is the new value, or a function of the old value."""
    arguments = dict(zip(ARGUMENTS, inputs, strict=True))
    return arguments | {name: new(arguments[name]) if callable(new) else new for name, new in changes.items()}


def in_other_blocks(q, k_cache, v_cache, tables, seq_lens):
    """Return the same tokens in a permutation of the blocks."""
    moved = torch.randperm(len(k_cache), generator=torch.Generator().manual_seed(1)).to(q.device)
    k_moved, v_moved = torch.empty_like(k_cache), torch.empty_like(v_cache)
    k_moved[moved], v_moved[moved] = k_cache, v_cache
    real = (tables >= 0) & (tables < len(moved))
    return q, k_moved, v_moved, torch.where(real, moved[tables.where(real, 0).long()].int(), tables), seq_lens


def dense(q, k_cache, v_cache, tables, seq_lens, ends=None, *, dtype, k_scale=1.0, v_scale=1.0, **options):
    """(out, lse) sequence by sequence: token by token out of the cache, then the oracle in `dtype`.

    ends: running sums of the sequences' numbers of queries. Without them, each has one query.
    """
    outs, lses, P = [], [], k_cache.shape[1]
    ends = range(len(seq_lens) + 1) if ends is None else ends.tolist()
    for n, table, rows in zip(seq_lens.tolist(), tables, [slice(*pair) for pair in pairwise(ends)], strict=True):
        blocks, offsets = table[torch.arange(n) // P].long(), torch.arange(n, device=q.device) % P
        k, v = k_cache[blocks, offsets].to(torch.float64), v_cache[blocks, offsets].to(torch.float64)
        k, v = ((t * s).to(dtype).transpose(0, 1)[None] for t, s in ((k, k_scale), (v, v_scale)))
        own = q[rows].to(dtype).transpose(0, 1)[None]
        out, lse = attention(own, k, v, causal=True, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def assert_matches_dense(path, inputs, **options):
    found = path(*inputs, **options)
    assert_results(found, *(dense(*inputs, dtype=dtype, **options) for dtype in (torch.float64, inputs[0].dtype)))
    return found
