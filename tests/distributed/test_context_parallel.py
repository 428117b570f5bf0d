"""Ring attention, all-to-all attention and decode over 1 to 4 processes: exact, and without a process that waits."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed_cases import (
    Case,
    DecodeCase,
    events_of,
    owned,
    pairs_computed,
    refusal,
    run_case,
    run_cases,
    run_decode,
    run_late,
    sent_in,
    sent_in_decode,
)

from conftest import assert_as_accurate_as_naive
from pagewise.distributed import (
    Processes,
    all_to_all_attention,
    decode_attention,
    merge_over_processes,
    ring_attention,
)
from pagewise.distributed.counted import (
    all_to_all_bytes,
    decode_bytes,
    ring_backward_bytes,
    ring_bytes,
    visible_pairs,
)
from pagewise.naive_attention import attention

COUNTS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def pools():
    """{n: a group of n processes}, started once for all tests here."""
    found = {count: Processes(count, timeout=60.0) for count in COUNTS}
    yield found
    for pool in found.values():
        pool.close()


def whole(shares, dim, length, order):
    """The whole tensor from the share of each process."""
    out = shares[0].new_full((*shares[0].shape[:dim], length, *shares[0].shape[dim + 1 :]), torch.nan)
    for rank, share in enumerate(shares):
        out.index_copy_(dim, owned(length, len(shares), rank, order), share)
    return out


def expected(case, dtype):
    """(out, lse, dq, dk, dv) of naive attention in a dtype. A row that sees no key has lse −∞ and no gradient."""
    tensors, d_lse = case.inputs()
    *qkv, d_out = (x.to(dtype) for x in tensors)
    qkv = [x.requires_grad_() for x in qkv]
    out, lse = attention(*qkv, causal=case.causal, scale=case.scale, return_lse=True)
    results, gradients = ((out,), (d_out,)) if case.order is None else ((out, lse), (d_out, d_lse.to(lse.dtype)))
    gradients = torch.autograd.grad(results, qkv, gradients)
    return [x.detach() for x in (*results, *gradients)]


def assert_right(cases, by_rank):
    for i, case in enumerate(cases):
        exact, naive = expected(case, torch.float64), expected(case, case.dtype)
        names = ("out", "dq", "dk", "dv") if case.order is None else ("out", "lse", "dq", "dk", "dv")
        for name, right, near, *shares in zip(names, exact, naive, *(results[i] for results in by_rank), strict=True):
            got = whole(shares, 2, case.S if name in ("dk", "dv") else case.T, case.order)
            if name == "lse":
                hidden = right == -torch.inf
                assert got[hidden].eq(-torch.inf).all(), (case, name)
                got, right, near = (x.masked_fill(hidden, 0.0) for x in (got, right, near))
            try:
                assert_as_accurate_as_naive(got, right, near, factor=3.0 if name.startswith("d") else 2.0)
            except AssertionError as error:
                raise AssertionError(f"{case} {name}: {error}") from None


LENGTHS = [(16, 16), (13, 13), (1, 1), (3, 3), (5, 17), (17, 5), (40, 41), (0, 4), (4, 0)]


@pytest.mark.parametrize("count", COUNTS)
def test_ring_attention_and_its_gradients_match_attention(count, pools):
    cases = [
        Case(T, S, causal=causal, order=order)
        for T, S in LENGTHS
        for causal in (False, True)
        for order in ("zigzag", "contiguous")
    ]
    cases += [Case(9, 9, H, Hkv, True, scale=-0.3) for H, Hkv in ((1, 1), (8, 1), (3, 3))]
    cases += [Case(300, 300, causal=True, B=1)]  # several tiles of flash_attention
    assert_right(cases, pools[count].run(run_cases, cases))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ring_attention_is_as_accurate_as_attention(dtype, pools):
    cases = [Case(33, 33, causal=causal, dtype=dtype, D=32) for causal in (False, True)]
    cases += [Case(7, 90, dtype=dtype, D=32, growth=growth) for growth in (1.0, 30.0)]
    assert_right(cases, pools[3].run(run_cases, cases))


@pytest.mark.parametrize("count", COUNTS)
def test_all_to_all_attention_and_its_gradients_match_attention(count, pools):
    heads = [(count, count), (4 * count, 2 * count), (2 * count, count)]
    cases = [
        Case(T, S, H, Hkv, causal, None) for T, S in LENGTHS for causal in (False, True) for H, Hkv in heads[T % 3 :]
    ]
    cases += [Case(33, 33, *heads[1], True, None, dtype, D=32, scale=0.5) for dtype in (torch.bfloat16, torch.float32)]
    assert_right(cases, pools[count].run(run_cases, cases))


@pytest.mark.parametrize("count", COUNTS)
def test_decode_over_all_keys_matches_attention_with_the_same_bits_everywhere(count, pools):
    lens = [((7, 0, 3), (1, 0, 40), (0, 0, 9), (5, 0, 0)), ((0, 0, 0),) * 4, ((300, 2, 1), (0, 0, 0)) * 2]
    cases = [DecodeCase(each[:count], T, dtype=dtype) for each in lens for T in (1, 3) for dtype in (torch.float64,)]
    cases += [DecodeCase(lens[0][:count], H=H, Hkv=Hkv, dtype=torch.bfloat16) for H, Hkv in ((4, 4), (8, 1))]
    by_rank = pools[count].run(run_decode, cases)
    for i, case in enumerate(cases):
        out, lse = by_rank[0][i]
        for results in by_rank:
            assert results[i][0].equal(out)
            assert results[i][1].equal(lse)
        q, keys = case.inputs()
        for b in range(len(q)):
            k, v = (
                torch.cat([pair[which][b, None, :, : each[b]] for pair, each in zip(keys, case.seq_lens, strict=True)], 2)
                for which in (0, 1)
            )
            exact, exact_lse = attention(*(x.double() for x in (q[b, None], k, v)), return_lse=True)
            naive = attention(q[b, None], k, v)
            assert_as_accurate_as_naive(out[b, None], exact, naive)
            torch.testing.assert_close(lse[b, None].double(), exact_lse, rtol=1e-5 if lse.dtype == torch.float32 else 1e-12, atol=0)


def test_keys_in_pages_are_merged_too(pools):
    def merged():
        from pagewise.paged_attention import paged_attention

        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(5)
        q = torch.randn(2, 4, 8, generator=generator)
        caches = torch.randn(3, 2, 6, 4, 2, 8, generator=generator)  # of 3 processes: k and v, 6 blocks of 4 slots
        tables = torch.tensor([[[3, 1], [0, 5]], [[2, 2], [4, 0]], [[1, 0], [3, 5]]], dtype=torch.int32)
        lens = torch.tensor([[5, 0], [8, 0], [3, 1]], dtype=torch.int32)
        local = paged_attention(q, *caches[rank], tables[rank], lens[rank], return_lse=True)
        keys = [[c[:, table].flatten(1, 2)[:, :n] for table, n in zip(t, each, strict=True)] for c, t, each in zip(caches, tables, lens, strict=True)]
        right = []
        for b in range(2):
            k, v = torch.cat([of_process[b] for of_process in keys], dim=1).transpose(1, 2)[:, None].double()
            right.append(attention(q[b, None, :, None].double(), k, v)[0, :, 0])
        return merge_over_processes(*local, group=None)[0], torch.stack(right)

    for out, right in pools[3].run(merged):
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-6)
