"""Cases of packed queries over a paged cache, and the dense attention they are held against."""

import torch
from paged_cases import paged_inputs

from conftest import assert_as_accurate_as_naive
from pagewise.naive_attention import attention


def packed_inputs(seq_lens, num_queries, heads, kv_heads, head_size, *, shared=0, seed=0, **rest):
    """q, caches, tables, lengths and running sums. What no query may see is poison, as in `paged_inputs`.

    The first `shared` blocks of sequence 0 are also the first of all sequences that are long enough.
    """
    _, k_cache, v_cache, tables, lens = paged_inputs(seq_lens, heads, kv_heads, head_size, seed=seed, **rest)
    for b, length in enumerate(seq_lens):
        if length >= shared * k_cache.shape[1]:
            tables[b, :shared] = tables[0, :shared]
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(sum(num_queries), heads, head_size, generator=generator).to(rest["dtype"]).to(lens.device)
    ends = torch.tensor([0, *num_queries]).cumsum(0).to(lens)
    return q, k_cache, v_cache, tables, lens, ends


def dense(q, k_cache, v_cache, tables, seq_lens, ends, *, dtype, k_scale=1.0, v_scale=1.0, **options):
    """(out, lse) sequence by sequence: token by token out of the cache, then the oracle in `dtype`."""
    out, lse = (
        q.new_zeros(q.shape, dtype=dtype),
        q.new_zeros(q.shape[:2], dtype=torch.promote_types(dtype, torch.float32)),
    )
    P = k_cache.shape[1]
    for b, n in enumerate(seq_lens.tolist()):
        rows = slice(int(ends[b]), int(ends[b + 1]))
        blocks, offsets = tables[b, torch.arange(n) // P].long(), torch.arange(n, device=q.device) % P
        k, v = k_cache[blocks, offsets].to(torch.float64), v_cache[blocks, offsets].to(torch.float64)
        k, v = ((t * s).to(dtype).transpose(0, 1)[None] for t, s in ((k, k_scale), (v, v_scale)))
        of_b = q[rows].to(dtype).transpose(0, 1)[None]
        result = attention(of_b, k, v, causal=True, return_lse=True, **options)
        out[rows], lse[rows] = (x[0].transpose(0, 1) for x in result)
    return out, lse


def assert_packed_matches_dense(path, inputs, **options):
    """By the one tolerance policy, every row."""
    q = inputs[0]
    out, lse = path(*inputs, **options)
    exact, exact_lse = dense(*inputs, dtype=torch.float64, **options)
    naive, naive_lse = dense(*inputs, dtype=q.dtype, **options)
    assert_as_accurate_as_naive(out, exact, naive)
    if lse is not None:
        assert_as_accurate_as_naive(lse, exact_lse, naive_lse)
    return out, lse
