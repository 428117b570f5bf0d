"""Lazy rescaling: right for any threshold, and lazy."""

import math

import pytest
import torch
from covering import covering_or_all, label
from flash_cases import random_qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import assert_as_accurate_as_naive
from pagewise.flash_decoding_plus_plus import lazy_rescale_attention
from pagewise.flash_decoding_plus_plus.lazy_rescale import fold_lazily
from pagewise.naive_attention import attention
from pagewise.online_softmax import Partial

BACKENDS = ["torch", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def assert_right(q, k, v, *, causal=False, scale=None, **options):
    out = lazy_rescale_attention(q, k, v, causal=causal, scale=scale, **options)
    shape = {"causal": causal, "scale": scale}
    exact, naive = attention(q.double(), k.double(), v.double(), **shape), attention(q, k, v, **shape)
    finite = exact.isfinite().all(dim=-1)
    assert out.isfinite().all(dim=-1).equal(finite)
    assert_as_accurate_as_naive(out[finite], exact[finite], naive[finite])


AXES = {
    "T": [1, 3, 16],
    "S": [0, 1, 65, 200],
    "heads": [(2, 2), (4, 1), (8, 2)],
    "D": [64, 80, 256],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "num_splits": [None, 2, 17],
    "threshold": [0, 8.0, 90.0],
    "causal": [False, True],
}


def is_small(case):
    return case["T"] * case["heads"][0] * case["D"] <= 2048


@pytest.mark.parametrize("case", covering_or_all(AXES, is_small), ids=label)
def test_every_pair_of_variants(case, backend, kernel_device):
    qkv = random_qkv(case["T"], case["S"], case["D"], case["heads"], dtype=case["dtype"], device=kernel_device)
    qkv[0] *= 8  # scores of some ±30: the maximum grows by more than 8 and by less
    options = {name: case[name] for name in ("num_splits", "threshold", "causal")}
    assert_right(*qkv, **options, backend=backend)


@pytest.mark.parametrize("slope", [0.1, 5.0, -5.0])
@pytest.mark.parametrize(
    ("threshold", "dtype"), [(0.0, torch.float32), (8.0, torch.float32), (8.0, torch.float16), (60.0, torch.float16)]
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_maxima_that_grow_a_little_with_each_tile_or_much(num_splits, threshold, dtype, slope, backend, kernel_device):
    """By 6 in units of log 2 with each tile of 64 keys, by 460, or never."""
    k = torch.zeros(1, 1, 400, 64, device=kernel_device)
    k[..., 0] = slope * torch.arange(400.0)
    q = torch.eye(1, 64, device=kernel_device).view(1, 1, 1, 64)
    v = torch.randn(1, 1, 400, 64, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    assert_right(q, k, v, scale=1.0, threshold=threshold, num_splits=num_splits, backend=backend)


def test_the_torch_backend_is_differentiable():
    qkv = [x.requires_grad_() for x in random_qkv(3, 150, 16, (4, 2))]
    weights = torch.randn(2, 4, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    of_lazy = torch.autograd.grad((lazy_rescale_attention(*qkv, causal=True, num_splits=2) * weights).sum(), qkv)
    of_naive = torch.autograd.grad((attention(*qkv, causal=True) * weights).sum(), qkv)
    for lazy, naive in zip(of_lazy, of_naive, strict=True):
        torch.testing.assert_close(lazy, naive)


# ------------------------------------------------------------------------------------------ lazy


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-300, 300) | st.just(-math.inf), min_size=1, max_size=8), st.sampled_from([0.0, 1.0, 8.0]))
def test_m_is_raised_where_a_tile_exceeds_it_by_more_than_the_threshold(largest, threshold):
    """And what was summed stays what it stands for, whatever m is: acc / l and m + log l."""
    seen = Partial.empty(1, 1, 1, head_size=1, dtype=torch.float64)
    right, m = seen, -math.inf
    for i, score in enumerate(largest):
        scores = torch.tensor([score, score - 3.0], dtype=torch.float64).view(1, 1, 1, 2)
        values = torch.full((1, 1, 2, 1), i + 1.0, dtype=torch.float64)
        seen = fold_lazily(seen, scores, values, threshold=threshold)
        right = right.merge(Partial.of_heads(scores, values))
        m = score if score > m + threshold * math.log(2) else m
        assert seen.m.item() == m
    torch.testing.assert_close(seen.output(), right.output())
    torch.testing.assert_close(seen.lse(), right.lse())


# ------------------------------------------------------------------------------------------ refused, and at the limit


REFUSED = [*({"threshold": number} for number in (-1.0, math.nan, math.inf, 91.0, "8")), {"num_splits": 0}]


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_bad_input_is_refused(change, shapes_unchecked):
    q, k = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 9, 16)
    ((name, value),) = change.items()
    with pytest.raises(TypeError if isinstance(value, str) else ValueError, match=name):
        lazy_rescale_attention(q, k, k, **change)


def test_weights_of_the_largest_threshold_do_not_overflow(backend, kernel_device):
    """A score just below the first tile's m + τ for every later key, with values as large as float16's."""
    threshold, S = 90.0, 4096
    k = torch.full((1, 1, S, 16), 89.0 * math.log(2), device=kernel_device)
    k[:, :, 0] = 0.0
    k[:, :, 1:64] = -100.0
    q = torch.eye(1, 16, device=kernel_device).view(1, 1, 1, 16)
    v = torch.full((1, 1, S, 16), 65504.0, device=kernel_device)
    assert_right(q, k, v, scale=1.0, threshold=threshold, backend=backend)
