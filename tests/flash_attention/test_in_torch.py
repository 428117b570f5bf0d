"""The papers' loops in torch: forward and gradients by the one policy, every option, any tiles, and their traffic.

`make test` runs a selection in which every two values of two axes meet.
"""

import math
from functools import partial

import pytest
import torch
from covering import covering, label
from flash_cases import KINDS, assert_matches_naive, naive, options_of, random_qkv, with_gradients

from pagewise.flash_attention import (
    flash_attention,
    flash_attention_1,
    flash_attention_1_backward,
    flash_attention_1_forward,
    flash_attention_2,
    flash_attention_2_backward,
    flash_attention_2_forward,
    tile_sizes,
)
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.tiles import Tiles
from pagewise.options import ScoreOptions
from pagewise.tools.work import Work, count_work

VERSIONS = {"1": flash_attention_1, "2": flash_attention_2}
FORWARDS = {"1": flash_attention_1_forward, "2": flash_attention_2_forward}
BACKWARDS = {"1": flash_attention_1_backward, "2": flash_attention_2_backward}
each_version = pytest.mark.parametrize("version", VERSIONS)


AXES = {
    "sizes": [(1, 1), (1, 147), (3, 199), (64, 128), (113, 103), (127, 64), (119, 1), (129, 65)],
    "kind": ["plain", "causal", "window", "softcap", "alibi", "mask", "dropout", "scale", "all"],
    "tiles": [(64, 64), (17, 50), (300, 1000), (50, 13)],
    "head_size": [16, 40, 64, 128],
    "heads": [(6, 6), (6, 2), (6, 1)],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "version": list(VERSIONS),
}


@pytest.mark.parametrize("case", covering(AXES), ids=label)
def test_forward_and_gradients_are_as_accurate_as_naive(case):
    (T, S), (Br, Bc) = case["sizes"], case["tiles"]
    q, k, v = random_qkv(T, S, case["head_size"], case["heads"], dtype=case["dtype"])
    options = options_of(case["kind"], *q.shape[:3], S)
    loops = partial(VERSIONS[case["version"]], tile_rows=Br, tile_cols=Bc, **options, return_lse=True)
    assert_matches_naive(loops, q, k, v, options)


# ------------------------------------------------------------------------------------------------ exactly


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [(1, 1), (4, 3), (3, 100), (100, 3)])
def test_versions_equal_naive_attention_in_float64_whatever_the_tiles(tiles, kind, shapes_unchecked):
    q, k, v = random_qkv(7, 10, 8)
    options = options_of(kind, 2, 6, 7, 10) | ({"window": 4} if kind in ("window", "all") else {})
    d_out, d_lse = torch.randn_like(q), torch.randn(q.shape[:3], dtype=q.dtype)
    results, gradients = with_gradients(lambda *qkv: naive(*qkv, options), q, k, v, d_out, d_lse)
    for loops in VERSIONS.values():
        loops = partial(loops, tile_rows=tiles[0], tile_cols=tiles[1], **options, return_lse=True)
        ours = with_gradients(loops, q, k, v, d_out, d_lse)
        torch.testing.assert_close(ours, (results, gradients), rtol=1e-11, atol=1e-12)


@each_version
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_backward_function_gives_what_autograd_gives(version, kind):
    q, k, v = random_qkv(9, 14, 8)
    options = {**options_of(kind, 2, 6, 9, 14), "tile_rows": 4, "tile_cols": 5}
    d_out, d_lse = torch.randn_like(q), torch.randn(q.shape[:3], dtype=q.dtype)
    loops = partial(VERSIONS[version], **options, return_lse=True)
    (out, lse), gradients = with_gradients(loops, q, k, v, d_out, d_lse)
    stored = FORWARDS[version](q, k, v, **options)
    assert stored[0].equal(out)
    m_and_l = stored[1:]
    assert (m_and_l[0] if version == "2" else m_and_l[0] + torch.log(m_and_l[1])).equal(lse)
    ours = BACKWARDS[version](d_out, q, k, v, *stored, **options, d_lse=d_lse)
    torch.testing.assert_close(ours, gradients, rtol=0, atol=0)
    without = BACKWARDS[version](d_out, q, k, v, *stored, **options)
    of_zero = BACKWARDS[version](d_out, q, k, v, *stored, **options, d_lse=torch.zeros_like(d_lse))
    torch.testing.assert_close(without, of_zero, rtol=0, atol=0)


def test_the_torch_backend_takes_all_options_over_several_tiles():
    q, k, v = random_qkv(128 + 5, 2 * 128 + 3, 8, dtype=torch.float32)
    options = options_of("all", *q.shape[:3], k.shape[2])
    assert_matches_naive(partial(flash_attention, **options, return_lse=True, backend="torch"), q, k, v, options)


# ------------------------------------------------------------------------------------------------ unseen keys and rows


@each_version
@pytest.mark.parametrize("kind", ["causal", "window", "mask", "per head"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_in_keys_and_values_that_no_query_sees_does_no_harm(version, kind, poison):
    q, k, v = random_qkv(5, 40, 8)
    mask = torch.rand(2, 1, 5, 40, generator=torch.Generator().manual_seed(2)) < 0.7
    options = {
        "causal": {"causal": True},
        "window": {"causal": True, "window": 7},  # keys 29 … 39
        "mask": {"attn_mask": mask},
        "per head": {"attn_mask": mask & (torch.arange(6) < 4)[:, None, None]},  # heads 4 and 5: KV head 1 is seen by 3
    }[kind]
    unseen = torch.zeros(2, 2, 40, dtype=torch.bool)
    if kind == "causal":
        q, unseen = q[:, :, :0], ~unseen
    elif kind == "window":
        unseen[:, :, :29] = True
    else:
        mask[:, :, :, 11:17] = mask[:, :, :, 2] = False
        options["attn_mask"] = options["attn_mask"] & mask
        unseen[:, :, 11:17] = unseen[:, :, 2] = True
    loops = partial(VERSIONS[version], tile_rows=3, tile_cols=6, **options, return_lse=True)
    clean = with_gradients(loops, q, k, v, q, q[..., 0])
    k, v = (x.masked_fill(unseen[..., None], poison) for x in (k, v))
    poisoned = with_gradients(loops, q, k, v, q, q[..., 0])
    torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)


@pytest.mark.parametrize(
    "attend", [*(partial(f, tile_rows=4, tile_cols=5) for f in VERSIONS.values()), flash_attention]
)
def test_dropout_without_a_seed_draws_one(attend):
    loops = partial(attend, *random_qkv(9, 14, 8), dropout_p=0.5)
    torch.manual_seed(1)
    first, second = loops(), loops()
    assert not first.equal(second)
    torch.manual_seed(1)
    assert loops().equal(first)


# ------------------------------------------------------------------------------------------------ tiles


def test_tile_sizes_count_elements_and_not_bytes():
    sram = 192 * 1024  # an SM of an A100
    assert tile_sizes(sram, 64, 2) == (64, 384)
    assert tile_sizes(sram, 64, 4) == (64, 192)
    # what counting bytes gives: its K_j and V_j fill the SRAM in float32 twice
    assert tile_sizes(sram, 64, 1) == (64, 768)
    for itemsize in (2, 4):
        Br, Bc = tile_sizes(sram, 64, itemsize)
        assert itemsize * 2 * Bc * 64 == sram // 2
        assert itemsize * (2 * Bc * 64 + 2 * Br * 64) <= sram


@pytest.mark.parametrize(
    ("sram_bytes", "head_size", "itemsize", "expected"),
    [(1000, 64, 4, (1, 1)), (4, 64, 4, (1, 1)), (4 * 1025, 1, 4, (1, 257)), (100_000, 128, 2, (98, 98))],
)
def test_tile_sizes_round_up_and_rows_are_at_most_the_head_size(sram_bytes, head_size, itemsize, expected):
    assert tile_sizes(sram_bytes, head_size, itemsize) == expected


def seen_by_hand(T, S, window):
    i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
    return (j <= i) & (True if window is None else j > i - window)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize(("T", "S"), [(12, 12), (5, 12), (12, 5), (1, 9), (7, 7)])
def test_tiles_are_visited_iff_a_query_sees_a_key(T, S, window):
    q, k = torch.zeros(1, 1, T, 1), torch.zeros(1, 1, S, 1)
    seen = seen_by_hand(T, S, window)
    for Br, Bc in ((3, 2), (2, 3), (1, 1), (20, 20)):
        tiles = Tiles(q, k, Br, Bc, ScoreOptions(causal=True, window=window), Dropout())
        expected = {(i.start, j.start) for i in tiles.rows() for j in tiles.columns() if seen[i, j].any()}
        assert {(i.start, j.start) for i in tiles.rows() for j in tiles.columns(i)} == expected
        assert {(i.start, j.start) for j in tiles.columns() for i in tiles.rows(j)} == expected


# ------------------------------------------------------------------------------------------------ work, by hand


B, H, HKV, T, S, D, BR, BC = 2, 6, 2, 37, 50, 8, 10, 12  # four row tiles, five column tiles
TR, TC = 4, 5
OF_Q, OF_KV, OF_ROWS = B * H * T * D, B * HKV * S * D, B * H * T  # numbers


@pytest.fixture
def qkv():
    return random_qkv(T, S, D, (H, HKV), batch=B, dtype=torch.float32)


CUT = {"tile_rows": BR, "tile_cols": BC}


def bytes_of(work: Work) -> tuple[int, int]:
    return work.bytes_read, work.bytes_written


def test_version_1_reads_keys_once_and_moves_queries_and_outputs_for_every_column_tile(qkv):
    work = count_work(lambda: flash_attention_1(*qkv, **CUT))
    # Q, O, m and l read; O, m and l written, the first time as 0, −∞ and 0
    assert bytes_of(work) == (4 * (2 * OF_KV + TC * (2 * OF_Q + 2 * OF_ROWS)), 4 * (1 + TC) * (OF_Q + 2 * OF_ROWS))
    assert work.matmul_flops == 4 * B * H * T * S * D
    assert work.peak_bytes == 4 * (OF_Q + OF_ROWS)  # no scores


def test_version_2_reads_queries_once_and_keys_for_every_row_tile(qkv):
    work = count_work(lambda: flash_attention_2(*qkv, **CUT))
    assert bytes_of(work) == (4 * (OF_Q + TR * 2 * OF_KV), 4 * (OF_Q + OF_ROWS))
    assert work.matmul_flops == 4 * B * H * T * S * D
    assert work.peak_bytes == 4 * (OF_Q + OF_ROWS)


def test_version_1_backward_moves_queries_for_every_column_tile(qkv):
    stored = flash_attention_1_forward(*qkv, **CUT)
    work = count_work(lambda: flash_attention_1_backward(stored[0], *qkv, *stored, **CUT))
    # Q, O, dO, dQ, m and l read; dQ written, the first time as 0; dK and dV written once
    read, written = 2 * OF_KV + TC * (4 * OF_Q + 2 * OF_ROWS), (1 + TC) * OF_Q + 2 * OF_KV
    assert bytes_of(work) == (4 * read, 4 * written)
    assert work.matmul_flops == 10 * B * H * T * S * D  # five products
    assert work.peak_bytes == 4 * (OF_Q + 2 * OF_KV)


def test_version_2_backward_reads_the_output_once_and_one_number_less_per_row(qkv):
    out, lse = flash_attention_2_forward(*qkv, **CUT)
    work = count_work(lambda: flash_attention_2_backward(out, *qkv, out, lse, **CUT))
    # first D from dO and O; then Q, dO, dQ, L and D for every column tile
    read, written = 2 * OF_Q + 2 * OF_KV + TC * (3 * OF_Q + 2 * OF_ROWS), (1 + TC) * OF_Q + 2 * OF_KV + OF_ROWS
    assert bytes_of(work) == (4 * read, 4 * written)
    assert work.matmul_flops == 10 * B * H * T * S * D
    assert work.peak_bytes == 4 * (OF_Q + 2 * OF_KV + OF_ROWS)


def test_version_2_does_less_besides_the_products(qkv):
    first, second = (count_work(lambda f=f: f(*qkv, **CUT)).other_flops for f in VERSIONS.values())
    of_scores = 5 * B * H * T * S  # each is scaled, compared, shifted, raised and summed
    # version 1 for every tile: O_i · (l_i shrink) + PV · shrink_ij, divided by l_new; version 2 divides at the end
    assert first == of_scores + TC * (4 * OF_Q + 17 * OF_ROWS) + 2 * OF_ROWS  # lse = m + log l
    assert second == of_scores + TC * (2 * OF_Q + 9 * OF_ROWS) + OF_Q + 4 * OF_ROWS


def test_causal_tiles_above_the_diagonal_move_nothing():
    q, k, v = random_qkv(48, 48, D, (H, HKV), dtype=torch.float32)
    work = count_work(lambda: flash_attention_2(q, k, v, tile_rows=12, tile_cols=8, causal=True))
    visited = 2 + 3 + 5 + 6  # column tiles of 8 up to row 11, 23, 35, 47
    assert work.bytes_read == 4 * (q.numel() + visited * 8 * 2 * 2 * HKV * D)
    assert work.matmul_flops == 4 * B * H * visited * 12 * 8 * D


def test_a_mask_is_read_a_tile_at_a_time(qkv):
    mask = torch.ones(T, S, dtype=torch.bool)
    plain, masked = (count_work(lambda m=m: flash_attention_2(*qkv, **CUT, attn_mask=m)) for m in (None, mask))
    assert masked.bytes_read - plain.bytes_read == T * S  # once for all heads
    assert masked.bytes_written == plain.bytes_written


def test_16_bits_are_two_bytes_and_version_1_keeps_its_output_in_float32_until_the_end(qkv):
    halves = [x.half() for x in qkv]
    first, second = (count_work(lambda f=f: f(*halves, **CUT)) for f in VERSIONS.values())
    assert bytes_of(second) == (2 * (OF_Q + TR * 2 * OF_KV), 2 * OF_Q + 4 * OF_ROWS)
    assert first.bytes_written == 4 * (1 + TC) * (OF_Q + 2 * OF_ROWS) + 2 * OF_Q


# ------------------------------------------------------------------------------------------------ bad input


BAD = [
    ({"tile_rows": 0}, ValueError, "tile_rows must be at least 1"),
    ({"tile_cols": 2.0}, TypeError, "tile_cols must be an int"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be"),
    ({"attn_mask": torch.ones(3, 3)}, TypeError, "attn_mask must be a bool"),
    ({"casual": True}, TypeError, "unexpected keyword argument 'casual': the options are scale, causal"),
]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("function", [*VERSIONS.values(), *FORWARDS.values()], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("wrong", "error", "message"), BAD, ids=[next(iter(bad[0])) for bad in BAD])
def test_bad_options_are_refused(function, wrong, error, message):
    q, k, v = random_qkv(5, 7, 8)
    with pytest.raises(error, match=message):
        function(q, k, v, **{"tile_rows": 2, "tile_cols": 2} | wrong)


@pytest.mark.usefixtures("shapes_unchecked")
@each_version
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda q: {"d_out": q[:, :, 1:]}, ValueError, r"d_out must be .* got \[2, 6, 4, 8\]"),
        (lambda q: {"out": q.float()}, TypeError, "out must be float64 or float64, got float32"),
        (lambda q: {"m": q[:, :, 1:, 0], "lse": q[:, :, 1:, 0]}, ValueError, "(m|lse) must"),
        (lambda q: {"d_lse": torch.ones(2, 6, 5)}, TypeError, "d_lse must be float64"),
        (lambda q: {"dropout_p": 0.5}, ValueError, "dropout_seed must be the seed of the forward"),
    ],
)
def test_what_the_backward_is_given_is_checked(version, wrong, error, message):
    q, k, v = random_qkv(5, 7, 8)
    cut = {"tile_rows": 2, "tile_cols": 2}
    stored = zip({"1": ("out", "m", "l"), "2": ("out", "lse")}[version], FORWARDS[version](q, k, v, **cut), strict=True)
    given = {"d_out": q, "q": q, "k": k, "v": v, **dict(stored), **cut}
    wrong = {name: value for name, value in wrong(q).items() if name in given or name not in ("m", "lse")}
    with pytest.raises(error, match=message):
        BACKWARDS[version](**given | wrong)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("wrong", [0, -1, 1.5])
@pytest.mark.parametrize("argument", ["sram_bytes", "head_size", "itemsize"])
def test_tile_sizes_refuses_what_is_no_count(argument, wrong):
    with pytest.raises((ValueError, TypeError), match=argument):
        tile_sizes(**{"sram_bytes": 1024, "head_size": 8, "itemsize": 4} | {argument: wrong})


TILED = {"tile_rows": 2, "tile_cols": 3}
CHANGED = {  # a tensor of the options, and how it is changed between forward and backward
    "mask": ({"attn_mask": torch.arange(35).view(5, 7) % 3 > 0}, "attn_mask", lambda x: x.fill_(True)),
    "slopes": ({"alibi_slopes": torch.tensor([0.5, 0.25])}, "alibi_slopes", lambda x: x.mul_(3)),
    "seed": ({"dropout_p": 0.5, "dropout_seed": torch.tensor(3)}, "dropout_seed", lambda x: x.add_(1)),
}


@pytest.mark.parametrize("attend", [partial(flash_attention_1, **TILED), partial(flash_attention_2, **TILED),
                                    partial(flash_attention, backend="torch"),
                                    partial(flash_attention, backend="triton")],
                         ids=["version 1", "version 2", "torch", "triton"])  # fmt: skip
@pytest.mark.parametrize("case", CHANGED)
def test_a_tensor_that_was_changed_after_the_forward_is_refused(attend, case, kernel_device):
    options, name, change = CHANGED[case]
    options = {key: x.to(kernel_device, copy=True) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    qkv = random_qkv(5, 7, 8, (2, 1), dtype=torch.float32, device=kernel_device)
    qkv = [x.requires_grad_() for x in qkv]
    out = attend(*qkv, **options)
    change(options[name])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
