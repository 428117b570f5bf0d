"""Naive attention: against three nested loops, against torch's own attention, and in numbers worked out by hand.

test_attention_contract.py tests the promises that all attention functions share.
"""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagewise.naive_attention import attention

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def random_qkv(B, H, Hkv, T, S, D, *, dtype=torch.float64, device="cpu", spread=1.0):
    generator = torch.Generator().manual_seed(B + 3 * H + 5 * Hkv + 7 * T + 11 * S + 13 * D)
    sizes = [(B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)]
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return [t.to(device, dtype) for t in (q * spread, k, v)]


def random_mask(*size, device="cpu", keep=0.6):
    return (torch.rand(size, generator=torch.Generator().manual_seed(sum(size))) < keep).to(device)


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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
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

SOME = random_mask(1, 8, 1, 7)
SOME[..., 0] = True  # torch gives NaN to a query that sees nothing
SAME_IN_TORCH = {  # T, S, our options, torch's
    "plain": (13, 13, {}, {}),
    "scale": (13, 13, {"scale": 0.3}, {"scale": 0.3}),
    "causal": (13, 13, {"causal": True}, {"is_causal": True}),
    "mask": (3, 7, {"attn_mask": SOME}, {"attn_mask": SOME}),
    # torch's own is_causal is aligned top-left, so the mask is spelled out
    "causal, T < S": (3, 7, {"causal": True}, {"attn_mask": torch.ones(3, 7, dtype=torch.bool).tril(4)}),
}


@pytest.mark.parametrize(("T", "S", "ours", "theirs"), SAME_IN_TORCH.values(), ids=SAME_IN_TORCH)
@pytest.mark.parametrize(("kv_heads", "D"), [(8, 32), (2, 80), (1, 256)])
def test_equals_torch_attention(kv_heads, D, T, S, ours, theirs, device):
    q, k, v = random_qkv(2, 8, kv_heads, T, S, D, device=device)
    ours, theirs = (
        {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        for options in (ours, theirs)
    )
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True, **theirs)
    torch.testing.assert_close(attention(q, k, v, **ours), expected, atol=1e-12, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ the scores

CAUSAL = {"causal": True}
HALF = {"alibi_slopes": torch.tensor([0.5])}
CAPPED = 2 * math.tanh(25)
SCORES = {  # queries and keys of one number each, options, and the scores worked out by hand
    "scale, then softcap": (
        [4],
        [2, -2],
        {"scale": 0.25, "softcap": 3.0},
        [[3 * math.tanh(2 / 3), -3 * math.tanh(2 / 3)]],
    ),
    "softcap, then ALiBi": ([50], [1, 1], CAUSAL | HALF | {"softcap": 2.0}, [[CAPPED - 0.5, CAPPED]]),
    "ALiBi on both sides, not scaled": (
        [0, 0],
        [0] * 4,
        HALF | {"scale": 9.0},
        [[-1, -0.5, 0, -0.5], [-1.5, -1, -0.5, 0]],
    ),
    "causal ALiBi": ([0, 0], [0] * 4, CAUSAL | HALF, [[-1, -0.5, 0, -math.inf], [-1.5, -1, -0.5, 0]]),
}


@pytest.mark.parametrize(("queries", "keys", "options", "scores"), SCORES.values(), ids=SCORES)
def test_scores_by_hand(queries, keys, options, scores):
    """The lse of a query that may look at one key is its score."""
    q, k = (torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in (queries, keys))
    one_key = torch.eye(len(keys), dtype=torch.bool)
    lses = [attention(q, k, k, attn_mask=mask, return_lse=True, **options)[1] for mask in one_key]
    expected = torch.tensor(scores, dtype=torch.float64)[None, None]
    torch.testing.assert_close(torch.stack(lses, dim=-1), expected, atol=0, rtol=1e-12)


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


@pytest.mark.parametrize(("T", "S", "options", "seen"), SEEN.values(), ids=SEEN)
def test_who_sees_whom(T, S, options, seen):
    assert visible(T, S, **options) == seen


# ------------------------------------------------------------------------------------------------ lse and dtypes


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


def test_gradients_of_extreme_logits_are_finite():
    q, k, v = (t.requires_grad_() for t in random_qkv(1, 2, 1, 3, 5, 8, spread=1e5))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


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


# ------------------------------------------------------------------------------------------------ gradients

GRADCHECKED = {
    "causal, rows that see nothing": (4, 2, CAUSAL),
    "mask, softcap, ALiBi": (
        2, 3, {"attn_mask": random_mask(2, 3), "softcap": 1.5, "alibi_slopes": torch.tensor([0.5, 0.1])},
    ),
    "window, scale, dropout": (
        3, 3, CAUSAL | {"window": 2, "scale": -0.8, "dropout_p": 0.3, "dropout_mask": random_mask(2, 3, 3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("T", "S", "options"), GRADCHECKED.values(), ids=GRADCHECKED)
def test_gradients_equal_finite_differences(T, S, options):
    q, k, v = (t.requires_grad_() for t in random_qkv(1, 2, 1, T, S, 3))
    sees = attention(q, k, v, return_lse=True, **options)[1].isfinite()

    def out_and_finite_lse(q, k, v):
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, lse[sees]

    assert torch.autograd.gradcheck(out_and_finite_lse, (q, k, v))


# ------------------------------------------------------------------------------------------------ bad input


Q, K = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8)
MASK = torch.ones(3, 5, dtype=torch.bool)
BAD = {  # tools/test_checks.py has what each check refuses, and test_attention_contract.py what all functions refuse
    "rank of v": ({"v": K[None]}, ValueError, r"v must have 4 dimensions .* got shape \[1, 2, 2, 5, 8\]"),
    "complex v": ({"v": K.cfloat()}, TypeError, "v must be float32 .* got complex64"),
    "another B in k": ({"k": K[:1]}, ValueError, r"k must be .* = \[2, 2, 5, 8\], got \[1, 2, 5, 8\]"),
    "another D in k": ({"k": K[..., :1]}, ValueError, r"k must be .* = \[2, 2, 5, 8\], got \[2, 2, 5, 1\]"),
    "another Hkv in v": ({"v": K[:, :1]}, ValueError, r"v must be .* = \[2, 2, 5, 8\], got \[2, 1, 5, 8\]"),
    "no head size": ({"q": Q[..., :0], "k": K[..., :0], "v": K[..., :0]}, ValueError, "D of at least 1, got 0"),
    "causal None": ({"causal": None}, TypeError, "causal must be True or False"),
    "fractional window": ({"window": 2.0, "causal": True}, TypeError, "window must be an int, got float"),
    "window beyond int64": ({"window": 2**70, "causal": True}, ValueError, "window must be below"),
    "scale as a tensor": ({"scale": torch.ones(1)}, TypeError, "scale must be a number, got Tensor"),
    "scale beyond float32": ({"scale": 1e39}, ValueError, "scale must be"),
    "softcap of text": ({"softcap": "30"}, TypeError, "softcap must be a number, got str"),
    "slopes as a list": ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a torch.Tensor.* got list"),
    "slopes per sequence": ({"alibi_slopes": torch.ones(2, 4)}, ValueError, "alibi_slopes must have 1 dimension"),
    "float64 slopes": ({"alibi_slopes": torch.ones(4).double()}, TypeError, "alibi_slopes must be float32"),
    "infinite slopes": ({"alibi_slopes": torch.full((4,), math.inf)}, ValueError, "alibi_slopes must be finite"),
    "slopes elsewhere": ({"alibi_slopes": torch.ones(4, device="meta")}, ValueError, "alibi_slopes must .* device"),
    "additive mask": ({"attn_mask": torch.ones(3, 5)}, TypeError, r"attn_mask .* bool .* \(True = may look\)"),
    "mask of other keys": ({"attn_mask": MASK[:, :4]}, ValueError, r"attn_mask .* \[2, 4, 3, 5\], got \[3, 4\]"),
    "mask of more queries": ({"q": Q[:, :, :1], "attn_mask": MASK}, ValueError, r"attn_mask .* \[2, 4, 1, 5\]"),
    "mask elsewhere": ({"attn_mask": MASK.to("meta")}, ValueError, "attn_mask must have the device"),
    "dropout of everything": ({"dropout_p": 1.0}, ValueError, r"dropout_p .* \[0.0, 1.0\), got 1.0"),
    "negative dropout": ({"dropout_p": -0.1}, ValueError, r"dropout_p .* \[0.0, 1.0\), got -0.1"),
    "dropout without probability": ({"dropout_mask": MASK}, ValueError, "dropout_mask .* dropout_p is 0"),
    "integers to drop": ({"dropout_p": 0.5, "dropout_mask": MASK.int()}, TypeError, r"dropout_mask .*\(True = keep\)"),
    "too few to drop": ({"dropout_p": 0.5, "dropout_mask": MASK[:, :4]}, ValueError, "dropout_mask must broadcast"),
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        attention(**({"q": Q, "k": K, "v": K} | change))


@pytest.mark.usefixtures("shapes_unchecked")
def test_refused_call_draws_no_dropout():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="window"):
        attention(Q, K, K, dropout_p=0.5, window=3)
    assert torch.equal(torch.get_rng_state(), state)
