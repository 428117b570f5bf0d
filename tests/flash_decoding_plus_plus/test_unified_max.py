"""Softmax with a unified max: the band, the rows that leave it, and that no result ever suffers from it.

To plant scores, each query is a unit vector of its own and its scores are that column of the keys: S = Q Kᵀ exactly.
"""

import contextlib
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from covering import covering_or_all, label
from flash_cases import random_qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import DEVICES, assert_as_accurate_as_naive
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import UnifiedMax, calibrate, lazy_rescale_attention, unified_max_attention
from pagewise.kernels.flash_decoding_plus_plus import rounded
from pagewise.naive_attention import attention
from pagewise.tools.device import triton_launch

# numpy's, where Triton is interpreted, of rows that are recomputed
pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")
BACKENDS = ["torch", "triton"]
INF, NAN = math.inf, math.nan
PHI = 5.0
BAND = UnifiedMax(PHI, -57, 63)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def attend(q, k, v, unified_max=BAND, *, backend, causal=False, scale=None, num_splits=None):
    """`unified_max_attention`, held against float64 by the one policy where float64 is finite."""
    options = {"causal": causal, "scale": scale}
    out, recomputed = unified_max_attention(q, k, v, unified_max, **options, num_splits=num_splits, backend=backend)
    exact, naive = attention(q.double(), k.double(), v.double(), **options), attention(q, k, v, **options)
    finite = exact.isfinite().all(dim=-1)
    assert out.isfinite().all(dim=-1).equal(finite)
    assert_as_accurate_as_naive(out[finite], exact[finite], naive[finite])
    return out, recomputed


# ------------------------------------------------------------------------------------------ φ and the band


@pytest.mark.parametrize(
    ("lowest", "highest"), [(-16.8, 6.5), (-10.5, 13.7), (0.0, 0.0), (-38.5, 35.9), (-45.0, 45.0), (1e4, 1e4 + 9)]
)
def test_calibrate_puts_scores_in_the_middle_of_the_band(lowest, highest):
    """The first two are the paper's ranges, of Llama2-7B and ChatGLM2-6B; the fourth is the tiny model's."""
    found = calibrate(torch.tensor([[lowest, -INF], [(lowest + highest) / 2, highest]]))
    below, above = lowest - found.phi - found.low, found.high - (highest - found.phi)
    assert min(below, above) >= 14
    assert abs(below - above) <= 1.01


@pytest.mark.parametrize(("lowest", "highest"), [(-496.8, 363.5), (0.0, 91.0), (-1e5, 1e5), (-3e38, 3e38)])
def test_calibrate_says_that_a_range_is_too_wide(lowest, highest):
    """The first is the paper's, of OPT-6.7B."""
    assert calibrate(torch.tensor([lowest, highest])) is None


def test_the_band_comes_from_the_limits_of_float32():
    """At its upper edge 2²⁰ weights with values of 65504 still have a sum; at its lower one the 2²⁰ that are lost to
    underflow are together less than the rounding of the largest."""
    band = calibrate(torch.zeros(1))
    limits = torch.finfo(torch.float32)
    assert math.exp(band.high) * 2**20 * 65504 < limits.max < math.exp(band.high + 1) * 2**20 * 65504
    assert math.exp(band.low - 1) * limits.eps < limits.tiny * 2**20 < math.exp(band.low) * limits.eps
    assert all(torch.tensor(edge + band.phi).double() == edge + band.phi for edge in (band.low, band.high))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.floats(-40, 40, width=32) | st.just(-INF), min_size=1),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_calibrated_scores_lie_in_the_band(scores, dtype):
    scores = torch.tensor(scores).clamp(max=6e4).to(dtype)
    scores = torch.where(scores < -6e4, -INF, scores)
    seen = scores[scores > -INF].double()
    if not len(seen):
        with pytest.raises(ValueError, match="finite score"):
            calibrate(scores)
    elif (found := calibrate(scores)) is None:
        assert seen.max() - seen.min() > 90
    else:
        assert ((found.low < seen - found.phi) & (seen - found.phi < found.high)).all()
        assert seen.max() - seen.min() <= 90


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        (torch.tensor([0.0, NAN]), ValueError, "NaN"),
        (torch.tensor([0.0, INF]), ValueError, r"\+inf"),
        (torch.tensor([-INF, -INF]), ValueError, "all −inf"),
        (torch.empty(2, 0), ValueError, "finite score"),
        (torch.tensor([1, 2]), TypeError, "int64"),
        ([1.0, 2.0], TypeError, "list"),
    ],
)
def test_calibrate_refuses(scores, error, message, shapes_unchecked):
    with pytest.raises(error, match=message):
        calibrate(scores)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((0.0, 1.0, 1.0), ValueError, "low must be below high"),
        ((NAN, -1.0, 1.0), ValueError, "phi"),
        ((0.0, -INF, 1.0), ValueError, "low"),
        ((0.0, -1.0, INF), ValueError, "high"),
        (("0", -1.0, 1.0), TypeError, "phi"),
        ((0.0, None, 1.0), TypeError, "low"),
    ],
)
def test_a_unified_max_refuses(numbers, error, message, shapes_unchecked):
    with pytest.raises(error, match=message):
        UnifiedMax(*numbers)


# ------------------------------------------------------------------------------------------ within the band

AXES = {
    "T": [1, 3, 16],
    "S": [1, 63, 65, 200],
    "heads": [(2, 2), (4, 1), (8, 2)],
    "D": [64, 80, 128, 256],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "num_splits": [None, 2, 17],
    "causal": [False, True],
}


def is_small(case):
    return case["T"] * case["heads"][0] * case["D"] <= 2048


@pytest.mark.parametrize("case", covering_or_all(AXES, is_small), ids=label)
def test_within_the_band_nothing_is_recomputed(case, backend, kernel_device):
    qkv = random_qkv(case["T"], case["S"], case["D"], case["heads"], dtype=case["dtype"], device=kernel_device)
    _, recomputed = attend(*qkv, causal=case["causal"], num_splits=case["num_splits"], backend=backend)
    assert not recomputed.any()


def test_numbers_may_be_numpys(backend, kernel_device, shapes_unchecked):
    qkv = random_qkv(1, 130, 16, (2, 2), dtype=torch.float32, device=kernel_device)
    unified_max = UnifiedMax(np.float32(1), np.int64(-57), np.float64(63))
    out, _ = unified_max_attention(*qkv, unified_max, num_splits=np.int64(2), backend=backend)
    assert out.equal(unified_max_attention(*qkv, UnifiedMax(1, -57, 63), num_splits=2, backend=backend)[0])


def test_float64_is_float64():
    qkv = random_qkv(3, 100, 16, (4, 2))
    out, recomputed = unified_max_attention(*qkv, BAND, causal=True)
    torch.testing.assert_close(out, attention(*qkv, causal=True), rtol=1e-13, atol=1e-13)
    assert not recomputed.any()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_weights_that_overflow_float16_do_not_overflow_here(num_splits, backend, kernel_device):
    """exp(11.1) is more than float16's largest: with φ = 0 these weights are all beyond it."""
    scores = 40 + torch.arange(200.0).view(1, 1, 1, -1) % 7
    q, k, v = planted(scores.to(kernel_device), torch.float16)
    _, recomputed = attend(q, k, v, UnifiedMax(0, -57, 63), scale=1.0, num_splits=num_splits, backend=backend)
    assert not recomputed.any()


@pytest.mark.parametrize("phi", [0.3, -77.7, 1e4 + 0.3, -1e5, 1e6 + 0.3])
def test_phi_of_any_size_costs_no_digit(phi, backend, kernel_device):
    """A score near 10⁶ has four digits after the point, and so have differences from φ, which is none of 1/512."""
    scores = phi + 12 * torch.randn(1, 2, 1, 230, generator=torch.Generator().manual_seed(0))
    _, recomputed = attend(
        *planted(scores.to(kernel_device)), UnifiedMax(phi, -57, 63), scale=1.0, num_splits=2, backend=backend
    )
    assert not recomputed.any()


@triton.jit
def rounded_kernel(x_ptr, DTYPE: tl.constexpr):
    at = x_ptr + tl.arange(0, 8)
    tl.store(at, rounded(tl.load(at), DTYPE))


def test_weights_are_rounded_to_ten_bits_and_nan_stays_nan(kernel_device):
    """All NaN that a GPU computes are 0x7fffffff, of which no bit may carry into the next."""
    x = torch.tensor([0.0, 1.0, 1 + 2**-11, 1 + 2**-10, 2 - 2**-12, 70000.0, INF, NAN], device=kernel_device)
    x.view(torch.int32)[7] = 0x7FFFFFFF
    with triton_launch(kernel_device):
        rounded_kernel[(1,)](x, DTYPE=tl.float16)
    assert x[:7].tolist() == [0.0, 1.0, 1 + 2**-10, 1 + 2**-10, 2.0, 70016.0, INF]
    assert x[7].isnan()


# ------------------------------------------------------------------------------------------ rows that leave it


def planted(scores, dtype=torch.float32, kv_heads=1, D=32):
    """q, k, v with q kᵀ = scores [B, H, T, S], for H / kv_heads · T rows at most D."""
    B, H, T, S = scores.shape
    rows = H // kv_heads * T
    q = torch.eye(rows, D).expand(B, kv_heads, rows, D).reshape(B, H, T, D)
    k = torch.zeros(B, kv_heads, S, D)
    k[..., :rows] = scores.cpu().reshape(B, kv_heads, rows, S).mT
    v = torch.randn(B, kv_heads, S, D, generator=torch.Generator().manual_seed(1))
    return [x.to(scores.device, dtype) for x in (q, k, v)]


LARGEST = {
    "in the middle": (PHI, False),
    "just below the upper edge": (PHI + 62.75, False),
    "at the upper edge": (PHI + 63, True),
    "just above the upper edge": (PHI + 63.25, True),
    "far above": (6e4, True),
    "just above the lower edge": (PHI - 56.75, False),
    "at the lower edge": (PHI - 57, True),
    "just below the lower edge": (PHI - 57.25, True),
    "far below": (-6e4, True),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "num_splits"),
    [((6, 1, 3), torch.float32, 1), ((6, 1, 3), torch.float16, 3), ((18, 18, 1), torch.float32, 2)],
    ids=["shared keys", "shared keys, float16", "keys of their own"],
)
@pytest.mark.parametrize("everywhere", [True, False], ids=["every key", "one key"])
def test_exactly_the_rows_whose_largest_score_left_the_band(
    everywhere, shape, dtype, num_splits, backend, kernel_device
):
    """A row per case, and between them rows that stay: 18 rows of H heads, T queries each."""
    (H, kv_heads, T), S = shape, 150
    scores = torch.randn(1, 18, S, generator=torch.Generator().manual_seed(0))
    leaves = torch.zeros(1, 18, dtype=torch.bool)
    for row, (largest, expected) in zip(range(0, 18, 2), LARGEST.values(), strict=True):
        scores[0, row] = largest if everywhere else largest - 80.0
        scores[0, row, 60 + 5 * row] = largest
        leaves[0, row] = expected
    calm = scores.masked_fill(leaves[..., None], 0.0)
    options = {"scale": 1.0, "num_splits": num_splits, "backend": backend}
    scores, calm = (x.view(1, H, T, S).to(kernel_device) for x in (scores, calm))
    leaves = leaves.view(1, H, T).to(kernel_device)
    qkv = planted(scores, dtype, kv_heads)
    out, recomputed = attend(*qkv, **options)
    assert recomputed.equal(leaves)
    if backend == "triton":
        synchronised = lazy_rescale_attention(*qkv, threshold=0.0, **options)  # the plain online softmax
    else:
        synchronised = flash_decoding(*qkv, **options)
    assert out[leaves].equal(synchronised[leaves])
    if dtype == torch.float32:  # whose rounding hides no difference: these were not computed again
        assert not out[~leaves].equal(synchronised[~leaves])

    # the other rows have the bits that they have where nothing is recomputed
    calm_out, calm_recomputed = unified_max_attention(*planted(calm, dtype, kv_heads), BAND, **options)
    assert not calm_recomputed.any()
    assert out[~leaves].equal(calm_out[~leaves])


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_small_score_below_a_larger_one_changes_nothing(num_splits, backend, kernel_device):
    """Even if all of a split's scores are so small that their weights underflow."""
    scores = torch.full((1, 1, 3, 256), -6e4)
    scores[..., 130], scores[:, :, 1, 7] = 2.0, -300.0
    _, recomputed = attend(*planted(scores.to(kernel_device)), scale=1.0, num_splits=num_splits, backend=backend)
    assert not recomputed.any()


def test_nan_reaches_only_its_own_row(backend, kernel_device):
    q, k, v = random_qkv(3, 130, 64, (4, 2), dtype=torch.float32, device=kernel_device)
    calm, _ = unified_max_attention(q, k, v, BAND, num_splits=2, backend=backend)
    q[1, 2, 1, 5] = NAN
    out, recomputed = attend(q, k, v, num_splits=2, backend=backend)
    assert recomputed.nonzero().tolist() == [[1, 2, 1]]
    assert out.isnan().any(dim=-1).equal(recomputed)
    assert out[~recomputed].equal(calm[~recomputed])


def test_nan_in_a_key_reaches_who_sees_it(backend, kernel_device):
    q, k, v = random_qkv(3, 130, 64, (4, 2), dtype=torch.float32, device=kernel_device)
    k[0, 1, -1, 5] = NAN  # seen by the last query only
    _, recomputed = attend(q, k, v, causal=True, num_splits=2, backend=backend)
    assert recomputed.nonzero().tolist() == [[0, 2, 2], [0, 3, 2]]


# ------------------------------------------------------------------------------------------ bands by hand


@pytest.mark.parametrize("score", [-1e4, -200.0, -90.0, -70.0, 85.0, 90.0, 200.0, 1e4])
@pytest.mark.parametrize("size", [1.0, 1e9])
def test_a_band_wider_than_the_floats_is_cut(size, score, backend, kernel_device):
    """Large values do not make up for weights that underflow: they leave l as it is."""
    scores = torch.full((1, 1, 2, 150), score)
    scores[0, 0, 1] = 1.0
    q, k, v = planted(scores.to(kernel_device))
    _, recomputed = attend(q, k, v * size, UnifiedMax(0, -1e5, 1e5), scale=1.0, num_splits=2, backend=backend)
    assert recomputed.flatten().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("score", "size"), [(40.0, 1e30), (-40.0, 1e-28), (-55.0, 1e-12)])
def test_values_that_weights_carry_out_of_the_floats(score, size, dtype, backend, kernel_device):
    q, k, v = planted(torch.full((1, 1, 2, 150), score, device=kernel_device), dtype)
    _, recomputed = attend(q, k, v * size, UnifiedMax(0, -57, 63), scale=1.0, num_splits=2, backend=backend)
    assert recomputed.all()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_the_scores_and_the_band(data):
    """A row is recomputed iff its largest score left the band, and it is right in any case."""
    backend = data.draw(st.sampled_from(BACKENDS))
    whole = st.integers(-80, 80).map(float)
    phi, low, high = data.draw(whole), data.draw(st.integers(-57, 0)), data.draw(st.integers(1, 63))
    S, causal, num_splits = data.draw(st.integers(1, 100)), data.draw(st.booleans()), data.draw(st.integers(1, 4))
    height = st.tuples(whole, st.sampled_from([0.0, 1.0, 30.0]))
    heights = data.draw(st.lists(height, min_size=6, max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    middle, spread = torch.tensor(heights).view(1, 2, 3, 2, 1).unbind(dim=3)
    scores = (middle + spread * torch.randn(1, 2, 3, S, generator=generator)).round()
    q, k, v = planted(scores.to(DEVICES[-1]))
    options = {"causal": causal, "scale": 1.0, "num_splits": num_splits, "backend": backend}
    _, recomputed = attend(q, k, v, UnifiedMax(phi, low, high), **options)
    sees = torch.arange(S) <= torch.arange(S - 3, S)[:, None] if causal else torch.ones(3, S, dtype=torch.bool)
    m = scores.masked_fill(~sees, -INF).amax(dim=-1)
    assert recomputed.cpu().equal((m > -INF) & ~((low < m - phi) & (m - phi < high)))


# ------------------------------------------------------------------------------------------ refused arguments


def lens(*numbers):
    return {"seq_lens": torch.tensor(numbers, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"unified_max": None}, TypeError, "use flash_decoding"),
        ({"unified_max": (0.0, -1.0, 1.0)}, TypeError, "UnifiedMax, got tuple"),
        ({"num_splits": 0}, ValueError, "num_splits"),
        ({"num_splits": 2.0}, TypeError, "num_splits"),
        ({"q": torch.zeros(2, 4, 1, 16, requires_grad=True)}, ValueError, "flash_decoding"),
        (lens(1, 10), ValueError, "from 0 to S = 9, the number of keys, got 10"),
        (lens(-1, 9), ValueError, "from 0 to S = 9, the number of keys, got -1"),
        ({"seq_lens": torch.tensor([1, 9])}, TypeError, "seq_lens"),
        (lens(9), ValueError, "seq_lens"),
        ({"seq_lens": [1, 9]}, TypeError, "seq_lens"),
    ],
)
def test_bad_input_is_refused(change, error, message, backend, kernel_device, shapes_unchecked):
    arguments = {"q": torch.zeros(2, 4, 1, 16), "k": torch.zeros(2, 2, 9, 16), "v": torch.zeros(2, 2, 9, 16)}
    arguments |= {"unified_max": BAND, "backend": backend, **change}
    arguments = {key: x.to(kernel_device) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
    unseen = "the number of keys" in message and backend == "triton" and kernel_device.type == "cuda"
    with contextlib.nullcontext() if unseen else pytest.raises(error, match=message):
        unified_max_attention(**arguments)


# ------------------------------------------------------------------------------------------ lengths that differ


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize(("T", "causal"), [(1, False), (3, True)])
def test_each_sequence_sees_the_keys_of_its_length(T, causal, num_splits, backend, kernel_device):
    """Keys and values after its end are NaN. One sequence leaves the band, so its rows are recomputed."""
    lens = [0, 1, 64, 65, 150]
    q, k, v = random_qkv(T, 150, 32, (4, 2), dtype=torch.float32, device=kernel_device, batch=len(lens))
    q[2] *= 1e4
    for b, n in enumerate(lens):
        k[b, :, n:], v[b, :, n:] = NAN, NAN
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=kernel_device)
    options = {"num_splits": num_splits, "causal": causal, "backend": backend}
    out, recomputed = unified_max_attention(q, k, v, BAND, seq_lens=seq_lens, **options)
    for b, n in enumerate(lens):
        expected = attend(q[b, None], k[b, None, :, :n], v[b, None, :, :n], **options)
        torch.testing.assert_close((out[b, None], recomputed[b, None]), expected)
    assert recomputed.flatten(1).all(dim=1).tolist() == [False, False, True, False, False]
    assert not recomputed[[0, 1, 3, 4]].any()


def test_lengths_of_no_sequences(backend, kernel_device):
    q, k, v = random_qkv(1, 9, 16, (4, 2), dtype=torch.float32, device=kernel_device, batch=0)
    seq_lens = torch.zeros(0, dtype=torch.int32, device=kernel_device)
    out, recomputed = unified_max_attention(q, k, v, BAND, seq_lens=seq_lens, backend=backend)
    assert (out.shape, recomputed.shape) == (q.shape, q.shape[:3])
