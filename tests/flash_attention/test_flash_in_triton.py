"""FlashAttention's Triton kernels: every pair of what they are called for, forward and gradients, by the one policy.

With PAGEWISE_FULL=1 every pair of values meets more than once, and on a GPU the whole product is run.
"""

import functools
import math
import os
from itertools import product

import pytest
import torch
import triton
from covering import covering
from flash_cases import KINDS, as_tokens, assert_matches_naive, name, options_of, random_gradients, random_qkv

from conftest import assert_as_accurate_as_naive
from pagewise.flash_attention import dropout_mask, flash_attention, in_triton, launching
from pagewise.flash_attention import in_triton_hopper as hopper
from pagewise.flash_attention.dropout import Dropout
from pagewise.naive_attention import attention
from pagewise.options import ScoreOptions
from pagewise.tools.sizes import padded

FULL = os.environ.get("PAGEWISE_FULL") == "1"
AXES = {
    "sizes": [(1, 1), (1, 147), (3, 799), (64, 128), (113, 203), (127, 512), (128, 217), (239, 1), (257, 129)],
    "kind": KINDS,
    "head_size": [16, 40, 64, 80, 128, 192, 256],
    "heads": [(6, 6), (6, 2), (6, 1)],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
}
SMALL = AXES | {
    "sizes": [(1, 1), (1, 147), (70, 129), (130, 1), (3, 200)],
    "head_size": [16, 40, 80, 128, 256],
    "heads": [(2, 2), (4, 2), (3, 1)],
}


def cases():
    """Interpreted: on small sizes each pair once. FULL: on all sizes each pair; on a GPU the product."""
    if not FULL:
        return covering(SMALL)
    if not torch.cuda.is_available():
        return covering(AXES)
    return [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def in_kernels(options, **more):
    return lambda q, k, v: flash_attention(q, k, v, **options, **more, return_lse=True, backend="triton")


@pytest.mark.parametrize("case", cases(), ids=name)
def test_forward_and_gradients_are_as_accurate_as_naive(case, kernel_device):
    (T, S), batch = case["sizes"], 2 if FULL else 1
    qkv = random_qkv(T, S, case["head_size"], case["heads"], batch, case["dtype"], kernel_device, seed=3)
    q, k, v = as_tokens(*qkv)
    options = options_of(case["kind"], *q.shape[:3], S, kernel_device)
    assert_matches_naive(in_kernels(options), q, k, v, options)


# ------------------------------------------------------------------------------------------ what tiles must not change


TILES = [(16, 16), (64, 32), (32, 64)]


def tiled(monkeypatch, rows, cols):
    """Let the interpreter take these tiles."""
    from pagewise.kernels import flash_attention, flash_attention_backward

    for module, function in ((flash_attention, "forward_tiles"), (flash_attention_backward, "backward_tiles")):
        choice = (module.tiles(rows, cols, 4, 1),)
        monkeypatch.setattr(module, function, lambda *kind, _choice=choice, **heavy: _choice)


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "window", "all"])
def test_any_tiles(kind, tiles, kernel_device, monkeypatch):
    """Tiles that the mask cuts on either side, tiles it hides, tiles longer than wide and wider than long."""
    tiled(monkeypatch, *tiles)
    q, k, v = random_qkv(35, 67, 16, (2, 1), 1, torch.float32, kernel_device)
    options = options_of(kind, *q.shape[:3], k.shape[2], kernel_device)
    assert_matches_naive(in_kernels(options), q, k, v, options)


@pytest.mark.parametrize("sizes", [(20, 69), (70, 20)])
@pytest.mark.parametrize("window", [1, 3, 48, 1000, None])
def test_tiles_outside_the_mask_are_not_visited(sizes, window, kernel_device, monkeypatch):
    """NaN in what a tile outside the mask would read does no harm, and the rest is right.

    With these sizes, each end of what a tile sees falls on the first or last row of another with some window.
    """
    tiled(monkeypatch, 16, 16)
    (T, S), options = sizes, {"causal": True, "window": window}
    q, k, v = random_qkv(T, S, 16, (1, 1), 1, torch.float32, kernel_device)
    unseen = torch.ones(S, dtype=torch.bool, device=kernel_device)
    positions = torch.arange(S - T, S, device=kernel_device)
    for position in positions:
        unseen[max(0, int(position) + 1 - (window or S)) : max(0, int(position) + 1)] = False
    assert_ignores(unseen, q, k, v, options)
    assert_matches_naive(in_kernels(options), q, k, v, options)


def assert_ignores(unseen, q, k, v, options):
    """NaN in keys and values that no query sees changes nothing, and gives no gradient but 0 to them."""
    clean = [x.masked_fill(unseen[:, None], 0.0) for x in (k, v)]
    poisoned = [x.masked_fill(unseen[:, None], math.nan) for x in (k, v)]
    d_out, d_lse = random_gradients(q)
    results = []
    for kv in (clean, poisoned):
        inputs = [x.detach().requires_grad_() for x in (q, *kv)]
        out, lse = in_kernels(options)(*inputs)
        seen = lse > -math.inf
        loss = (out * d_out).sum() + torch.where(seen, lse, 0.0).mul(d_lse).sum()
        results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)
    assert (results[1][3][:, :, unseen] == 0).all()
    assert (results[1][4][:, :, unseen] == 0).all()


def test_nan_behind_a_mask_does_no_harm(kernel_device):
    q, k, v = random_qkv(40, 70, 16, (2, 1), 1, torch.float32, kernel_device)
    mask = torch.ones(40, 70, dtype=torch.bool, device=kernel_device)
    mask[:, [0, 17, 69]] = False
    assert_ignores(~mask[0], q, k, v, {"attn_mask": mask})


def test_few_keys_do_not_overflow_in_the_padding_of_a_tile(kernel_device):
    """The scores of a row may all be far below 0: what pads its tile has score 0 and must not count."""
    q, k, v = (
        x.to(kernel_device)
        for x in (torch.full((1, 1, 3, 16), 30.0), -torch.ones(1, 1, 5, 16), torch.randn(1, 1, 5, 16))
    )
    assert_matches_naive(in_kernels({"scale": 1.0}), q, k, v, {"scale": 1.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_logits(dtype, kernel_device):
    q, k, v = random_qkv(33, 70, 64, (2, 2), 1, dtype, kernel_device)
    q = q * (1e5 / 64) if dtype == torch.float32 else q * 500
    assert_matches_naive(in_kernels({"causal": True}), q, k, v, {"causal": True})


# ------------------------------------------------------------------------------------- sums of groups, offsets, bits


@pytest.mark.parametrize("splits", [2, 4])
def test_a_group_may_be_split(splits, kernel_device):
    """Partial sums of dK and dV over parts of a group give the same, whichever the split."""
    q, k, v = random_qkv(20, 25, 16, (8, 2), 2, torch.float32, kernel_device)
    d_out, d_lse = random_gradients(q)
    options, dropout = ScoreOptions(causal=True), Dropout.checked(0.2, 5, kernel_device)
    out, lse, saved = in_triton.forward(q, k, v, options, dropout, learns=True)
    whole = in_triton.backward(d_out, d_lse, q, k, v, out, lse, saved, options, dropout, splits=1)
    split = in_triton.backward(d_out, d_lse, q, k, v, out, lse, saved, options, dropout, splits=splits)
    for expected, got in zip(whole, split, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_splits_fill_the_gpu_and_divide_the_group(monkeypatch):
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    device = torch.device("cuda", 0)
    assert [in_triton._default_splits(n, 8, device) for n in (1, 17, 34, 66, 132, 1000)] == [8, 8, 4, 2, 1, 1]
    assert in_triton._default_splits(20, 6, device) == 6
    assert in_triton._default_splits(50, 6, device) == 3
    assert in_triton._default_splits(1, 1, device) == 1


def test_the_backward_repeats_to_the_bit(kernel_device):
    q, k, v = random_qkv(70, 90, 16, (4, 2), 1, torch.float16, kernel_device)
    d_out, d_lse = random_gradients(q)
    options, dropout = ScoreOptions(causal=True), Dropout.checked(0.1, 3, kernel_device)
    out, lse, saved = in_triton.forward(q, k, v, options, dropout, learns=True)

    def gradients():
        return in_triton.backward(d_out, d_lse, q, k, v, out, lse, saved, options, dropout)

    first = gradients()
    for _ in range(50 if kernel_device.type == "cuda" else 2):
        assert all(map(torch.equal, first, gradients()))


def far_apart(tensors, stride):
    """Tensors [1, heads, rows, D] with rows `stride` elements apart, in one memory: only the rows are touched."""
    _, heads, rows, D = tensors[0].shape
    room = torch.empty(rows * stride, dtype=tensors[0].dtype, device=tensors[0].device)
    return [
        room.as_strided((1, heads, rows, D), (0, D, stride, 1), n * heads * D).copy_(x) for n, x in enumerate(tensors)
    ]


def test_offsets_beyond_32_bits(kernel_device):
    """Rows 2²⁴ elements apart and more are copied; below, offsets past 2³² elements are right."""
    q, k, v = random_qkv(20, 300, 16, (1, 1), 1, torch.float16, kernel_device)
    k, v = far_apart((k, v), 2**24 - 16)
    assert in_triton.with_close_rows(k) is k
    mask = torch.empty(19 * 2**27 + 300, dtype=torch.bool, device=kernel_device).as_strided((20, 300), (2**27, 1))
    mask.copy_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < 0.8)
    options = {"causal": True, "attn_mask": mask}
    assert_matches_naive(in_kernels(options), q, k, v, options)


def test_the_backward_does_with_the_log_sum_exp(kernel_device):
    """What the forward leaves for exactness may be missing: out and lse are what the paper stores."""
    q, k, v = random_qkv(9, 5, 16, (2, 1), 1, torch.float32, kernel_device)
    d_out, d_lse = random_gradients(q)
    options, gradients = ScoreOptions(causal=True), []
    for learns in (True, False):
        out, lse, saved = in_triton.forward(q, k, v, options, Dropout(), learns=learns)
        gradients.append(in_triton.backward(d_out, d_lse, q, k, v, out, lse, saved, options, Dropout()))
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_head_sizes_are_padded_to_what_a_matrix_product_takes():
    assert [padded(D) for D in (1, 16, 17, 96, 128, 256)] == [16, 16, 32, 128, 128, 256]


# ------------------------------------------------------------------------------------------------ dropout


SEED = 7 - 2**40  # of more than 32 bits
DRAWN = 49291  # with it, by the first weight


@pytest.mark.parametrize("p", [0.01, 0.17, DRAWN / 2**16, 0.99])
def test_kernels_drop_what_the_mask_says(p, kernel_device, monkeypatch):
    """With values that are the unit vectors, out is the matrix of weights itself."""
    T, S = 40, 64
    q, k, _ = random_qkv(T, S, 64, (3, 1), 2, torch.float32, kernel_device)
    v = torch.eye(S, device=kernel_device).expand(2, 1, S, S)
    kept = dropout_mask((2, 3, T, S), p, SEED, kernel_device)
    for rows, cols in TILES:
        tiled(monkeypatch, rows, cols)
        out = flash_attention(q, k, v, dropout_p=p, dropout_seed=SEED, backend="triton")
        assert torch.equal(out != 0, kept)
    torch.testing.assert_close(out, attention(q, k, v, dropout_p=p, dropout_mask=kept))


# ------------------------------------------------------------------------------------------------ tuned


def test_large_launches_take_the_fastest_tiles(kernel_device, monkeypatch, tmp_path):
    """Each choice is tried once, the one that a clock finds fastest is kept, and what is written is right."""
    from pagewise.kernels import flash_attention as kernels

    choices, tried = (kernels.tiles(16, 32, 4, 1), kernels.tiles(32, 16, 4, 1)), []

    def clock(run, quantiles):
        run()
        tried.append(len(tried))
        return [1.0 / len(tried)] * 3  # the last is the fastest

    monkeypatch.setattr(kernels, "forward_tiles", lambda *kind, heavy: choices)
    monkeypatch.setattr(launching, "triton_mode", lambda: "compiled")
    monkeypatch.setattr(launching, "WORTH_TUNING", 1000)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton, "autotune", functools.partial(triton.autotune, do_bench=clock))
    monkeypatch.setattr(launching, "_tuned", functools.cache(launching._tuned.__wrapped__))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # where a GPU's choice is kept
    q, k, v = random_qkv(40, 50, 16, (2, 1), 1, torch.float32, kernel_device)
    out, _, _ = in_triton.forward(q, k, v, ScoreOptions(causal=True), Dropout())
    torch.testing.assert_close(out, attention(q, k, v, causal=True), rtol=1e-5, atol=1e-5)
    in_triton.forward(q, k, v, ScoreOptions(causal=True), Dropout())
    assert tried == [0, 1]
    tuner = launching._tuned(kernels.flash_attention_kernel, tuple(tuple(choice.items()) for choice in choices))
    assert tuner.best_config.kwargs == {"ROWS": 32, "COLS": 16}
    small = random_qkv(4, 5, 16, (1, 1), 1, torch.float32, kernel_device)  # not worth it
    in_triton.forward(*small, ScoreOptions(), Dropout())
    assert tried == [0, 1]


# ------------------------------------------------------------------------------------------------ Hopper's variants


@pytest.mark.parametrize("variant", hopper.NAMES)
@pytest.mark.parametrize("kind", ["plain", "causal", "softcap", "alibi"])
def test_hoppers_variants(variant, kind, kernel_device):
    q, k, v = random_qkv(70, 150, 40, (4, 2), 2, torch.float16, kernel_device)
    (v,) = as_tokens(v)
    options = options_of(kind, 2, 4, 70, 150, kernel_device)
    out, lse, saved = hopper.forward(q, k, v, ScoreOptions(**options), variant, learns=True)
    exact, exact_lse = attention(*(x.double() for x in (q, k, v)), **options, return_lse=True)
    assert_as_accurate_as_naive(out, exact, attention(q, k, v, **options))
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)
    *_, expected = in_triton.forward(q, k, v, ScoreOptions(**options), Dropout(), learns=True)
    torch.testing.assert_close(saved.stats, expected.stats, rtol=1e-5, atol=1e-5)
    assert (saved.rest + out.double() - exact).abs().mean() < 0.8 * (out - exact).abs().mean()


def test_hoppers_variants_wait_for_a_measurement(monkeypatch):
    """Chosen on sm_90 only, for what they take, and where a measurement is on record."""
    q, k, v = random_qkv(8, 8, 64, (2, 1), 1, torch.float16)
    assert hopper.WINS == {}
    monkeypatch.setattr(hopper, "WINS", {(64, True): "descriptors"})
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])

    def chosen(q, options):
        return hopper.variant_that_wins(q, k, v, options)

    causal = ScoreOptions(causal=True)
    assert chosen(q, causal) == "descriptors"
    assert chosen(q, ScoreOptions()) is None
    assert chosen(q.float(), causal) is None
    assert chosen(q, causal._replace(window=3)) is None
    assert hopper.variant_that_wins(q, k[:, :, :0], v[:, :, :0], causal) is None
    shifted = torch.cat((q.flatten()[:1], q.flatten()))[1:].view(q.shape)  # not at a multiple of 16 bytes
    assert chosen(shifted, causal) is None
    capability[0] = (8, 0)
    assert chosen(q, causal) is None
