"""Online softmax: the merge and its zero, softmax in tiles (torch and Triton), attention in tiles, merging results."""

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_compile import compile_triton

from conftest import assert_as_accurate_as_naive, assert_results
from pagewise.kernels.online_softmax import online_softmax_kernel
from pagewise.naive_attention import attention, safe_softmax
from pagewise.online_softmax import Partial, merge_attention, online_attention, online_softmax

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INF = torch.inf


def draw(*shape, seed=0, dtype=torch.float32, device="cpu", spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(device, dtype)


def assert_partials_close(actual: Partial, expected: Partial, *, tolerance: float) -> None:
    for name, a, b in zip(Partial._fields, actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.nan_to_num(neginf=0).abs().amax(), msg=name)


# ------------------------------------------------------------------------------------------------ Partial


@st.composite
def rows_of_scores(draw_from):
    """Scores [2, S] and values [2, S, 3] in float64, some scores −∞, some rows entirely; and pieces of the S keys."""
    S = draw_from(st.integers(1, 24))
    generator = torch.Generator().manual_seed(draw_from(st.integers(0, 2**31)))
    scores = torch.randn(2, S, generator=generator, dtype=torch.float64)
    scores *= draw_from(st.sampled_from([1.0, 30.0, 1e5]))
    scores[torch.rand(2, S, generator=generator) < draw_from(st.sampled_from([0.0, 0.5, 1.0]))] = -INF
    values = torch.randn(2, S, 3, generator=generator, dtype=torch.float64)
    cuts = sorted(draw_from(st.lists(st.integers(0, S), max_size=8)))  # equal cuts make empty pieces
    keys = draw_from(st.permutations(range(S)))
    return scores, values, [keys[start:stop] for start, stop in itertools.pairwise([0, *cuts, S])]


def pieces_of(scores, values, pieces):
    return [Partial.of(scores[:, piece], values[:, piece]) for piece in pieces]


def test_partial_of_is_its_definition():
    scores, values = draw(4, 9, dtype=torch.float64), draw(4, 9, 5, seed=1, dtype=torch.float64)
    m, l, acc = Partial.of(scores, values)
    assert torch.equal(m, scores.max(dim=-1).values)
    torch.testing.assert_close(l, (scores - m[:, None]).exp().sum(dim=-1))
    torch.testing.assert_close(acc, torch.einsum("rs,rsd->rd", (scores - m[:, None]).exp(), values))


@settings(deadline=None)
@given(rows_of_scores())
def test_empty_is_the_zero_of_merge_exactly(row):
    scores, values, _ = row
    seen = Partial.of(scores, values)
    empty = Partial.empty(2, head_size=3, dtype=torch.float64)
    for merged in (seen.merge(empty), empty.merge(seen)):
        assert all(torch.equal(a, b) for a, b in zip(merged, seen, strict=True))


def test_empty_says_that_nothing_was_seen(device):
    empty = Partial.empty(2, 3, head_size=4, device=device)
    assert (empty.m == -INF).all()
    assert empty.l.shape == (2, 3)
    assert empty.acc.shape == (2, 3, 4)
    assert {t.device.type for t in empty} == {device.type}
    assert {t.dtype for t in empty} == {torch.float32}
    assert torch.equal(empty.output(), torch.zeros(2, 3, 4, device=device))
    assert (empty.lse() == -INF).all()


@pytest.mark.parametrize("num_keys", [0, 5])
def test_partial_of_nothing_visible_is_empty(num_keys):
    nothing = Partial.of(torch.full((2, num_keys), -INF), draw(2, num_keys, 3))
    assert all(torch.equal(a, b) for a, b in zip(nothing, Partial.empty(2, head_size=3), strict=True))
    both = nothing.merge(nothing)
    assert all(torch.equal(a, b) for a, b in zip(both, nothing, strict=True))


@pytest.mark.slow
@settings(deadline=None)
@given(rows_of_scores(), st.randoms(use_true_random=False))
def test_any_pieces_merged_in_any_order_are_the_whole(row, chance: random.Random):
    scores, values, pieces = row
    parts = pieces_of(scores, values, pieces)
    while len(parts) > 1:  # any two of them, so that every shape of tree comes up
        chance.shuffle(parts)
        parts.append(parts.pop().merge(parts.pop()))
    assert_partials_close(parts[0], Partial.of(scores, values), tolerance=1e-12)
    weights, lse = safe_softmax(scores)
    torch.testing.assert_close(parts[0].output(), torch.einsum("rs,rsd->rd", weights, values), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts[0].lse(), lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "state"), [*((dtype, torch.float32) for dtype in FLOATS), (torch.float64,) * 2])
def test_state_is_kept_in_float32_at_least(dtype, state):
    part = Partial.of(draw(3, 7, dtype=dtype), draw(3, 7, 2, dtype=dtype))
    assert {t.dtype for t in (*part, *part.merge(part), part.lse(), part.output())} == {state}


def test_values_may_be_shared_by_all_rows():
    scores, values = draw(4, 9), draw(9, 5, seed=1)
    shared, copied = Partial.of(scores, values), Partial.of(scores, values.expand(4, 9, 5))
    assert_partials_close(shared, copied, tolerance=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 1)])
def test_of_heads_reads_each_query_heads_own_kv_head(heads, kv_heads):
    scores, values = draw(2, heads, 5, 7), draw(2, kv_heads, 7, 4, seed=1)
    part = Partial.of_heads(scores, values)
    for b, h in itertools.product(range(2), range(heads)):
        expected = Partial.of(scores[b, h], values[b, h // (heads // kv_heads)])
        assert_partials_close(Partial(*(t[b, h] for t in part)), expected, tolerance=1e-6)


# ------------------------------------------------------------------------------------------------ online_softmax


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    return request.param


@pytest.fixture
def softmax_device(backend, kernel_device):
    """Kernels run where they can; torch code on the same device."""
    return kernel_device


def softmax_rows(num_cols, dtype, device):
    """Four rows: ordinary; the first half −∞; extreme, ±10⁵ (float16: what it holds); nothing but −∞."""
    x = draw(4, num_cols, seed=num_cols, spread=3.0)
    x[1, : (num_cols + 1) // 2] = -INF
    x[2] = torch.where(x[2] > 0, 1e5, -1e5).clamp(-6e4, 6e4) if dtype == torch.float16 else x[2].sign() * 1e5
    x[3] = -INF
    return x.to(device, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_cols", "tile"), [(1, 1), (2, 16), (7, 2), (15, 16), (16, 16), (17, 16), (131, 32)])
def test_online_softmax_matches_softmax(num_cols, tile, dtype, backend, softmax_device, canaries):
    """The numbers beside the rows are NaN, and neither they nor the rows are written."""
    x = torch.full((6, num_cols), torch.nan, dtype=dtype, device=softmax_device)
    x[1:5] = softmax_rows(num_cols, dtype, softmax_device)
    before = x.clone()
    out = online_softmax(x[1:5], tile, backend=backend)
    canaries()
    assert_as_accurate_as_naive(out, safe_softmax(x[1:5].double())[0], safe_softmax(x[1:5].float())[0].to(dtype))
    assert (out[3] == 0).all()
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


SHAPES = [(5,), (2, 3, 5), (2, 1, 1, 2, 5), (0, 5), (5, 0), (0, 0), (0,)]
INPUTS = {str(shape): lambda shape=shape: draw(*shape) for shape in SHAPES} | {
    "transposed": lambda: draw(7, 5).T,
    "every other column": lambda: draw(5, 14)[:, ::2],
    "expanded": lambda: draw(1, 7).expand(5, 7),
    "repeated number": lambda: draw(5, 1).expand(5, 7),
    "permuted": lambda: draw(3, 7, 2).permute(2, 0, 1),
    "inside a larger tensor": lambda: draw(9, 11)[2:7, 3:10],
}


@pytest.mark.parametrize("name", INPUTS)
def test_online_softmax_takes_any_shape_and_any_view(name, backend, softmax_device):
    x = INPUTS[name]().to(softmax_device)
    torch.testing.assert_close(online_softmax(x, 4, backend=backend), x.softmax(dim=-1))


def softmax_gradient(function, x, grad, dtype):
    x = x.detach().to(dtype).requires_grad_()
    function(x).backward(grad.to(dtype))
    return x.grad


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_cols", [7, 64, 1000])
def test_online_softmax_gradient_is_as_accurate_as_softmaxs(num_cols, dtype, backend, softmax_device):
    x = draw(8, num_cols, dtype=dtype, device=softmax_device)
    grad = draw(8, num_cols, seed=1, dtype=dtype, device=softmax_device)
    x[1, : num_cols // 2] = -INF
    softmax = functools.partial(torch.softmax, dim=-1)
    out = softmax_gradient(functools.partial(online_softmax, tile_size=64, backend=backend), x, grad, dtype)
    naive = softmax_gradient(softmax, x, grad, dtype)
    exact = softmax_gradient(softmax, x, grad, torch.float64)
    assert_as_accurate_as_naive(out, exact, naive, factor=3)


def test_online_softmax_gradient_is_zero_where_nothing_is_visible(backend, softmax_device):
    x = torch.full((2, 7), -INF, device=softmax_device)
    x[0] = 1.0
    grad = draw(2, 7, device=softmax_device)
    out = softmax_gradient(functools.partial(online_softmax, tile_size=4, backend=backend), x, grad, torch.float32)
    assert (out[1] == 0).all()
    assert (out[0] != 0).all()


def test_online_softmax_gradcheck():
    x = draw(2, 7, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(lambda x: online_softmax(x, 3), x)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("pointer", ["*fp32", "*fp16", "*bf16"])
@pytest.mark.parametrize("tile", [1, 1024])
def test_kernel_compiles_for_gpus_without_spilling(tile, pointer, sm, record_property):
    signature = {"x_ptr": pointer, "out_ptr": pointer, "num_cols": "i32"}
    compiled = compile_triton(online_softmax_kernel, signature, {"TILE": tile}, sm)
    for name in ("registers", "spilled_bytes", "shared_bytes"):
        record_property(name, getattr(compiled, name))
    assert compiled.spilled_bytes == 0
    assert 0 < compiled.registers <= 128
    assert compiled.shared_bytes <= 1024  # only what a sum over the warps of a thread block needs


def test_auto_backend_takes_what_the_kernel_cannot(device):
    x = draw(3, 7, dtype=torch.float64, device=device)
    torch.testing.assert_close(online_softmax(x, 4), x.softmax(dim=-1))
    torch.testing.assert_close(online_softmax(x.float(), 3), x.float().softmax(dim=-1))


X = torch.zeros(2, 4)
BAD_SOFTMAX = [
    (lambda: online_softmax(X, 0), ValueError, "tile_size must be at least 1, got 0"),
    (lambda: online_softmax(X, 2.0), TypeError, "tile_size must be an int, got float"),
    (lambda: online_softmax(X, 3, backend="triton"), ValueError, "power of two, got 3.*torch"),
    (lambda: online_softmax(X.double(), 2, backend="triton"), ValueError, "float64.*torch"),
    (lambda: online_softmax(X, 2, backend="cuda"), ValueError, "backend must be .*got 'cuda'"),
    (lambda: online_softmax(X.long(), 2), TypeError, "x must be .*int64"),
    (lambda: online_softmax([1.0, 2.0], 2), TypeError, "x must be .*list"),
    (lambda: online_softmax(torch.tensor(1.0), 2), ValueError, "x must .*scalar"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_SOFTMAX)
def test_online_softmax_refuses_bad_input(call, error, message, shapes_unchecked):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------------------ online_attention


def qkv(shape, dtype, device, spread=1.0):
    B, H, Hkv, T, S, D = shape
    sizes = [(B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)]
    q, k, v = (draw(*size, seed=i, dtype=dtype, device=device) for i, size in enumerate(sizes))
    return q * spread, k, v


def assert_attends(q, k, v, *, tile_size, **options):
    """`online_attention` is as accurate as naive attention, and its lse is the oracle's."""
    found = online_attention(q, k, v, tile_size=tile_size, return_lse=True, **options)
    naive = attention(q, k, v, return_lse=True, **options)
    assert_results(found, attention(q.double(), k.double(), v.double(), return_lse=True, **options), naive)
    return found


SIZES = [  # B, H, Hkv, T, S, D
    (1, 1, 1, 1, 1, 32),
    (2, 2, 2, 7, 64, 80),
    (1, 8, 1, 1, 129, 64),
    (2, 8, 4, 13, 17, 112),
    (1, 4, 2, 65, 67, 128),
    (1, 8, 8, 3, 63, 256),
    (1, 2, 1, 9, 2, 33),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("tile_size", [1, 7, 64, 1000])
def test_online_attention_matches_attention(tile_size, shape, dtype, device):
    assert_attends(*qkv(shape, dtype, device), tile_size=tile_size, causal=True)
    assert_attends(*qkv(shape, dtype, device), tile_size=tile_size)


OPTIONS = {  # each for H = 4, T = 7, S = 19, B = 2
    "window 1": {"causal": True, "window": 1},
    "window 5": {"causal": True, "window": 5},
    "scale": {"scale": 0.9},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.5},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, -1.0])},
    "alibi, causal": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
    "everything": {
        "causal": True, "window": 9, "scale": 0.7, "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0]), "attn_mask": draw(2, 4, 7, 19, seed=5) > -0.5,
    },
}  # fmt: skip
MASKS = [(2, 4, 7, 19), (7, 19), (19,), (1, 1, 1, 19), (2, 1, 7, 1), (2, 4, 1, 1), (7, 1), (1,), ()]
OPTIONS |= {f"mask {shape}": {"attn_mask": draw(*shape, seed=len(shape)) > 0} for shape in MASKS}
OPTIONS |= {"mask (7, 19), causal": {"causal": True, "attn_mask": draw(7, 19) > 0}}
OPTIONS |= {"mask, all hidden": {"attn_mask": torch.zeros(7, 19, dtype=torch.bool)}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_size", [1, 5, 19, 32])
@pytest.mark.parametrize("name", OPTIONS)
def test_online_attention_takes_every_option_of_attention(name, tile_size, dtype, device):
    options = {k: o.to(device) if isinstance(o, torch.Tensor) else o for k, o in OPTIONS[name].items()}
    assert_attends(*qkv((2, 4, 2, 7, 19, 32), dtype, device), tile_size=tile_size, **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tile_size": 0}, ValueError, "tile_size must be at least 1, got 0"),
        ({"tile_size": True}, TypeError, "tile_size must be an int, got bool"),
        ({"attn_mask": torch.ones(3, 4, dtype=torch.bool)}, ValueError, "attn_mask must broadcast"),
        ({"attn_mask": torch.zeros(3, 5)}, TypeError, "attn_mask must be a bool tensor"),
    ],
)
def test_online_attention_refuses_bad_input(change, error, message, shapes_unchecked):
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(error, match=message):
        online_attention(**({"q": q, "k": k, "v": k, "tile_size": 2} | change))


# ------------------------------------------------------------------------------------------------ merge_attention


def attend_in_pieces(q, k, v, num_pieces, seed):
    """Attention over shuffled pieces of the keys, one in three of them empty: NaN in out, ±∞ in lse."""
    chance = random.Random(seed)
    S = k.shape[2]
    num_empty = num_pieces // 3
    cuts = sorted(chance.sample(range(1, S), num_pieces - num_empty - 1))
    keys = torch.tensor(chance.sample(range(S), S), device=q.device)
    results = [
        attention(q, k[:, :, keys[start:stop]], v[:, :, keys[start:stop]], return_lse=True)
        for start, stop in itertools.pairwise([0, *cuts, S])
    ]
    out, lse = results[0]
    empty = [(torch.full_like(out, torch.nan), torch.full_like(lse, sign * INF)) for sign in (1, -1)]
    results += [empty[i % 2] for i in range(num_empty)]
    chance.shuffle(results)
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_pieces", [1, 2, 3, 7, 64, 133])
def test_merged_pieces_are_attention_over_all_keys(num_pieces, dtype, device):
    q, k, v = qkv((2, 4, 2, 3, 211, 32), dtype, device, spread=3.0)
    out, lse = merge_attention(*attend_in_pieces(q, k, v, num_pieces, seed=num_pieces))
    exact, exact_lse = attention(q.double(), k.double(), v.double(), return_lse=True)
    assert_as_accurate_as_naive(out, exact, attention(q, k, v))
    assert lse.dtype == torch.float32
    assert (lse - exact_lse).abs().max() <= 1e-5


IN_FLOAT64 = {
    "online attention": lambda *qkv: online_attention(*qkv, tile_size=7, return_lse=True),
    "1 piece": lambda *qkv: merge_attention(*attend_in_pieces(*qkv, 1, seed=1)),
    "64 pieces": lambda *qkv: merge_attention(*attend_in_pieces(*qkv, 64, seed=64)),
}


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_float64_is_exact_in_float64(name, device):
    q, k, v = qkv((2, 4, 2, 3, 211, 32), torch.float64, device, spread=8.0)
    found, exact = IN_FLOAT64[name](q, k, v), attention(q, k, v, return_lse=True)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge_rounds_to_the_dtype_of_outs_once(dtype, device):
    outs, lses = draw(7, 64, 5, dtype=dtype, device=device), draw(7, 64, seed=1, device=device)
    out, _ = merge_attention(outs, lses)
    exact, _ = merge_attention(outs.double(), lses.double())  # of either sign, so that some sums nearly cancel
    once = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6
    assert ((out - exact).abs() <= once).all()


@pytest.mark.parametrize("empty_lse", [-INF, INF])
@pytest.mark.parametrize("garbage", [torch.nan, INF, -INF, 1e30])
@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_piece_changes_nothing_whatever_it_holds(dtype, garbage, empty_lse, device):
    """Row 0 of piece 1 is empty, and row 1 is not. The arguments are left alone."""
    outs, lses = draw(3, 2, 5, dtype=dtype, device=device), draw(3, 2, device=device)
    expected = zip(merge_attention(outs[[0, 2]], lses[[0, 2]]), merge_attention(outs, lses), strict=True)
    outs[1, 0], lses[1, 0] = garbage, empty_lse
    before = outs.clone(), lses.clone()
    for actual, (of_two, of_three) in zip(merge_attention(outs, lses), expected, strict=True):
        assert torch.equal(actual[0], of_two[0])
        assert torch.equal(actual[1], of_three[1])
    torch.testing.assert_close((outs, lses), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("empty_lse", [-INF, INF])
@pytest.mark.parametrize("num_pieces", [0, 1, 5])
def test_nothing_seen_by_any_piece_is_zero(num_pieces, empty_lse, device):
    outs = torch.full((num_pieces, 2, 3), torch.nan, dtype=torch.bfloat16, device=device)
    out, lse = merge_attention(outs, torch.full((num_pieces, 2), empty_lse, device=device))
    assert torch.equal(out, torch.zeros(2, 3, dtype=torch.bfloat16, device=device))
    assert torch.equal(lse, torch.full((2,), -INF, device=device))


@pytest.mark.parametrize("lses", [[1e5, 1e5 - 1], [-1e5, -1e5 + 1], [1e5, -1e5], [88.8, 89.0]])
def test_merge_survives_extreme_lse(lses, device):
    outs, lses = draw(2, 8, device=device), torch.tensor(lses, device=device)
    out, lse = merge_attention(outs, lses)
    weights = lses.double().softmax(dim=0)
    torch.testing.assert_close(out.double(), weights @ outs.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(dim=0), rtol=1e-7, atol=1e-5)


OUTS, LSES = torch.zeros(3, 2, 4), torch.zeros(3, 2)
BAD_MERGE = [
    (OUTS, LSES[:2], ValueError, r"lses must be .*\[3, 2\], got \[2, 2\]"),
    (OUTS, LSES[..., None], ValueError, r"lses must be .*\[3, 2\], got \[3, 2, 1\]"),
    (OUTS[0, 0], LSES[0, 0], ValueError, "outs must be .*got shape"),
    (OUTS, LSES.half(), TypeError, "lses must be .*float32.*got torch.float16"),
    (OUTS.long(), LSES, TypeError, "outs must be .*got torch.int64"),
    ([OUTS], LSES, TypeError, "outs must be .*got list"),
    (OUTS.to("meta"), LSES, ValueError, "lses must have the device of outs"),
]


@pytest.mark.parametrize(("outs", "lses", "error", "message"), BAD_MERGE)
def test_merge_refuses_bad_input(outs, lses, error, message, shapes_unchecked):
    with pytest.raises(error, match=message):
        merge_attention(outs, lses)


def test_merge_of_different_rows_is_refused(shapes_unchecked):
    with pytest.raises(ValueError, match=r"other must have acc of shape \[3, 2\], got \[1, 2\]"):
        Partial.empty(3, head_size=2).merge(Partial.empty(1, head_size=2))


def test_merge_of_float64_results_with_float32_lses_is_exact_in_float64():
    outs, lses = draw(5, 3, 4, dtype=torch.float64), draw(5, 3, seed=1)
    weights = torch.softmax(lses.double(), dim=0)
    out, lse = merge_attention(outs, lses)
    torch.testing.assert_close(out, (weights[..., None] * outs).sum(dim=0), rtol=1e-14, atol=1e-14)
    assert lse.dtype == torch.float32
