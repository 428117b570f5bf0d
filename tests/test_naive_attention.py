"""Naive attention: against torch's own attention, against three nested loops, and its semantics one at a time."""

import importlib.util
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagewise.naive_attention import attention, query_positions, safe_softmax, visibility
from pagewise.options import ScoreOptions

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def random_qkv(B, H, Hkv, T, S, D, *, dtype=torch.float64, device="cpu", spread=1.0):
    generator = torch.Generator().manual_seed(B + 3 * H + 5 * Hkv + 7 * T + 11 * S + 13 * D)
    sizes = [(B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)]
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return [t.to(device, dtype) for t in (q * spread, k, v)]


def random_mask(*size, device="cpu", keep=0.6):
    return (torch.rand(size, generator=torch.Generator().manual_seed(sum(size))) < keep).to(device)


def scores_seen(q, k, **options):
    """[B, H, T, S] scores as they enter the softmax: the lse of a query that may look at one key is its score."""
    S = k.shape[2]
    one_key = torch.eye(S, dtype=torch.bool)
    lses = [attention(q, k, k, attn_mask=one_key[j], return_lse=True, **options)[1] for j in range(S)]
    return torch.stack(lses, dim=-1)


# ------------------------------------------------------------------------------------------------ three nested loops


def by_loops(
    q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, alibi_slopes=None, attn_mask=None,
    dropout_p=0.0, dropout_mask=None,
):  # fmt: skip
    """Attention in Python floats, one score at a time, written from the contract alone."""
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    everything = torch.ones(B, H, T, S, dtype=torch.bool)
    look = (everything if attn_mask is None else everything & attn_mask.cpu()).tolist()
    keep = (everything if dropout_mask is None else everything & dropout_mask.cpu()).tolist()
    q, k, v = (t.double().cpu().tolist() for t in (q, k, v))
    out, lse = torch.zeros(B, H, T, D, dtype=torch.float64), torch.zeros(B, H, T, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            keys, values = k[b][h // (H // Hkv)], v[b][h // (H // Hkv)]
            for i in range(T):
                here = i + S - T  # the key that stands where query i stands
                seen = {}
                for j in range(S):
                    if not look[b][h][i][j] or (causal and j > here):
                        continue
                    if window is not None and j <= here - window:
                        continue
                    score = math.fsum(x * y for x, y in zip(q[b][h][i], keys[j], strict=True))
                    score *= 1 / math.sqrt(D) if scale is None else scale
                    if softcap > 0:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        score += alibi_slopes[h].item() * (j - here if causal else -abs(j - here))
                    seen[j] = score
                if not seen:
                    lse[b, h, i] = -math.inf
                    continue
                m = max(seen.values())
                l = math.fsum(math.exp(s - m) for s in seen.values())
                lse[b, h, i] = m + math.log(l)
                for j, score in seen.items():
                    weight = math.exp(score - m) / l
                    if dropout_p > 0:
                        weight = weight / (1 - dropout_p) if keep[b][h][i][j] else 0.0
                    for d in range(D):
                        out[b, h, i, d] += weight * values[j][d]
    return out, lse


SHAPES = [  # B, H, Hkv, T, S, D
    (1, 1, 1, 1, 1, 1),
    (2, 2, 1, 1, 7, 1),
    (1, 8, 2, 1, 13, 32),
    (1, 8, 1, 7, 5, 1),  # T > S: the first two queries stand before every key
    (2, 8, 8, 3, 5, 1),
    (1, 2, 2, 5, 5, 80),
    (1, 2, 1, 3, 7, 112),
    (1, 2, 1, 2, 3, 256),
    (3, 4, 2, 5, 1, 32),
    (1, 2, 2, 11, 17, 32),
    (2, 2, 1, 3, 0, 32),
    (2, 2, 1, 0, 3, 32),
    (0, 2, 1, 3, 5, 32),
    (1, 2, 1, 0, 0, 32),
]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window 1": {"causal": True, "window": 1},
    "window 3": {"causal": True, "window": 3},
    "window wider than S": {"causal": True, "window": 100},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -1.5, "causal": True},
    "zero scale": {"scale": 0.0},
    "softcap": {"softcap": 0.7},
    "ALiBi": {"alibi_slopes": True},
    "causal ALiBi": {"causal": True, "alibi_slopes": True},
    "mask": {"attn_mask": True, "causal": True},
    "dropout": {"dropout_p": 0.4, "dropout_mask": True},
    "everything": {
        "causal": True, "window": 4, "scale": 0.9, "softcap": 1.3, "alibi_slopes": True, "attn_mask": True,
        "dropout_p": 0.25, "dropout_mask": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_three_nested_loops(shape, options, device):
    B, H, _, T, S, _ = shape
    q, k, v = random_qkv(*shape, device=device)
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.9, -0.2, H, device=device)
    if "attn_mask" in options:
        options["attn_mask"] = random_mask(B, H, T, S, device=device)
    if "dropout_mask" in options:
        options["dropout_mask"] = random_mask(B, H, T, S, device=device, keep=0.7)
    out, lse = attention(q, k, v, return_lse=True, **options)
    expected_out, expected_lse = by_loops(q, k, v, **options)
    torch.testing.assert_close(out.cpu(), expected_out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=1e-12, rtol=1e-12)


MASK_SHAPES = [
    (2, 4, 3, 5), (2, 1, 3, 5), (1, 4, 3, 5), (2, 4, 1, 5), (2, 4, 3, 1), (2, 1, 1, 5), (2, 1, 1, 1), (1, 1, 1, 1),
    (4, 3, 5), (4, 1, 1), (1, 3, 5), (3, 5), (1, 5), (3, 1), (5,), (1,), (),
]  # fmt: skip


@pytest.mark.parametrize("name", ["attn_mask", "dropout_mask"])
@pytest.mark.parametrize("mask_shape", MASK_SHAPES, ids=str)
def test_mask_broadcasts_to_all_four_dimensions(mask_shape, name):
    q, k, v = random_qkv(2, 4, 2, 3, 5, 8)
    mask = random_mask(*mask_shape)
    options = {name: mask} | ({"dropout_p": 0.5} if name == "dropout_mask" else {})
    torch.testing.assert_close(attention(q, k, v, **options), by_loops(q, k, v, **options)[0], atol=1e-12, rtol=0)


# ------------------------------------------------------------------------------------------------ torch's attention

SAME_IN_TORCH = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"is_causal": True}),
}


@pytest.mark.parametrize(("ours", "theirs"), SAME_IN_TORCH.values(), ids=SAME_IN_TORCH.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("D", [32, 80, 112, 256])
def test_equals_torch_attention(heads, kv_heads, D, ours, theirs, device):
    q, k, v = random_qkv(2, heads, kv_heads, 13, 13, D, device=device)
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True, **theirs)
    torch.testing.assert_close(attention(q, k, v, **ours), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("shape", [(2, 1, 3, 7), (1, 8, 1, 7), (3, 7)], ids=str)
def test_equals_torch_attention_under_a_bool_mask(shape, device):
    q, k, v = random_qkv(2, 8, 2, 3, 7, 32, device=device)
    mask = random_mask(*shape, device=device)
    mask[..., 0] = True  # torch gives NaN to a query that sees nothing
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, attn_mask=mask), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("T", "S"), [(1, 7), (3, 7), (5, 64)])
def test_causal_equals_torch_attention_under_a_bottom_right_mask(T, S, device):
    """torch's own is_causal is aligned top-left, so the mask is spelled out."""
    q, k, v = random_qkv(1, 4, 2, T, S, 32, device=device)
    mask = torch.ones(T, S, dtype=torch.bool, device=device).tril(diagonal=S - T)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), expected, atol=1e-12, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ the scores


def test_default_scale_is_one_over_root_head_size():
    q, k = torch.full((1, 1, 1, 16), 3.0), torch.full((1, 1, 1, 16), 1.0)
    assert scores_seen(q, k).item() == 48 / 4


def test_scale_comes_before_softcap():
    q, k = torch.full((1, 1, 1, 1), 4.0).double(), torch.full((1, 1, 1, 1), 2.0).double()
    score = scores_seen(q, k, scale=0.25, softcap=3.0).item()
    assert score == pytest.approx(3 * math.tanh(8 * 0.25 / 3), rel=1e-12)


def test_softcap_bounds_the_score():
    q, k = torch.full((1, 1, 1, 1), 100.0), torch.tensor([100.0, -100.0]).view(1, 1, 2, 1)
    assert scores_seen(q, k, softcap=30.0).flatten().tolist() == [30.0, -30.0]


def test_softcap_zero_means_none():
    q, k = torch.full((1, 1, 1, 1), 100.0), torch.full((1, 1, 1, 1), 3.0)
    assert scores_seen(q, k, softcap=0.0).item() == 300.0


def test_alibi_comes_after_softcap():
    q, k = torch.full((1, 1, 1, 1), 50.0).double(), torch.full((1, 1, 3, 1), 1.0).double()
    scores = scores_seen(q, k, causal=True, softcap=2.0, alibi_slopes=torch.tensor([10.0]))
    expected = [2 * math.tanh(25) - 20, 2 * math.tanh(25) - 10, 2 * math.tanh(25)]
    assert scores.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_alibi_is_not_scaled():
    q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 3, 64)
    assert scores_seen(q, k, alibi_slopes=torch.ones(1)).flatten().tolist() == [-2, -1, 0]


def test_mask_comes_after_softcap():
    q, k, v = random_qkv(1, 1, 1, 4, 4, 8)
    hidden = attention(q, k, v, causal=True, softcap=5.0, return_lse=True)
    assert scores_seen(q, k, causal=True, softcap=5.0)[0, 0].triu(1).isneginf().sum() == 6
    torch.testing.assert_close(hidden[0][:, :, 0], v[:, :, 0])  # softcap · tanh(−∞) would be a weight


def test_causal_alibi_falls_with_distance_from_the_query_at_the_bottom_right():
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 4, 8)
    scores = scores_seen(q, k, causal=True, alibi_slopes=torch.tensor([0.5]))
    assert scores[0, 0].tolist() == [[-1, -0.5, 0, -math.inf], [-1.5, -1, -0.5, 0]]


def test_alibi_without_causal_falls_on_both_sides():
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 4, 8)
    scores = scores_seen(q, k, alibi_slopes=torch.tensor([0.5]))
    assert scores[0, 0].tolist() == [[-1, -0.5, 0, -0.5], [-1.5, -1, -0.5, 0]]


def test_alibi_slope_belongs_to_the_query_head():
    q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 2, 8)
    scores = scores_seen(q, k, causal=True, alibi_slopes=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert scores[0, :, 0, 0].tolist() == [-1, -2, -3, -4]


def test_slopes_stay_float32_under_16_bit_inputs():
    slope = torch.tensor([2**-8 + 2**-20])  # not a bfloat16
    q, k = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1001, 8, dtype=torch.bfloat16)
    one_key = torch.arange(1001) == 0
    _, lse = attention(q, k, k, causal=True, alibi_slopes=slope, attn_mask=one_key, return_lse=True)
    assert lse.item() == pytest.approx(-1000 * slope.item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------ who sees whom


def visible(T, S, **options):
    """[T, S] of 0 and 1: which key has weight for which query, from the output alone."""
    weights = attention(torch.zeros(1, 1, T, S), torch.zeros(1, 1, S, S), torch.eye(S)[None, None], **options)
    return (weights[0, 0] > 0).int().tolist()


CAUSAL = {"causal": True}
SEEN = {
    "causal, fewer queries than keys": (2, 4, CAUSAL, [[1, 1, 1, 0], [1, 1, 1, 1]]),
    "causal, as many queries as keys": (3, 3, CAUSAL, [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
    "causal, queries before the first key": (4, 2, CAUSAL, [[0, 0], [0, 0], [1, 0], [1, 1]]),
    "causal, a single query": (1, 5, CAUSAL, [[1, 1, 1, 1, 1]]),
    "a window counts the query's own key": (3, 3, CAUSAL | {"window": 1}, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    "a window ends at the query": (2, 5, CAUSAL | {"window": 3}, [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]),
    "a window as wide as the keys": (2, 5, CAUSAL | {"window": 5}, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    "True means may look": (1, 3, {"attn_mask": torch.tensor([True, False, True])}, [[1, 0, 1]]),
    "mask and causal must both allow": (
        2, 3, CAUSAL | {"attn_mask": torch.tensor([[True, True, True], [False, True, True]])}, [[1, 1, 0], [0, 1, 1]]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("T", "S", "options", "seen"), SEEN.values(), ids=SEEN.keys())
def test_who_sees_whom(T, S, options, seen):
    assert visible(T, S, **options) == seen


def test_query_positions_end_where_the_keys_end():
    assert query_positions(2, 5).tolist() == [3, 4]
    assert query_positions(3, 1).tolist() == [-2, -1, 0]


def test_visibility_without_causal_is_none():
    assert visibility(torch.zeros(2, 3, dtype=torch.int64), ScoreOptions()) is None


def test_query_head_reads_the_kv_head_of_its_group():
    q, k = torch.zeros(1, 8, 1, 4), torch.zeros(1, 2, 1, 4)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4)
    assert attention(q, k, v)[0, :, 0, 0].tolist() == [10, 10, 10, 10, 20, 20, 20, 20]  # h // 4, not h % 2


def test_query_head_meets_the_keys_of_its_group():
    q, k = torch.ones(1, 4, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    assert scores_seen(q, k).flatten().tolist() == [3, 3, 5, 5]


def test_sequences_of_a_batch_do_not_meet():
    q, k, v = random_qkv(3, 4, 2, 5, 7, 16)
    alone = torch.cat([attention(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(3)])
    torch.testing.assert_close(attention(q, k, v), alone, atol=1e-14, rtol=0)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_row_of_the_output_depends_on_that_row_of_q_only(options):
    q, k, v = random_qkv(1, 4, 2, 6, 9, 32, dtype=torch.float32)
    other = random_qkv(1, 4, 2, 6, 9, 32, dtype=torch.float32, spread=-3.0)[0]
    before = attention(q, k, v, **options)
    for i in range(6):
        changed = other.clone()
        changed[:, :, i] = q[:, :, i]
        assert torch.equal(attention(changed, k, v, **options)[:, :, i], before[:, :, i])


def test_causal_row_ignores_later_keys_and_values():
    q, k, v = random_qkv(1, 2, 2, 4, 6, 16)
    before = attention(q, k, v, causal=True)
    k[:, :, 4:], v[:, :, 4:] = 1e30, -1e30
    after = attention(q, k, v, causal=True)
    assert torch.equal(after[:, :, :2], before[:, :, :2])
    assert not torch.equal(after[:, :, 2], before[:, :, 2])


# ------------------------------------------------------------------------------------------------ nothing to see

SEES_NOTHING = {
    "no keys": ((3, 0), {}),
    "no keys, causal": ((3, 0), {"causal": True}),
    "before the first key": ((5, 2), {"causal": True}),
    "masked": ((3, 4), {"attn_mask": torch.zeros(3, 4, dtype=torch.bool)}),
    "causal and masked": ((4, 4), {"causal": True, "attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1)}),
    "masked, ALiBi": ((3, 4), {"attn_mask": torch.zeros(1, dtype=torch.bool), "alibi_slopes": torch.ones(2)}),
    "masked, softcap": ((3, 4), {"attn_mask": torch.zeros(1, dtype=torch.bool), "softcap": 2.0}),
    "masked, dropout": ((3, 4), {"attn_mask": torch.zeros(1, dtype=torch.bool), "dropout_p": 0.5}),
}


@pytest.mark.parametrize(("sizes", "options"), SEES_NOTHING.values(), ids=SEES_NOTHING.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_query_that_sees_nothing_gets_zero_and_minus_infinity(sizes, options, dtype):
    T, S = sizes
    q, k, v = random_qkv(1, 2, 1, T, S, 8, dtype=dtype)
    out, lse = attention(q, k, v + 1, return_lse=True, **options)
    blind = torch.tensor([i + S - T < 0 for i in range(T)]) if S == 2 else torch.ones(T, dtype=torch.bool)
    assert torch.equal(out[:, :, blind], torch.zeros_like(out[:, :, blind]))
    assert lse[:, :, blind].isneginf().all()
    assert lse[:, :, ~blind].isfinite().all()


def test_query_that_sees_nothing_sends_back_zero_gradients():
    q, k, v = (t.requires_grad_() for t in random_qkv(1, 2, 1, 5, 3, 8))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    (out.sum() + lse[:, :, 2:].sum()).backward()
    assert torch.equal(q.grad[:, :, :2], torch.zeros_like(q[:, :, :2]))
    assert all(t.grad.isfinite().all() and t.grad.any() for t in (q, k, v))


def test_gradients_are_zero_where_no_query_sees_anything():
    q, k, v = (t.requires_grad_() for t in random_qkv(1, 2, 1, 2, 3, 8))
    attention(q, k, v, attn_mask=torch.zeros(2, 3, dtype=torch.bool)).sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (q, k, v))


def test_one_visible_key_has_weight_exactly_one():
    """An epsilon in the denominator would show."""
    q, k, v = random_qkv(1, 2, 2, 4, 4, 16)
    assert torch.equal(attention(q, k, v, causal=True, window=1), v)


def test_hidden_key_never_beats_a_very_negative_visible_score():
    q, k = torch.full((1, 1, 1, 1), -1e6), torch.tensor([1e5, 0.0]).view(1, 1, 2, 1)
    v = torch.tensor([1.0, 777.0]).view(1, 1, 2, 1)
    out, lse = attention(q, k, v, attn_mask=torch.tensor([True, False]), return_lse=True)  # its score is −10¹¹
    assert (out.item(), lse.item()) == (1.0, pytest.approx(-1e11))


# ------------------------------------------------------------------------------------------------ lse and dtypes


def test_lse_is_the_natural_logarithm():
    q, k = torch.zeros(1, 1, 1, 8).double(), torch.zeros(1, 1, 7, 8).double()
    assert attention(q, k, k, return_lse=True)[1].item() == pytest.approx(math.log(7), rel=1e-15)


def test_lse_contains_the_scale():
    q, k, v = random_qkv(1, 2, 1, 3, 5, 16)
    _, lse = attention(q, k, v, scale=0.7, return_lse=True)
    expected = torch.logsumexp(0.7 * q @ k.mT, dim=-1)
    torch.testing.assert_close(lse, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_has_the_dtype_of_q_and_lse_at_least_float32(dtype, device):
    out, lse = attention(*random_qkv(1, 2, 1, 3, 5, 16, dtype=dtype, device=device), return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    assert (out.shape, lse.shape) == ((1, 2, 3, 16), (1, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 2, 7, 33, 64), (2, 2, 2, 1, 129, 80)], ids=str)
def test_output_is_as_accurate_as_its_dtype(shape, dtype, device):
    q, k, v = random_qkv(*shape, dtype=dtype, device=device)
    exact = attention(q.double(), k.double(), v.double(), causal=True)
    error = (attention(q, k, v, causal=True).double() - exact).abs().max() / v.double().abs().max()
    assert error <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_of_16_bit_inputs_are_float32(dtype, device):
    q, k, v = random_qkv(1, 2, 1, 5, 17, 64, dtype=dtype, device=device, spread=30.0)
    _, lse = attention(q, k, v, return_lse=True)
    _, exact = attention(q.double(), k.double(), v.double(), return_lse=True)
    assert exact.abs().max() > 30  # where one rounding to 16 bits is more than the tolerance
    torch.testing.assert_close(lse.double(), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_logits_stay_finite(sign, dtype, device):
    """Scores of ±99 856, more than float16 holds: the largest takes all the weight."""
    q = torch.full((1, 1, 1, 1), 316.0, dtype=dtype, device=device)
    k = torch.tensor([316.0, -316.0, 0.0], dtype=dtype, device=device).view(1, 1, 3, 1) * sign
    v = torch.tensor([1.0, 2.0, 3.0], dtype=dtype, device=device).view(1, 1, 3, 1)
    out, lse = attention(q, k, v, return_lse=True)
    assert (out.item(), lse.item()) == ({1: 1.0, -1: 2.0}[sign], 316.0**2)


@pytest.mark.parametrize("logit", [1e5, -1e5])
def test_equal_extreme_logits_share_the_weight(logit):
    q, k = torch.full((1, 1, 1, 1), logit), torch.ones(1, 1, 4, 1)
    v = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 4, 1)
    out, lse = attention(q, k, v, return_lse=True)
    assert (out.item(), lse.item()) == (3.0, pytest.approx(logit + math.log(4)))


def test_gradients_of_extreme_logits_are_finite():
    q, k, v = (t.requires_grad_() for t in random_qkv(1, 2, 1, 3, 5, 8, spread=1e5))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_safe_softmax_equals_torch_softmax_where_there_is_something_to_see():
    scores = torch.tensor([[1.0, 2.0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf]]).double()
    weights, lse = safe_softmax(scores)
    torch.testing.assert_close(weights, torch.stack([scores[0].softmax(dim=0), torch.zeros(3).double()]))
    torch.testing.assert_close(lse, scores.logsumexp(dim=1))


# ------------------------------------------------------------------------------------------------ dropout


def drawn_weights(dropout_p, T=64, S=64):
    """The weights after dropout of 2 × 2 × T queries with S equal scores each."""
    q, k = torch.zeros(2, 2, T, S), torch.zeros(2, 2, S, S)
    return attention(q, k, torch.eye(S).expand(2, 2, S, S), dropout_p=dropout_p)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate(dropout_p):
    torch.manual_seed(0)
    weights = drawn_weights(dropout_p)
    deviation = math.sqrt(dropout_p * (1 - dropout_p) / weights.numel())
    assert (weights == 0).double().mean().item() == pytest.approx(dropout_p, abs=4 * deviation)


def test_dropout_draws_for_each_sequence_head_query_and_key():
    torch.manual_seed(0)
    dropped = drawn_weights(0.5) == 0
    for dim in range(4):
        first, second = dropped.select(dim, 0), dropped.select(dim, 1)
        assert not torch.equal(first, second)


def test_kept_weights_grow_by_what_was_dropped():
    torch.manual_seed(0)
    kept = drawn_weights(0.75)
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 4 / 64))


def test_dropout_follows_the_seed():
    torch.manual_seed(7)
    first = drawn_weights(0.5)
    assert not torch.equal(drawn_weights(0.5), first)
    torch.manual_seed(7)
    assert torch.equal(drawn_weights(0.5), first)


def test_dropout_zero_draws_nothing():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    drawn_weights(0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_comes_after_the_softmax():
    """Dropped before it, the others would share the whole weight."""
    q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 4, 1), torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 4, 1)
    keep = torch.tensor([True, False, True, False])
    assert attention(q, k, v, dropout_p=0.5, dropout_mask=keep).item() == (1 + 4) / 4 * 2


def test_dropout_leaves_lse_alone():
    q, k, v = random_qkv(1, 2, 1, 3, 5, 8)
    _, lse = attention(q, k, v, return_lse=True)
    _, dropped = attention(q, k, v, dropout_p=0.9, dropout_mask=random_mask(3, 5), return_lse=True)
    assert torch.equal(dropped, lse)


def test_row_with_every_weight_dropped_is_zero():
    q, k, v = random_qkv(1, 2, 1, 3, 5, 8)
    nothing = torch.zeros(1, dtype=torch.bool)
    out, lse = attention(q, k, v, dropout_p=0.5, dropout_mask=nothing, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isfinite().all()


# ------------------------------------------------------------------------------------------------ gradients

GRADCHECKED = {
    "causal, rows that see nothing": ((4, 2), {"causal": True}),
    "mask, softcap, ALiBi": (
        (2, 3),
        {"attn_mask": random_mask(2, 3), "softcap": 1.5, "alibi_slopes": torch.tensor([0.5, 0.1])},
    ),
    "window, scale, dropout": (
        (3, 3),
        {"causal": True, "window": 2, "scale": -0.8, "dropout_p": 0.3, "dropout_mask": random_mask(2, 3, 3)},
    ),
}


@pytest.mark.parametrize(("sizes", "options"), GRADCHECKED.values(), ids=GRADCHECKED.keys())
def test_gradients_equal_finite_differences(sizes, options):
    T, S = sizes
    q, k, v = (t.requires_grad_() for t in random_qkv(1, 2, 1, T, S, 3))
    sees = attention(q, k, v, return_lse=True, **options)[1].isfinite()

    def out_and_finite_lse(q, k, v):
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, lse[sees]

    assert torch.autograd.gradcheck(out_and_finite_lse, (q, k, v))


# ------------------------------------------------------------------------------------------------ bad input


def tensor(*size, dtype=torch.float32, device=None):
    return torch.ones(size, dtype=dtype, device=device)


GOOD = {"q": tensor(2, 4, 3, 8), "k": tensor(2, 2, 5, 8), "v": tensor(2, 2, 5, 8)}
HALF = torch.float16
BAD = {
    "q is no tensor": ({"q": [1.0]}, TypeError, ["q ", "Tensor", "list"]),
    "q of rank 3": ({"q": tensor(4, 3, 8)}, ValueError, ["q ", "4 dimensions", "[4, 3, 8]"]),
    "k of rank 3": ({"k": tensor(2, 5, 8)}, ValueError, ["k ", "4 dimensions", "[2, 5, 8]"]),
    "v of rank 5": ({"v": tensor(1, 2, 2, 5, 8)}, ValueError, ["v ", "4 dimensions", "[1, 2, 2, 5, 8]"]),
    "integer q": ({"q": tensor(2, 4, 3, 8, dtype=torch.int64)}, TypeError, ["q ", "float32", "int64"]),
    "integer everything": ({n: t.int() for n, t in GOOD.items()}, TypeError, ["q ", "float32", "int32"]),
    "complex v": ({"v": tensor(2, 2, 5, 8, dtype=torch.complex64)}, TypeError, ["v ", "float32", "complex64"]),
    "k of another dtype": ({"k": tensor(2, 2, 5, 8, dtype=HALF)}, TypeError, ["k ", "dtype", "float32", "float16"]),
    "v of another dtype": ({"v": tensor(2, 2, 5, 8, dtype=HALF)}, TypeError, ["v ", "dtype", "float32", "float16"]),
    "k on another device": ({"k": tensor(2, 2, 5, 8, device="meta")}, ValueError, ["k ", "device", "cpu", "meta"]),
    "another B in k": ({"k": tensor(1, 2, 5, 8)}, ValueError, ["k ", "[2, 2, 5, 8]", "[1, 2, 5, 8]"]),
    "another D in k": ({"k": tensor(2, 2, 5, 1)}, ValueError, ["k ", "[2, 2, 5, 8]", "[2, 2, 5, 1]"]),
    "another D in v": ({"v": tensor(2, 2, 5, 9)}, ValueError, ["v ", "[2, 2, 5, 8]", "[2, 2, 5, 9]"]),
    "another S in v": ({"v": tensor(2, 2, 1, 8)}, ValueError, ["v ", "[2, 2, 5, 8]", "[2, 2, 1, 8]"]),
    "another Hkv in v": ({"v": tensor(2, 1, 5, 8)}, ValueError, ["v ", "[2, 2, 5, 8]", "[2, 1, 5, 8]"]),
    "H not a multiple of Hkv": (
        {"k": tensor(2, 3, 5, 8), "v": tensor(2, 3, 5, 8)}, ValueError, ["H = 4", "Hkv = 3", "multiple"],
    ),
    "more KV heads than heads": (
        {"k": tensor(2, 8, 5, 8), "v": tensor(2, 8, 5, 8)}, ValueError, ["H = 4", "Hkv = 8", "multiple"],
    ),
    "no KV heads": ({"k": tensor(2, 0, 5, 8), "v": tensor(2, 0, 5, 8)}, ValueError, ["H = 4", "Hkv = 0"]),
    "no head size": ({n: t[..., :0] for n, t in GOOD.items()}, ValueError, ["D ", "at least 1", "0"]),
    "causal of text": ({"causal": "no"}, TypeError, ["causal must be True or False"]),
    "causal None": ({"causal": None}, TypeError, ["causal must be True or False"]),
    "causal 1": ({"causal": 1}, TypeError, ["causal must be True or False"]),
    "window without causal": ({"window": 2}, ValueError, ["window = 2", "causal=True"]),
    "window 0": ({"window": 0, "causal": True}, ValueError, ["window", "at least 1", "got 0"]),
    "negative window": ({"window": -1, "causal": True}, ValueError, ["window", "at least 1", "got -1"]),
    "fractional window": ({"window": 2.0, "causal": True}, TypeError, ["window", "int", "float"]),
    "window True": ({"window": True, "causal": True}, TypeError, ["window", "int", "bool"]),
    "window beyond int64": ({"window": 2**70, "causal": True}, ValueError, ["window"]),
    "scale beyond float32": ({"scale": 1e39}, ValueError, ["scale"]),
    "infinite slopes": ({"alibi_slopes": tensor(4) * math.inf}, ValueError, ["alibi_slopes"]),
    "negative softcap": ({"softcap": -1.0}, ValueError, ["softcap", "0.0", "-1.0"]),
    "infinite softcap": ({"softcap": math.inf}, ValueError, ["softcap", "finite", "inf"]),
    "softcap of text": ({"softcap": "30"}, TypeError, ["softcap", "number", "str"]),
    "NaN scale": ({"scale": math.nan}, ValueError, ["scale", "finite", "nan"]),
    "infinite scale": ({"scale": -math.inf}, ValueError, ["scale", "finite", "-inf"]),
    "scale as a tensor": ({"scale": tensor(1)}, TypeError, ["scale", "number", "Tensor"]),
    "slopes as a list": ({"alibi_slopes": [1.0] * 4}, TypeError, ["alibi_slopes", "Tensor", "list"]),
    "slopes per KV head": ({"alibi_slopes": tensor(2)}, ValueError, ["alibi_slopes", "[4]", "[2]"]),
    "one slope for all heads": ({"alibi_slopes": tensor(1)}, ValueError, ["alibi_slopes", "[4]", "[1]"]),
    "slopes per sequence": ({"alibi_slopes": tensor(2, 4)}, ValueError, ["alibi_slopes", "1 dimension", "[2, 4]"]),
    "float64 slopes": ({"alibi_slopes": tensor(4).double()}, TypeError, ["alibi_slopes", "float32", "float64"]),
    "slopes on another device": (
        {"alibi_slopes": tensor(4, device="meta")}, ValueError, ["alibi_slopes", "device", "cpu", "meta"],
    ),
    "integer mask": (
        {"attn_mask": tensor(3, 5, dtype=torch.int64)}, TypeError, ["attn_mask", "bool", "int64"],
    ),
    "additive mask": ({"attn_mask": tensor(3, 5)}, TypeError, ["attn_mask", "bool", "float32"]),
    "mask as a list": ({"attn_mask": [[True] * 5] * 3}, TypeError, ["attn_mask", "bool", "list"]),
    "mask that does not broadcast": (
        {"attn_mask": tensor(5, 3).bool()}, ValueError, ["attn_mask", "[2, 4, 3, 5]", "[5, 3]"],
    ),
    "mask per KV head": (
        {"attn_mask": tensor(2, 2, 3, 5).bool()}, ValueError, ["attn_mask", "[2, 4, 3, 5]", "[2, 2, 3, 5]"],
    ),
    "mask that would enlarge the output": (
        {"attn_mask": tensor(7, 2, 4, 3, 5).bool()}, ValueError, ["attn_mask", "[2, 4, 3, 5]", "[7, 2, 4, 3, 5]"],
    ),
    "mask of five dimensions": (
        {"attn_mask": tensor(1, 1, 1, 3, 5).bool()}, ValueError, ["attn_mask", "[2, 4, 3, 5]", "[1, 1, 1, 3, 5]"],
    ),
    "mask that would enlarge one query to many": (
        {"q": tensor(2, 4, 1, 8), "attn_mask": tensor(3, 5).bool()}, ValueError, ["attn_mask", "[2, 4, 1, 5]"],
    ),
    "mask on another device": (
        {"attn_mask": torch.ones(3, 5, dtype=torch.bool, device="meta")}, ValueError, ["attn_mask", "device", "meta"],
    ),
    "dropout of everything": ({"dropout_p": 1.0}, ValueError, ["dropout_p", "[0.0, 1.0)", "1.0"]),
    "negative dropout": ({"dropout_p": -0.1}, ValueError, ["dropout_p", "[0.0, 1.0)", "-0.1"]),
    "NaN dropout": ({"dropout_p": math.nan}, ValueError, ["dropout_p", "nan"]),
    "dropout True": ({"dropout_p": True}, TypeError, ["dropout_p", "number", "bool"]),
    "dropout mask without a probability": (
        {"dropout_mask": tensor(3, 5).bool()}, ValueError, ["dropout_mask", "dropout_p is 0"],
    ),
    "integer dropout mask": (
        {"dropout_p": 0.5, "dropout_mask": tensor(3, 5).int()}, TypeError, ["dropout_mask", "bool", "int32"],
    ),
    "dropout mask that does not broadcast": (
        {"dropout_p": 0.5, "dropout_mask": tensor(5, 5).bool()}, ValueError, ["dropout_mask", "[2, 4, 3, 5]", "[5, 5]"],
    ),
}  # fmt: skip


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("change", "error", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_by_name(change, error, words):
    with pytest.raises(error) as caught:
        attention(**(GOOD | change))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.usefixtures("shapes_unchecked")
def test_refused_call_draws_no_dropout():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="window"):
        attention(**GOOD, dropout_p=0.5, window=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(importlib.util.find_spec("beartype") is None, reason="shape annotations are checked by beartype")
def test_shape_annotations_are_checked_in_this_suite():
    """Without the fixture `shapes_unchecked` a wrong shape meets jaxtyping first."""
    from jaxtyping import TypeCheckError

    assert issubclass(TypeCheckError, TypeError)
    with pytest.raises(TypeCheckError):
        attention(**(GOOD | {"v": tensor(2, 2, 1, 8)}))
