"""torch's fused attention inside `paged_attention_varlen`: used where its result is right, replaced where it is not."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import assert_as_accurate_as_naive
from pagewise.flash_attention import flash_attention
from pagewise.naive_attention import attention
from pagewise.paged_attention_varlen import paged_attention_varlen
from pagewise.paged_attention_varlen.fused import fused_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def sequences(lengths, queries=None, dtype=torch.float32, H=4, Hkv=2, D=16, P=4):
    """Random tensors of `paged_attention_varlen`: shuffled blocks, NaN in unused slots."""
    generator = torch.Generator().manual_seed(sum(lengths))
    queries = queries or lengths
    M, total = -(-max(lengths) // P), sum(queries)
    tables = torch.randperm(len(lengths) * M, generator=generator).view(-1, M).int()
    q = torch.randn(total, H, D, generator=generator).to(dtype)
    caches = torch.full((2, tables.numel(), P, Hkv, D), math.nan, dtype=dtype)
    for table, length in zip(tables, lengths, strict=True):
        i = torch.arange(length)
        caches[:, table[i // P].long(), i % P] = torch.randn(2, length, Hkv, D, generator=generator).to(dtype)
    ends = torch.tensor([0, *queries]).cumsum(0).int()
    return [q, caches[0], caches[1], tables, torch.tensor(lengths, dtype=torch.int32), ends]


def expected(tensors, **options):
    """Naive attention of each sequence by itself."""
    q, k_cache, v_cache, tables, lens, ends = tensors
    outs = []
    for table, length, start, stop in zip(tables, lens.tolist(), ends[:-1], ends[1:], strict=True):
        k, v = (cache[table.long()].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (k_cache, v_cache))
        outs.append(attention(q[start:stop].transpose(0, 1)[None], k, v, causal=True, **options)[0].transpose(0, 1))
    return torch.cat(outs)


def slot(tensors, b, i):
    """The block and the offset of token i of sequence b."""
    P = tensors[1].shape[1]
    return int(tensors[3][b, i // P]), i % P


def as_64(tensors):
    return [x.double() if x.is_floating_point() else x for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize("lengths", [([5], [5]), ([40], [40]), ([20, 23], [3, 3]), ([1, 17, 18], [1, 1, 1])])
def test_every_sign_of_the_scale(lengths, scale, dtype):
    """Whole prompts, chunks of prompts and decoding, without lse: torch masks before it scales."""
    tensors = sequences(*lengths, dtype=dtype)
    found = paged_attention_varlen(*tensors, scale=scale)
    assert_as_accurate_as_naive(found, expected(as_64(tensors), scale=scale), expected(tensors, scale=scale))
    negative = paged_attention_varlen(*tensors, scale=-scale, k_scale=-1.0)
    torch.testing.assert_close(negative, found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize(("lengths", "queries"), [([3], [3]), ([20], [20]), ([17], [4]), ([9, 15], [1, 1])])
def test_what_is_not_finite_is_treated_as_in_naive_attention(lengths, queries, what, number, dtype):
    """torch drops NaN from rows of fewer than 16 scores. A last key or value is seen by the last query only."""
    tensors = sequences(lengths, queries, dtype=dtype)
    at = (0, 0) if what == "q" else (*slot(tensors, 0, lengths[0] - 1), slice(None))
    tensors["qkv".index(what)][(*at, 1)] = number
    found = paged_attention_varlen(*tensors)
    right = expected(tensors)
    assert found.isnan().equal(right.isnan())
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, right, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("queries", [[1, 1], [2, 2]])
def test_an_infinite_value_does_not_depend_on_longer_neighbours(queries, dtype):
    """A shorter sequence is padded with its last key. A weight of 0 times its last value would be NaN."""
    tensors = sequences([5, 7], queries, dtype=torch.float32 if dtype.itemsize == 1 else dtype)
    tensors[1:3] = [x.nan_to_num().to(dtype) for x in tensors[1:3]]
    tensors[2].view(torch.uint8 if dtype.itemsize == 1 else dtype)[*slot(tensors, 0, 4), 0, 0] = (
        0x7C if dtype.itemsize == 1 else math.inf
    )
    found = paged_attention_varlen(*tensors)
    alone = [tensors[0][: queries[0]], *tensors[1:3], *(x[:1] for x in tensors[3:5]), tensors[5][:2]]
    right = paged_attention_varlen(*alone)
    assert found[queries[0] - 1, 0, 0] == math.inf
    assert found[: queries[0]].isnan().equal(right.isnan())


@pytest.mark.parametrize(
    "backends", [[SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.MATH], [SDPBackend.CUDNN_ATTENTION]]
)
def test_settings_of_the_caller_for_torch_attention_change_nothing(backends):
    tensors = sequences([20, 23], [3, 3])
    right = paged_attention_varlen(*tensors)
    with sdpa_kernel(backends):
        torch.testing.assert_close(paged_attention_varlen(*tensors), right)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
                                     {"v_scale": 0.5}, {"num_splits": 2}, {"window": 7}, {}])  # fmt: skip
@pytest.mark.parametrize("return_lse", [False, True])
def test_autocast_changes_no_bit(options, return_lse):
    tensors = sequences([20, 23, 3], [3, 3, 3])
    right = paged_attention_varlen(*tensors, **options, return_lse=return_lse)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found = paged_attention_varlen(*tensors, **options, return_lse=return_lse)
        for x, y in zip(*((f if return_lse else (f,)) for f in (found, right)), strict=True):
            assert x.dtype == y.dtype
            assert x.equal(y)


def test_only_rows_that_may_be_wrong_are_computed_again():
    q, k, v = (torch.randn(1, 2, n, 16) for n in (4, 20, 20))
    q[0, 1, 2, 3] = math.nan
    calls = []

    def otherwise(rows):
        calls.append(rows.tolist())
        return flash_attention(q[:, :, rows], k, v, backend="torch")

    found = fused_attention(q, k, v, scale=0.25, otherwise=otherwise)
    assert calls == [[2]]
    assert found[0, 1, 2].isnan().all()
    q[0, 1, 2, 3] = 0
    right = fused_attention(q, k, v, scale=0.25, otherwise=otherwise)
    assert calls == [[2]]
    found[0, 1, 2] = right[0, 1, 2]
    assert found.equal(right)
