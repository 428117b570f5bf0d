"""The promises of `flash_attention` on every backend: checked arguments, the op, dropout, packed sequences."""

import math
from functools import partial

import pytest
import torch
from flash_cases import as_drawn, as_tokens, assert_matches_naive, options_of, random_gradients, random_qkv

from pagewise.flash_attention import dropout_mask, flash_attention, flash_attention_2, flash_attention_varlen
from pagewise.flash_attention.dropout import philox
from pagewise.naive_attention import attention
from pagewise.tools.architecture import architecture
from pagewise.tools.work import count_work

each_backend = pytest.mark.parametrize("backend", ["torch", "triton"])


# ------------------------------------------------------------------------------------------------ the function


@each_backend
def test_a_view_of_tokens_is_read_as_it_lies(backend, kernel_device):
    """[B, T, H, D], as projections leave it: out and gradients lie the same way, and nothing is copied."""
    q, k, v = as_tokens(*random_qkv(33, 50, 16, (4, 2), 2, torch.float32, kernel_device))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, causal=True, backend=backend)
    out.sum().backward()  # a gradient of stride 0, too
    assert out.stride() == q.stride()
    assert q.grad.stride() == q.stride()
    torch.testing.assert_close(out, attention(q, k, v, causal=True), rtol=1e-5, atol=1e-5)


AT_THE_LIMITS = {  # T, S, D, options, dtype
    "a window of 31 bits": (9, 13, 16, {"causal": True, "window": 2**31 - 1}, torch.float32),
    "a window of 40 bits": (9, 13, 16, {"causal": True, "window": 2**40}, torch.float32),
    "a window of 40 bits, T > S": (13, 9, 16, {"causal": True, "window": 2**40}, torch.float32),
    "a softcap far above the scores": (9, 13, 16, {"softcap": 1e5}, torch.float32),  # tanh must be exact near 0
    "a softcap far below the scores": (9, 13, 16, {"softcap": 1e-3}, torch.float32),  # every score is the softcap
    # In exact arithmetic dP − delta is 0 here. In 16 bits only the rounding of out remains.
    "one key, float16": (20, 1, 64, {"dropout_p": 0.17, "dropout_seed": 11}, torch.float16),
    "one key, bfloat16": (20, 1, 64, {"dropout_p": 0.17, "dropout_seed": 11}, torch.bfloat16),
}


@each_backend
@pytest.mark.parametrize(("T", "S", "D", "options", "dtype"), AT_THE_LIMITS.values(), ids=AT_THE_LIMITS)
def test_options_at_their_limits(T, S, D, options, dtype, backend, kernel_device):
    q, k, v = random_qkv(T, S, D, (2, 1), 1, dtype, kernel_device)
    attend = partial(flash_attention, **options, return_lse=True, backend=backend)
    assert_matches_naive(attend, q, k, v, options)


@each_backend
def test_slopes_and_gradients_of_any_strides(backend, kernel_device):
    q, k, v = random_qkv(9, 13, 16, (4, 2), 2, torch.float32, kernel_device)
    slopes = torch.rand(8, device=kernel_device)[::2]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    results = flash_attention(q, k, v, alibi_slopes=slopes, return_lse=True, backend=backend)
    expected = attention(*inputs, alibi_slopes=slopes, return_lse=True)
    for d_out, d_lse in (
        (torch.ones(()).expand(2, 4, 9, 16), torch.randn(9).expand(2, 4, 9)),
        (torch.randn(2, 4, 16, 9).mT, torch.randn(2, 9, 4).mT),
        (torch.randn(2, 9, 4, 32).transpose(1, 2)[..., ::2], torch.randn(2, 4, 18)[..., ::2]),
    ):
        gradients = [x.to(kernel_device) for x in (d_out, d_lse)]
        for got, right in zip(
            torch.autograd.grad(results, inputs, gradients, retain_graph=True),
            torch.autograd.grad(expected, inputs, gradients, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-5)


@each_backend
def test_autocast_changes_nothing(backend, kernel_device):
    q, k, v = (x.requires_grad_() for x in random_qkv(20, 30, 16, (2, 1), 1, torch.float32, kernel_device))
    results = []
    for enabled in (False, True):
        with torch.autocast(kernel_device.type, torch.bfloat16, enabled=enabled):
            out = flash_attention(q, k, v, causal=True, backend=backend)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(map(torch.equal, *results))


def qkv_of(D, dtype=torch.float32):
    return dict(zip("qkv", random_qkv(3, 4, D, (2, 1), 1, dtype), strict=True))


WIDE, DOUBLE = qkv_of(300), qkv_of(16, torch.float64)
REFUSED = [
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be"),
    ({"dropout_p": 0.5, "dropout_seed": 0.5}, TypeError, "dropout_seed must be an int"),
    ({"dropout_p": 0.5, "dropout_seed": torch.tensor([1, 2])}, ValueError, "dropout_seed must be"),
    ({"attn_mask": torch.zeros(3, 4)}, TypeError, "attn_mask must be a bool"),
    (WIDE | {"backend": "triton"}, ValueError, 'backend="triton" takes head sizes up to 256, got 300; backend="torch"'),
    (DOUBLE | {"backend": "triton"}, ValueError, 'backend="triton" takes q in float32, float16 or bfloat16'),
    (DOUBLE | {"backend": "cuda"}, ValueError, r'got torch\.float64; backend="torch" takes it'),
    ({"backend": "cuda", "window": 3, "causal": True}, ValueError, 'backend="cuda" takes no window'),
    (
        {"backend": "cuda", "q": torch.zeros(1, 2, 3, 32, requires_grad=True)},
        ValueError,
        'backend="cuda" has no backward; backend="triton" or "torch" takes it',
    ),
]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        flash_attention(**(qkv_of(32) | arguments))


def test_auto_takes_what_the_kernels_cannot():
    assert flash_attention(**WIDE).shape == (1, 2, 3, 300)


def test_slopes_that_require_a_gradient_are_refused():
    """They get no gradient."""
    q, k, v = random_qkv(3, 4, 32, (2, 1), 1, torch.float32)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    sums = [torch.tensor([0, n], dtype=torch.int32) for n in (3, 4)]
    slopes = {"alibi_slopes": torch.rand(2, requires_grad=True)}
    for call in (
        lambda: flash_attention(q, k, v, **slopes),
        lambda: flash_attention_varlen(*rows, *sums, **slopes),
        lambda: flash_attention_2(q, k, v, **slopes, tile_rows=2, tile_cols=2),
    ):
        with pytest.raises(ValueError, match=r"alibi_slopes must not require a gradient.*alibi_slopes\.detach\(\)"):
            call()
        with torch.no_grad():
            call()


# ------------------------------------------------------------------------------------------------ the op


def test_torch_compile_takes_the_gpu_as_a_constant():
    """Importing torch._dynamo only for this mark would take a second or two in each process."""
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked)
    assert vars(marked).items() <= vars(architecture).items()


# ------------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("p", [0.01, 0.17, 0.5, 0.99])
def test_dropout_keeps_the_right_fraction(p):
    kept = dropout_mask((2, 4, 150, 301), p, 3).double()
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean() - (1 - p)) < 5 * deviation + 2**-17
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3)):  # no column, row or head is treated better
        means = kept.mean(dim=dims)
        assert (means - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) * len(means) / kept.numel()) + 2**-17


def test_a_weight_stays_if_its_draw_is_at_least_p():
    """p is rounded to a multiple of 2⁻¹⁶. The first weight's draw is what the first word's lower half says."""
    draw = int(philox(*torch.zeros(4, dtype=torch.int64), torch.tensor(7))[0]) % 2**16
    for level, stays in ((draw - 1, True), (draw, True), (draw + 0.4, True), (draw + 0.6, False), (draw + 1, False)):
        assert dropout_mask((1, 1, 1, 1), level / 2**16, 7).item() == stays


@each_backend
@pytest.mark.parametrize("p", [2.0**-18, 0.999, 0.99999, 0.999995, 1 - 2.0**-17, 1 - 2.0**-40])
def test_dropout_near_its_ends_keeps_the_mean(backend, p, kernel_device):
    """The factor belongs to the p that 16-bit draws have: kept weights, scaled, have a mean of 1."""
    T, S = 256, 1024
    kept = dropout_mask((1, 2, T, S), p, 3, kernel_device)
    assert kept.any()
    assert p > 0.5 or kept.all()
    growth = 1 / (1 - min(as_drawn(p), 1 - 2.0**-16))
    deviation = math.sqrt(growth / kept.numel())
    assert abs(float(kept.double().mean()) * growth - 1) < 5 * deviation
    if backend == "torch" or p in (0.999, 0.999995):
        T, kept = 8, kept[:, :, :8]
        q, k, v = (torch.zeros(1, 2, n, 16, device=kernel_device) for n in (T, S, S))
        out = flash_attention(q, k, v + 1, dropout_p=p, dropout_seed=3, backend=backend)
        torch.testing.assert_close(out[..., 0], kept.float().mean(dim=-1) * growth)


def test_dropout_differs_between_seeds_heads_and_sequences():
    masks = dropout_mask((2, 2, 64, 64), 0.5, 1).flatten(0, 1).flatten(1)
    other = dropout_mask((2, 2, 64, 64), 0.5, 2).flatten(0, 1).flatten(1)
    high = dropout_mask((2, 2, 64, 64), 0.5, 1 + 2**32).flatten(0, 1).flatten(1)
    for a in (*other, *high, *masks[1:]):
        assert abs((a == masks[0]).double().mean() - 0.5) < 0.05


def test_philox_gives_the_published_numbers():
    """The known answers of Random123's kat_vectors for philox4x32-10."""

    def words(counter, key):
        seed = torch.tensor(key[0] | key[1] << 32).to(torch.int64) if key[1] < 2**31 else torch.tensor(-1)
        return [int(word) for word in philox(*(torch.tensor(c) for c in counter), seed)]

    ones = 2**32 - 1
    assert words((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_a_seed_may_be_a_tensor():
    q, k, v = random_qkv(20, 30, 16, (2, 2), 1, torch.float32)
    by_int = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=12345)
    assert torch.equal(by_int, flash_attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor(12345)))


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_mask_without_a_seed_is_refused():
    with pytest.raises(TypeError, match="dropout_seed must be an int"):
        dropout_mask((1, 1, 2, 3), 0.5, None)
    with pytest.raises(ValueError, match="shape must be"):
        dropout_mask((1, 2, 3), 0.5, 1)
    assert dropout_mask((1, 1, 0, 3), 0.5, 1).shape == (1, 1, 0, 3)


# ------------------------------------------------------------------------------------------------ packed sequences


def packed(lengths_q, lengths_k, heads, D, dtype, device):
    generator = torch.Generator().manual_seed(4)
    H, Hkv = heads
    shapes = ((sum(lengths_q), H, D), (sum(lengths_k), Hkv, D), (sum(lengths_k), Hkv, D))
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    sums = [torch.tensor([0, *x], device=device).cumsum(0).int() for x in (lengths_q, lengths_k)]
    return tensors, sums


@each_backend
@pytest.mark.parametrize("kind", ["softcap", "causal", "window", "alibi", "dropout"])
def test_packed_sequences_are_each_for_themselves(backend, kind, kernel_device):
    """Lengths of 0, 1, one below and one over a tile, and more queries than keys; forward and gradients."""
    lengths_q, lengths_k = [5, 0, 65, 1, 0, 40, 9], [9, 7, 70, 66, 0, 20, 0]
    (q, k, v), (cu_q, cu_k) = packed(lengths_q, lengths_k, (2, 1), 16, torch.float32, kernel_device)
    options = options_of(kind, 1, 2, 1, 1, kernel_device) | ({"scale": -0.3} if kind == "softcap" else {})
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    given = {**options, "max_seqlen_q": 65, "max_seqlen_k": 70, "return_lse": True, "backend": backend}
    out, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, **given)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:2]
    d_out, _ = random_gradients(out[None])
    gradients = torch.autograd.grad(out, (q, k, v), d_out[0])

    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    outs, lses, mask = [], [], None
    if kind == "dropout":
        options = {"dropout_p": as_drawn(0.17)}
        mask = dropout_mask((len(lengths_q), 2, max(lengths_q), max(lengths_k)), 0.17, 11, kernel_device)
    for b, (T, S) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, cols = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        of_b = [x.transpose(0, 1)[None] for x in (q64[rows], k64[cols], v64[cols])]
        dropped = {} if mask is None else {"dropout_mask": mask[b, :, :T, :S]}
        out_b, lse_b = attention(*of_b, **options, **dropped, return_lse=True)
        outs.append(out_b[0].transpose(0, 1))
        lses.append(lse_b[0].transpose(0, 1))
    exact, exact_lse = torch.cat(outs), torch.cat(lses)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-5)
    exact_gradients = torch.autograd.grad(exact, (q64, k64, v64), d_out[0].double())
    for got, expected in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5)


@each_backend
def test_many_short_sequences(backend, kernel_device):
    """Many sequences in a tile's worth of rows: each program finds its own."""
    lengths = [int(n) for n in torch.randint(0, 4, (150,), generator=torch.Generator().manual_seed(0))]
    (q, k, v), (cu, _) = packed(lengths, lengths, (1, 1), 16, torch.float32, kernel_device)
    out = flash_attention_varlen(q, k, v, cu, cu, causal=True, backend=backend)
    sequence = torch.repeat_interleave(torch.arange(150), torch.tensor(lengths)).to(kernel_device)
    alone = (sequence[:, None] == sequence) & torch.ones(len(q), len(q), device=kernel_device).tril().bool()
    expected = attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=alone)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": [0, 4, 3, 9]}, ValueError, "cu_seqlens_q must rise from 0 to the 9 rows of q"),
        ({"cu_seqlens_q": [0, 4, 6, 8]}, ValueError, "cu_seqlens_q must rise"),
        ({"cu_seqlens_k": [1, 4, 6, 12]}, ValueError, "cu_seqlens_k must rise"),
        ({"cu_seqlens_k": [0, 12]}, ValueError, "cu_seqlens_k must be"),
        ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q must be at least the longest length, 5"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0"),
        ({"backend": "cuda"}, ValueError, "backend must be"),
        ({"cu_seqlens_q": []}, ValueError, r"cu_seqlens_q must have B \+ 1 entries, the first 0, got none"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 4, 9])}, TypeError, "cu_seqlens_q must be int32"),
        (
            {"cu_seqlens_k": torch.empty(4, dtype=torch.int32, device="meta")},
            ValueError,
            "cu_seqlens_k must have the",
        ),
        ({"q": torch.zeros(9, 16)}, ValueError, "q must have 3 dimensions .total_q, H, D., got"),
        ({"q": torch.zeros(9, 2, 16).int()}, TypeError, "q must be .*int32"),
        ({"q": torch.zeros(9, 2, 16).double()}, TypeError, "k must have the dtype of q: float64, got float32"),
        ({"q": torch.zeros(9, 2, 8)}, ValueError, r"k must be \[total_k, Hkv, D\] = \[12, 1, 8\], got \[12, 1, 16\]"),
        (
            {"v": torch.zeros(11, 1, 16)},
            ValueError,
            r"v must be \[total_k, Hkv, D\] = \[12, 1, 16\], got \[11",
        ),
        (dict.fromkeys("kv", torch.zeros(12, 3, 16)), ValueError, "H must be a multiple of Hkv"),
        (dict.fromkeys("qkv", torch.zeros(12, 1, 0)), ValueError, "q must have a head size D of at least 1, got 0"),
    ],
)
def test_bad_packing_is_named(change, error, message):
    (q, k, v), _ = packed([4, 0, 5], [4, 2, 6], (2, 1), 16, torch.float32, "cpu")
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": [0, 4, 4, 9], "cu_seqlens_k": [0, 4, 6, 12]} | change
    for name, given in arguments.items():
        if isinstance(given, list):
            arguments[name] = torch.tensor(given, dtype=torch.int32)
    with pytest.raises(error, match=message):
        flash_attention_varlen(**arguments)


# ------------------------------------------------------------------------------------------------ counted


def test_work_of_the_torch_loops_is_theirs():
    q, k, v = random_qkv(200, 300, 16, (4, 2), 1, torch.float32)
    options = {"causal": True, "window": 150}
    loops = count_work(lambda: flash_attention_2(q, k, v, tile_rows=128, tile_cols=128, **options))
    op = count_work(lambda: flash_attention(q, k, v, **options, backend="torch"))
    assert (op.matmul_flops, op.bytes_moved) == (loops.matmul_flops, loops.bytes_moved)


def test_work_of_the_kernels_is_not_counted(kernel_device):
    q, k, v = random_qkv(4, 5, 16, (2, 1), 1, torch.float32, kernel_device)
    with pytest.raises(ValueError, match='count_work counts flash_attention with backend="torch"'):
        count_work(lambda: flash_attention(q, k, v, backend="triton"))
