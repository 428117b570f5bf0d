"""FlashAttention's Triton kernels: every pair of options, forward and gradients, under the one tolerance policy.

With PAGEWISE_FULL=1 every pair of values meets more than once, and on a GPU the whole product is run.
"""

import json
import math
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from covering import all_cases, covering, in_turns, is_full, label
from flash_cases import KINDS, as_drawn, as_tokens, assert_matches_naive, options_of, random_gradients, random_qkv

from conftest import ROOT
from pagewise.flash_attention import (
    dropout_mask,
    flash_attention,
    flash_attention_varlen,
    in_triton,
    measure_tiles,
    tuning,
)
from pagewise.flash_attention.inputs import FlashInputs, outputs
from pagewise.naive_attention import attention
from pagewise.tools.architecture import SHARED_BYTES, Architecture
from pagewise.tools.sizes import padded

AXES = {
    "sizes": [(1, 1), (1, 147), (3, 799), (64, 128), (113, 203), (127, 512), (128, 217), (239, 1), (257, 129)],
    "kind": KINDS,
    "head_size": [16, 40, 64, 80, 128, 192, 256],
    "heads": [(6, 6), (6, 2), (6, 1)],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
}
SMALL = AXES | {
    "sizes": [(1, 1), (1, 147), (70, 129), (130, 1)],
    "head_size": [16, 40, 80, 256],
    "heads": [(2, 2), (4, 2), (3, 1)],
}


def cases():
    """Interpreted: on small sizes each pair once. FULL: on all sizes each pair; on a GPU the product."""
    if not is_full():
        return covering(SMALL)
    if not torch.cuda.is_available():
        return covering(AXES)
    return all_cases(AXES)


def in_kernels(options):
    return partial(flash_attention, **options, return_lse=True, backend="triton")


@pytest.mark.parametrize("case", cases(), ids=label)
def test_forward_and_gradients_are_as_accurate_as_naive(case, kernel_device):
    (T, S), batch = case["sizes"], 2 if is_full() else 1
    qkv = random_qkv(T, S, case["head_size"], case["heads"], batch, case["dtype"], kernel_device, seed=3)
    q, k, v = as_tokens(*qkv)
    options = options_of(case["kind"], *q.shape[:3], S, kernel_device)
    assert_matches_naive(in_kernels(options), q, k, v, options)


# ------------------------------------------------------------------------------------------ what tiles must not change


TILES = [(16, 16), (64, 32), (32, 64)]


def tiled(monkeypatch, rows, cols):
    """Let the interpreter take these tiles: rows of queries and cols of keys, in the backward, too."""
    tiles = {"forward": tuning.Tiles(rows, cols, 4, 1), "backward": tuning.Tiles(cols, rows, 4, 1)}
    monkeypatch.setattr(tuning, "tiles_for", lambda direction, *launch: tiles[direction])


def inputs_of(q, k, v, causal=False, dropout_p=0.0, dropout_seed=None):
    """Return the value that `flash_attention` passes to a backend."""
    seed = None if dropout_seed is None else torch.tensor(dropout_seed, device=q.device)
    numbers = (q.shape[-1] ** -0.5, causal, None, 0.0, dropout_p, "triton")
    return FlashInputs(q, k, v, None, None, seed, None, None, *numbers)


def forward(inputs, requires_grad=True):
    """out, lse and what is saved."""
    results = outputs(inputs, requires_grad)
    in_triton.forward(inputs, *results)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "window", "all"])
def test_any_tiles(kind, tiles, kernel_device, monkeypatch):
    """Tiles that the mask cuts on either side, tiles it hides, tiles longer than wide and wider than long."""
    tiled(monkeypatch, *tiles)
    q, k, v = random_qkv(35, 67, 16, (2, 1), 1, torch.float32, kernel_device)
    options = options_of(kind, *q.shape[:3], k.shape[2], kernel_device)
    assert_matches_naive(in_kernels(options), q, k, v, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_launch_has_the_options_of_its_tiles(dtype, kernel_device, monkeypatch):
    launched, launch = [], in_triton.launch

    def watched(kernel, *grid, **arguments):
        launched.append([arguments.get(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")])
        launch(kernel, *grid, **arguments)

    monkeypatch.setattr(in_triton, "launch", watched)
    chosen = {"forward": tuning.Tiles(16, 32, 2, 5), "backward": tuning.Tiles(32, 16, 8, 7)}
    monkeypatch.setattr(tuning, "tiles_for", lambda direction, *launch: chosen[direction])
    qkv = [x.requires_grad_() for x in random_qkv(3, 5, 16, (2, 1), 1, dtype, kernel_device)]
    flash_attention(*qkv, backend="triton").sum().backward()
    assert launched == [[2, 5, dtype != torch.float32], [4, None, None], [8, 7, dtype != torch.float32]]


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(16, 32), (32, 16)], ids=str)
def test_a_packed_sequence_has_the_tiles_that_it_has_alone(tiles, kernel_device, monkeypatch):
    """Also where tiles of queries and tiles of keys differ in length. Equal tiles give equal bits."""
    tiled(monkeypatch, *tiles)
    ends = [0, 5, 5, 38, 54]
    qkv = [x[0] for x in random_qkv(54, 54, 16, (2, 1), 1, torch.float32, kernel_device)]
    packed = [x.transpose(0, 1).detach().requires_grad_() for x in qkv]
    sums = torch.tensor(ends, dtype=torch.int32, device=kernel_device)
    out = flash_attention_varlen(*packed, sums, sums, causal=True, backend="triton")
    gradients = torch.autograd.grad(out, packed, out.detach())
    for first, end in pairwise(ends):
        alone = [x[None, :, first:end].detach().requires_grad_() for x in qkv]
        out_alone = flash_attention(*alone, causal=True, backend="triton")
        expected = [out_alone, *torch.autograd.grad(out_alone, alone, out_alone.detach())]
        for got, of_one in zip((out, *gradients), expected, strict=True):
            assert got[first:end].transpose(0, 1).equal(of_one[0])


@pytest.mark.parametrize("sizes", [(20, 69), (70, 20)])
@pytest.mark.parametrize("window", [1, 3, 48, 1000, None])
def test_tiles_outside_the_mask_are_not_visited(sizes, window, kernel_device, monkeypatch):
    """NaN in a tile outside the mask does no harm, and the results are right.

    For some window, each end of the visible range of a tile falls on the first or last row of another tile.
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


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_nan_behind_a_mask_does_no_harm(options, kernel_device):
    q, k, v = random_qkv(40, 70, 16, (2, 1), 1, torch.float32, kernel_device)
    mask = torch.ones(40, 70, dtype=torch.bool, device=kernel_device)
    mask[:, [0, 17, 69]] = False
    assert_ignores(~mask[0], q, k, v, options | {"attn_mask": mask})


def test_few_keys_do_not_overflow_in_the_padding_of_a_tile(kernel_device):
    """The scores of a row may all be far below 0: what pads its tile has score 0 and must not count."""
    q, k, v = (
        x.to(kernel_device)
        for x in (torch.full((1, 1, 3, 16), 30.0), -torch.ones(1, 1, 5, 16), torch.randn(1, 1, 5, 16))
    )
    assert_matches_naive(in_kernels({"scale": 1.0}), q, k, v, {"scale": 1.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_logits(dtype, kernel_device):
    """In float32 the products q · k are exact, because forward and backward may sum them in different orders."""
    q, k, v = random_qkv(33, 70, 64, (2, 2), 1, dtype, kernel_device)
    if dtype == torch.float32:
        q, k = q.round() * 2**15, k.round()
    else:
        q = q * 500
    assert_matches_naive(in_kernels({"causal": True}), q, k, v, {"causal": True})


# ------------------------------------------------------------------------------------- sums of groups, offsets, bits


@pytest.mark.slow
@pytest.mark.parametrize("splits", [2, 4])
def test_a_group_may_be_split(splits, kernel_device, monkeypatch):
    """Partial sums of dK and dV over parts of a group give the same, whichever the split."""
    q, k, v = random_qkv(20, 25, 16, (8, 2), 2, torch.float32, kernel_device)
    d_out, d_lse = random_gradients(q)
    inputs = inputs_of(q, k, v, causal=True, dropout_p=0.2, dropout_seed=5)
    results = forward(inputs)
    monkeypatch.setattr(tuning, "num_splits", lambda *sizes: 1)
    whole = in_triton.backward(inputs, d_out, d_lse, *results)
    monkeypatch.setattr(tuning, "num_splits", lambda *sizes: splits)
    split = in_triton.backward(inputs, d_out, d_lse, *results)
    for expected, got in zip(whole, split, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_splits_fill_the_gpu_and_divide_the_group():
    assert [tuning.num_splits(n, 8, num_sms=132) for n in (1, 17, 34, 66, 132, 1000)] == [8, 8, 4, 2, 1, 1]
    assert tuning.num_splits(20, 6, num_sms=132) == 6
    assert tuning.num_splits(50, 6, num_sms=132) == 3
    assert tuning.num_splits(1, 1, num_sms=132) == 1


@pytest.mark.slow
def test_the_backward_repeats_to_the_bit(kernel_device):
    q, k, v = random_qkv(70, 90, 16, (4, 2), 1, torch.float16, kernel_device)
    d_out, d_lse = random_gradients(q)
    inputs = inputs_of(q, k, v, causal=True, dropout_p=0.1, dropout_seed=3)
    results = forward(inputs)

    def gradients():
        return in_triton.backward(inputs, d_out, d_lse, *results)

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


def heads_apart(x, stride):
    """x [1, heads, rows, D] with its heads `stride` elements apart: only the rows are touched."""
    room = torch.empty(x.shape[1] * stride, dtype=x.dtype, device=x.device)
    return room.as_strided(x.shape, (0, stride, x.shape[3], 1)).copy_(x)


def test_heads_beyond_32_bits(kernel_device):
    """The third head of each tensor begins 2³¹ elements after the first."""
    tensors = random_qkv(5, 7, 16, (3, 3), 1, torch.float16, kernel_device)
    q, k, v = (heads_apart(x, 2**30) for x in tensors)
    assert_matches_naive(in_kernels({"causal": True}), q, k, v, {"causal": True})


def test_gradients_of_rows_beyond_32_bits(kernel_device, monkeypatch):
    """A gradient may lie like a tensor that is too large for this test: rows 2²⁶ elements apart."""

    def rows_apart(x):
        rows, D = x.shape[2:]
        room = torch.empty(rows * 2**26, dtype=x.dtype, device=x.device)
        return room.as_strided(x.shape, (0, D, 2**26, 1))

    q, k, v = random_qkv(40, 40, 16, (1, 1), 1, torch.float32, kernel_device)
    inputs, gradients = inputs_of(q, k, v, causal=True), random_gradients(q)
    results = forward(inputs)
    expected = in_triton.backward(inputs, *gradients, *results)
    monkeypatch.setattr(in_triton, "empty_like", rows_apart)
    assert all(map(torch.equal, in_triton.backward(inputs, *gradients, *results), expected))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 5.0])
@pytest.mark.parametrize("kind", ["causal", "plain", "alibi"])
def test_any_scale(kind, scale, kernel_device):
    """The largest product has the largest score only if the scale is positive; some queries see no key."""
    q, k, v = random_qkv(37, 23, 16, (2, 1), 1, torch.float32, kernel_device)
    options = options_of(kind, *q.shape[:3], k.shape[2], kernel_device) | {"causal": kind != "plain", "scale": scale}
    assert_matches_naive(in_kernels(options), q, k, v, options)


# ------------------------------------------------------------------------------------------ descriptors, from sm_90 on


@pytest.fixture
def by_descriptors(monkeypatch):
    """Let the interpreter launch as on an H100. It checks what a descriptor needs. Returns whether each launch did."""
    launched, launch = [], in_triton.launch

    def watched(kernel, *grid, **arguments):
        launched.append(arguments.get("TMA"))
        launch(kernel, *grid, **arguments)

    monkeypatch.setattr(in_triton, "architecture", lambda device: Architecture(90, SHARED_BYTES[90], 132))
    monkeypatch.setattr(in_triton, "launch", watched)
    return launched


OPTIONS_OF_TILES = ["plain", "causal", "window", "softcap", "dropout", "mask"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), in_turns(OPTIONS_OF_TILES, [(35, 77, 16), (70, 33, 40), (1, 130, 16)]))
def test_descriptors_read_what_pointers_read(kind, sizes, kernel_device, monkeypatch, by_descriptors):
    T, S, D = sizes
    tiled(monkeypatch, 16, 32)
    q, k, v = random_qkv(T, S, D, (4, 2), 2, torch.float16, kernel_device)
    options = options_of(kind, *q.shape[:3], S, kernel_device)
    out, lse = in_kernels(options)(q, k, v)
    assert by_descriptors == [kind != "mask"]
    monkeypatch.setattr(in_triton, "takes_tma", lambda x: False)
    for got, expected in zip((out, lse), in_kernels(options)(q, k, v), strict=True):
        assert torch.equal(got, expected)
    assert by_descriptors == [kind != "mask", False]


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 20}], ids=str)
def test_nan_in_keys_that_a_tile_does_not_see_stays_out(options, tma, kernel_device, monkeypatch, by_descriptors):
    """Tile after tile of queries: the keys before and after those that it sees are NaN, and so are those beyond S."""
    tiled(monkeypatch, 16, 32)
    T, S = 40, 71
    q, k, v = random_qkv(T, S + 9, 16, (1, 1), 1, torch.float16, kernel_device)
    q, seen = q[:, :, :T], torch.ones(T, S, dtype=torch.bool, device=kernel_device)
    if options:
        seen = seen.tril(S - T).triu(S - T + 1 - options.get("window", S))
    monkeypatch.setattr(in_triton, "takes_tma", lambda x: tma)
    expected = in_kernels(options)(q, k[:, :, :S], v[:, :, :S])
    for first in range(0, T, 16):
        rows = slice(first, first + 16)
        unseen = torch.ones(S + 9, dtype=torch.bool, device=kernel_device)
        unseen[:S] = ~seen[rows].any(dim=0)
        poisoned = (x.masked_fill(unseen[:, None], math.nan)[:, :, :S] for x in (k, v))
        for got, right in zip(in_kernels(options)(q, *poisoned), expected, strict=True):
            assert torch.equal(got[:, :, rows], right[:, :, rows])
    assert set(by_descriptors) == {tma}


@pytest.mark.slow
def test_descriptors_are_used_where_all_rows_are_aligned(by_descriptors, kernel_device):
    """Bases and strides at multiples of 16 bytes. The interpreter refuses a descriptor of anything else."""
    room = torch.randn(2, 2, 40, 32, generator=torch.Generator().manual_seed(0)).to(kernel_device, torch.float16)
    q = room[..., :16].contiguous()
    for view, takes in (
        (room[..., :16], True),
        (room[..., 8:24], True),
        (room[..., 4:20], False),  # base
        (room.view(-1)[:2418].as_strided((2, 2, 30, 16), (1200, 600, 20, 1)), False),  # rows
        (room.view(-1)[:2418].as_strided((2, 2, 30, 16), (1204, 600, 16, 1)), False),  # batches
        (room.view(-1)[:2418].as_strided((2, 2, 30, 16), (1200, 604, 16, 1)), False),  # heads
    ):
        for k, v in ((view, view.contiguous()), (view.contiguous(), view)):
            out = flash_attention(q, k, v, backend="triton")
            torch.testing.assert_close(out, attention(q, k, v), rtol=1e-2, atol=1e-3)
            assert by_descriptors.pop() == takes
    flash_attention(*[q.float()] * 3, backend="triton")  # no tensor core multiplies float32 exactly
    assert not by_descriptors.pop()


@pytest.mark.parametrize("seed", range(5))
def test_gradients_with_large_scores_in_float32(seed, kernel_device):
    """The backward's weights add up to 1 only if its scores are rounded as the forward rounded them."""
    q, k, v = random_qkv(5, 33, 112, (2, 1), 1, torch.float32, kernel_device, seed)
    options = {"scale": 1.0, "causal": True}
    assert_matches_naive(in_kernels(options), q, k, v, options)


def test_the_backward_does_with_the_log_sum_exp(kernel_device):
    """The backward also works without m and log l. It then needs only out and lse, as in the paper."""
    q, k, v = random_qkv(9, 5, 16, (2, 1), 1, torch.float32, kernel_device)
    d_out, d_lse = random_gradients(q)
    inputs, gradients = inputs_of(q, k, v, causal=True), []
    for requires_grad in (True, False):
        results = forward(inputs, requires_grad)
        assert results[2].numel() == (2 * 2 * 9 if requires_grad else 0)
        gradients.append(in_triton.backward(inputs, d_out, d_lse, *results))
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_head_sizes_are_padded_to_what_a_matrix_product_takes():
    assert [padded(D) for D in (1, 16, 17, 96, 128, 256)] == [16, 16, 32, 128, 128, 256]


# ------------------------------------------------------------------------------------------------ dropout


SEED = 7 - 2**40  # of more than 32 bits
DRAWN = 49291  # with it, by the first weight


@pytest.mark.slow
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
    torch.testing.assert_close(out, attention(q, k, v, dropout_p=as_drawn(p), dropout_mask=kept))


# ------------------------------------------------------------------------------------------------ tuning


def test_tiles_are_the_first_of_the_list_until_they_are_measured(monkeypatch):
    """No clock decides unless the user asks, so that equal inputs give equal bits in every process."""
    monkeypatch.setattr(tuning, "_measured", {})
    q, gpu = torch.zeros(1, 1, 4, 100, dtype=torch.float16), Architecture(80, SHARED_BYTES[80], 108)
    listed = tuning.choices("forward", 128, 2, gpu, False)
    assert len(listed) > 2
    assert tuning.tiles_for("forward", q, gpu, False) == listed[0]
    times, tried = iter([3.0, 1.0, 2.0, *listed]), []

    def seconds():
        tried.append(tuning.tiles_for("forward", q, gpu, False))
        return next(times) if len(tried) < 4 else 9.0

    assert tuning.measure("forward", q, gpu, False, seconds) == listed[1]
    assert tried == [*listed]
    assert tuning.tiles_for("forward", q, gpu, False) == listed[1]
    for other in (("backward", q, gpu, False), ("forward", q.float(), gpu, False), ("forward", q, gpu, True)):
        assert tuning.tiles_for(*other) == tuning.choices(*tuning.kind_of(*other))[0]


def test_a_hopper_starts_with_tiles_that_were_timed():
    """FASTEST was faster than the list's first in each case that was timed, and no other kind of launch has it."""
    timed = json.loads((ROOT / "lessons/measurements/tile_times.json").read_text())
    assert timed["device"] == "NVIDIA H200"
    for (sm, direction, block_d), tiles in tuning.FASTEST.items():
        gpu = Architecture(sm, SHARED_BYTES[sm], 132)
        listed = tuning.choices(direction, block_d, 2, gpu, False)
        assert listed.index(tiles) == 0
        assert listed.count(tiles) == 1
        assert tuning.choices(direction, block_d, 2, gpu, True)[0] != tiles
        assert tuning.choices(direction, block_d, 4, gpu, False)[0] != tiles
        cases = [each for each in timed["cases"] if (each["direction"], each["head_size"]) == (direction, block_d)]
        assert cases
        for case in cases:
            of_default = {tuple(each["tiles"]): each.get("of_default", 1.0) for each in case["tiles"]}
            assert of_default[tiles] < 0.87
            assert tuple(case["default"]) in listed
    assert tuning.choices("forward", 128, 2, Architecture(100, SHARED_BYTES[100], 148), False)[0].owned == 128


def test_tiles_are_measured_on_a_gpu_only():
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="measure_tiles times kernels on a GPU, got q on cpu"):
        measure_tiles(q, q, q, causal=True)


@pytest.mark.parametrize(("sm", "largest"), [(75, 128), (80, 256), (89, 256), (90, 256)])
def test_float32_head_sizes_whose_backward_would_not_fit_are_refused(sm, largest, monkeypatch):
    monkeypatch.setattr(in_triton, "architecture", lambda device: Architecture(sm, SHARED_BYTES[sm], 40))
    assert in_triton.refuses(torch.zeros(1, 1, 1, largest)) is None
    assert f"head sizes up to {largest}" in (in_triton.refuses(torch.zeros(1, 1, 1, largest + 1)) or "")
    assert in_triton.refuses(torch.zeros(1, 1, 1, 256, dtype=torch.float16)) is None


@pytest.mark.parametrize("sm", SHARED_BYTES)
def test_every_gpu_has_tiles_that_fit(sm):
    gpu = Architecture(sm, SHARED_BYTES[sm], 1)
    for block_d, itemsize, heavy in product((16, 32, 64, 128, 256), (2, 4), (False, True)):
        if (sm, itemsize, block_d) == (75, 4, 256):
            continue  # refused
        for direction, needs in (
            ("forward", tuning.forward_shared_bytes),
            ("backward", tuning.backward_shared_bytes),
        ):
            tiles = tuning.choices(direction, block_d, itemsize, gpu, heavy)
            assert tiles
            assert all(needs(choice, block_d, itemsize, gpu) <= gpu.shared_bytes for choice in tiles)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("lengths", [[5], [0], [0, 64, 1, 0, 130], [64] * 4, [1] * 40, [0, 0, 0]], ids=str)
def test_each_row_of_packed_sequences_has_one_tile(lengths, tile):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    sequences = tuning.sequence_of_each_tile(sum(lengths), tile, cu)
    assert sequences.dtype == torch.int32
    assert len(sequences) == tuning.num_tiles(sum(lengths), tile, cu)
    rows = []
    for index, b in enumerate(sequences.tolist()):
        first = (index - (int(cu[b]) // tile + b)) * tile
        rows += [(b, row) for row in range(first, min(first + tile, lengths[b]))]
    assert rows == [(b, row) for b, length in enumerate(lengths) for row in range(length)]
