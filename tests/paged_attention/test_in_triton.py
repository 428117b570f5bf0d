"""The Triton decode kernels: every pair of constants and options, and their splits.

The promises of paged attention on every backend are tested in test_paged_attention.py. With PAGEWISE_FULL=1 the matrix
is the whole product of head sizes, block sizes, dtypes, caches and groups.
"""

import pytest
import torch
from covering import all_cases, covering, is_full, label
from decode_compile import DTYPES, E4M3, E5M2
from paged_cases import assert_matches_dense, dense, paged_inputs

from conftest import assert_results
from pagewise.kernels.paged_attention import paged_decode_kernel
from pagewise.paged_attention import in_triton, paged_attention
from pagewise.tools.launch import launch


def decode_attention(*inputs, **options):
    return paged_attention(*inputs, **options, return_lse=True, backend="triton")


AXES = {
    "head_size": [32, 64, 80, 96, 112, 120, 128, 192, 256],
    "block_size": [1, 2, 8, 16, 32, 256],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "cache": [None, E4M3, E5M2],
    "heads": [(4, 4), (8, 2), (8, 1), (6, 2)],
    "alibi": [False, True],
    "window": [None, 1, 50],
    "softcap": [0.0, 3.0],
    "num_splits": [1, 3, 8],
}


def matrix():
    if not is_full():
        return covering(AXES | {"block_size": [1, 8, 16, 32, 256]})
    full = AXES | {"block_size": [8, 16, 32], "window": [None], "softcap": [0.0], "num_splits": [3]}
    return all_cases(full)


@pytest.mark.parametrize("case", matrix(), ids=label)
def test_every_pair_of_variants(case, kernel_device):
    heads, kv_heads = case["heads"]
    lengths = [0, 1, 67, 130] if case["block_size"] < 256 else [0, 300]
    inputs = paged_inputs(
        lengths, heads, kv_heads, case["head_size"], block_size=case["block_size"], dtype=case["dtype"],
        device=kernel_device, cache_dtype=case["cache"],
    )  # fmt: skip
    options = {"window": case["window"], "softcap": case["softcap"]}
    if case["alibi"]:
        options["alibi_slopes"] = 2.0 ** -torch.arange(heads, device=kernel_device)
    if case["cache"] is not None:
        options |= {"k_scale": 0.5, "v_scale": 1.5}
    assert_matches_dense(lambda *a, **o: decode_attention(*a, **o, num_splits=case["num_splits"]), inputs, **options)


# ------------------------------------------------------------------------------------------ float8, bit by bit


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of a signalling NaN
@pytest.mark.parametrize("converter", ["of the device", "by bits"])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("heads", "dtype"), [(1, torch.float32), (2, torch.float32), (2, torch.float16), (2, torch.bfloat16)]
)
def test_all_float8_codes_are_read_exactly(heads, cache_dtype, dtype, converter, kernel_device, monkeypatch):
    """With one token the output is its value and lse · k_scale its key, whichever way the bytes are converted."""
    if converter == "by bits":
        bits = {E4M3: 4, E5M2: 5}[cache_dtype]
        monkeypatch.setattr(in_triton, "as_kernels_read", lambda k, v: (k.view(torch.uint8), v.view(torch.uint8), bits))
    codes = torch.arange(256, dtype=torch.uint8, device=kernel_device).view(cache_dtype)
    table, lens = (torch.full(size, n, dtype=torch.int32, device=kernel_device) for size, n in (((1, 1), 0), ((1,), 1)))
    q = torch.zeros(1, heads, 256, dtype=dtype, device=kernel_device)
    zeros = torch.zeros(1, 1, 1, 256, device=kernel_device).to(cache_dtype)
    out, _ = decode_attention(q, zeros, codes.view(1, 1, 1, 256), table, lens)
    for head in range(heads):
        assert same_numbers(out[0, head], codes.to(dtype))

    some = codes[codes.float().isfinite()][::19]
    keys = some.view(-1, 1, 1, 1).expand(-1, 1, 1, 16).contiguous()  # a block of one token per code
    tables = torch.arange(len(some), dtype=torch.int32, device=kernel_device)[:, None]
    q = torch.eye(1, 16, device=kernel_device).to(dtype).expand(len(some), heads, 16)
    _, lse = decode_attention(q, keys, torch.zeros_like(keys), tables, lens.expand(len(some)), scale=1.0)
    expected = some.float()[:, None].expand(-1, heads)  # the codes differ by 6 % or more, units of log 2 round lse
    torch.testing.assert_close(lse, expected, rtol=2**-22, atol=0.0)


def same_numbers(a, b):
    return a.isnan().equal(b.isnan()) and a.nan_to_num().equal(b.nan_to_num())


# ------------------------------------------------------------------------------------------ the first rung


def first_rung(q, k_cache, v_cache, block_tables, seq_lens):
    """`paged_decode_kernel`, launched as lesson 5 does."""
    (B, H, D), (_, P, Hkv, _) = q.shape, k_cache.shape
    out = torch.full_like(q, torch.nan)
    arguments = (q, k_cache, v_cache, block_tables, seq_lens, out, D**-0.5)
    sizes = {"P": P, "D": D, "GROUP": H // Hkv, "ROWS": 16, "TILE": 32}
    launch(paged_decode_kernel, (B, Hkv), *arguments, **sizes, outputs=(out,))
    return out, paged_attention(q, k_cache, v_cache, block_tables, seq_lens, return_lse=True, backend="torch")[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "block_size", "head_size"), [((4, 4), 16, 64), ((6, 2), 8, 32), ((8, 1), 32, 128)])
def test_the_first_rung_matches_dense_attention(heads, block_size, head_size, dtype, kernel_device):
    inputs = paged_inputs(
        [0, 1, 31, 32, 33, 130], *heads, head_size, block_size=block_size, dtype=dtype, device=kernel_device
    )
    assert_matches_dense(first_rung, inputs)


# ------------------------------------------------------------------------------------------ unchecked lengths


def test_lengths_are_checked_where_that_is_free_or_wanted(kernel_device, shapes_unchecked):
    inputs = paged_inputs([5], 4, 2, 32, dtype=torch.float16, device=kernel_device)
    inputs[4][0] = 1000
    with pytest.raises(ValueError, match=r"seq_lens must be from 0 to .* got 1000"):
        paged_attention(*inputs, backend="triton", check=True)
    with pytest.raises(ValueError, match=r"seq_lens must be from 0 to .* got 1000"):
        paged_attention(*inputs, backend="torch", check=False)
    if kernel_device.type == "cpu":
        with pytest.raises(ValueError, match=r"seq_lens must be from 0 to .* got 1000"):
            paged_attention(*inputs, backend="triton")
    else:
        assert paged_attention(*inputs, backend="triton").isnan().all()


def test_a_full_table_is_no_impossible_length(kernel_device):
    q, k_cache, v_cache, tables, lens = paged_inputs([48, 48], 4, 2, 32, dtype=torch.float16, device=kernel_device)
    assert_matches_dense(decode_attention, (q, k_cache, v_cache, tables[:, :3], lens))


# ------------------------------------------------------------------------------------------ the group of heads


@pytest.mark.parametrize(("group", "head_size"), [(1, 32), (3, 32), (16, 32), (17, 32), (40, 32), (71, 32), (40, 256)])
def test_any_number_of_heads_may_share_a_kv_head(group, head_size, kernel_device):
    """A program takes at most 64 of them, or 16 if the heads are large."""
    inputs = paged_inputs([1, 70], 2 * group, 2, head_size, dtype=torch.float16, device=kernel_device)
    assert_matches_dense(lambda *a: decode_attention(*a, num_splits=2), inputs)


@pytest.mark.parametrize("head_size", [1, 7, 20])
def test_odd_head_sizes(head_size, kernel_device):
    for heads in (2, 4):
        inputs = paged_inputs([1, 70], heads, 2, head_size, dtype=torch.float32, device=kernel_device)
        assert_matches_dense(decode_attention, inputs)


@pytest.mark.parametrize("softcap", [0.5, 50.0, 1e4])
def test_softcap_is_accurate_far_from_and_near_zero(softcap, kernel_device):
    q, k_cache, *rest = paged_inputs([65], 4, 2, 64, dtype=torch.float32, device=kernel_device)
    inputs = (q * 1e-3, k_cache, *rest)
    assert_matches_dense(decode_attention, inputs, softcap=softcap, scale=1.0)
    assert_matches_dense(decode_attention, inputs, softcap=softcap, scale=1e3)


def turned(x):
    return x.mT.contiguous().mT


REFUSED = [  # sizes, changes of inputs by their index, message
    ({"dtype": torch.float64}, {}, "float64"),
    ({"block_size": 512}, {}, "block size .* got 512"),
    ({"block_size": 12}, {}, "block size .* got 12"),
    ({"head_size": 320}, {}, "head sizes up to 256, got 320"),
    ({}, {0: turned}, "q contiguous in its last dimension, got stride 4"),
    ({}, {1: turned}, "k_cache contiguous in its last dimension"),
    ({}, {2: turned}, "v_cache contiguous in its last dimension"),
]


@pytest.mark.parametrize(("sizes", "changes", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refusals_name_the_tensor_and_torch(sizes, changes, message, kernel_device, shapes_unchecked):
    sizes = {"head_size": 32, "dtype": torch.float16} | sizes
    inputs = list(paged_inputs([5], 4, 2, **sizes, device=kernel_device))
    for index, change in changes.items():
        inputs[index] = change(inputs[index])
    with pytest.raises(ValueError, match=message + '.*backend="torch"'):
        decode_attention(*inputs)


@pytest.mark.parametrize("num_splits", [3, 19, 100])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bits_do_not_depend_on_the_batch(backend, num_splits, kernel_device):
    """A longer sequence in the batch makes the tables wider, and the merge reads the splits in groups of 16."""
    q, k_cache, v_cache, tables, lens = paged_inputs([640, 2000], 4, 2, 32, dtype=torch.float16, device=kernel_device)
    options = {"num_splits": num_splits, "return_lse": True, "backend": backend}
    together = paged_attention(q, k_cache, v_cache, tables, lens, **options)
    assert_results(together, *(dense(q, k_cache, v_cache, tables, lens, dtype=t) for t in (torch.float64, q.dtype)))
    alone = paged_attention(q[:1], k_cache, v_cache, tables[:1, :40], lens[:1], **options)
    assert all(whole[:1].equal(part) for whole, part in zip(together, alone, strict=True))
