"""Paged decode in torch and Triton against dense attention: awkward lengths, scattered and shared blocks, poison."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
from paged_cases import assert_matches_dense, changed, in_other_blocks, paged_inputs

from conftest import DEVICES
from pagewise.naive_attention import attention
from pagewise.paged_attention import paged_attention
from pagewise.paged_attention.in_torch import streamed_attention
from pagewise.paged_attention.inputs import DECODING, PagedInputs
from pagewise.paged_blocks.cache import PagedKVCache

LENGTHS = [0, 1, 15, 16, 17, 129, 2000]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def split_attention(*args, **options):
    return paged_attention(*args, **options, num_splits=3, return_lse=True, backend="torch")


def triton_attention(*args, num_splits=1, **options):
    """Where Triton kernels run in this process, whatever device the test is about; the result comes back."""
    device = args[0].device
    options = {name: t.to(DEVICES[-1]) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    args = [t.to(DEVICES[-1]) for t in args]
    out, lse = paged_attention(*args, **options, num_splits=num_splits, return_lse=True, backend="triton", check=True)
    return out.to(device), lse.to(device)


def split_triton_attention(*args, **options):
    return triton_attention(*args, **options, num_splits=3)


def gathered(*args, **options):
    return paged_attention(*args, **options, return_lse=True, backend="torch")


def streamed(*args, scale=None, k_scale=1.0, v_scale=1.0, **options):
    scale = DECODING._replace(scale=scale).scale_for(args[0].shape[-1]) * float(k_scale)
    return streamed_attention(PagedInputs(*args, float(v_scale)), DECODING._replace(scale=scale, **options))


PATHS = {
    "gathered": gathered,
    "streamed": streamed,
    "split": split_attention,
    "triton": triton_attention,
    "split triton": split_triton_attention,
}

IN_TORCH = [gathered, streamed, split_attention]


@pytest.fixture(params=PATHS)
def path(request):
    """Each returns (out, lse)."""
    return PATHS[request.param]


@pytest.fixture
def lengths(path):
    """Awkward ones of one batch; less far in Triton, which is often interpreted."""
    return LENGTHS if "triton" not in path.__name__ else [260 if n == 2000 else n for n in LENGTHS]


# ------------------------------------------------------------------------------------------ against dense attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 1)])
def test_matches_dense_attention(heads, kv_heads, dtype, path, lengths, device):
    assert_matches_dense(path, paged_inputs(lengths, heads, kv_heads, 32, dtype=dtype, device=device))


OPTIONS = {
    "scale": {"scale": 0.3},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.03, -0.01]},
    "window 1": {"window": 1},
    "window 16": {"window": 16},
    "window 100": {"window": 100},
    "softcap": {"softcap": 2.0, "scale": 1.0},
    "all": {"scale": 0.3, "alibi_slopes": [0.5, 0.25, 0.03, -0.01], "window": 33, "softcap": 5.0},
}


@pytest.mark.parametrize(
    ("option", "dtype"), [*((option, torch.float32) for option in OPTIONS), ("all", torch.bfloat16)]
)
def test_options_match_dense_attention(option, dtype, path, lengths, device):
    options = dict(OPTIONS[option])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device=device)
    assert_matches_dense(path, paged_inputs(lengths, 4, 2, 32, dtype=dtype, device=device), **options)


@pytest.mark.parametrize("block_size", [1, 8, 32])
@pytest.mark.parametrize("head_size", [32, 80, 112, 256])
def test_block_and_head_sizes(block_size, head_size, path, device):
    inputs = paged_inputs([0, 7, 33, 64], 2, 1, head_size, block_size=block_size, dtype=torch.float16, device=device)
    assert_matches_dense(path, inputs)


@pytest.mark.parametrize("path", IN_TORCH)
def test_float64_is_exact_enough_to_be_an_oracle(path, device):
    inputs = paged_inputs([0, 1, 17, 129], 4, 2, 32, dtype=torch.float64, device=device)
    assert_matches_dense(path, inputs, window=20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_float8_cache_is_read_times_its_scales(cache_dtype, dtype, path, device):
    inputs = paged_inputs([0, 1, 17, 129], 4, 2, 32, dtype=dtype, device=device, cache_dtype=cache_dtype)
    assert_matches_dense(path, inputs, k_scale=0.5, v_scale=0.25, softcap=3.0)


def test_scales_apply_to_any_cache(path, device):
    inputs = paged_inputs([5, 17], 4, 2, 32, dtype=torch.float32, device=device)
    assert_matches_dense(path, inputs, k_scale=2.0, v_scale=-3.0, scale=0.1)


def test_no_columns_and_no_blocks(path, device):
    q = torch.randn(2, 4, 8, device=device)
    cache = torch.zeros(0, 16, 2, 8, device=device)
    tables = torch.zeros(2, 0, dtype=torch.int32, device=device)
    out, lse = path(q, cache, cache, tables, torch.zeros(2, dtype=torch.int32, device=device))
    assert not out.any()
    assert (lse == -torch.inf).all()


# ------------------------------------------------------------------------------------------ tables


def test_shared_and_repeated_blocks(path, device):
    q, k_cache, v_cache, tables, lens = paged_inputs([48, 48, 33], 4, 2, 32, dtype=torch.float32, device=device)
    tables[1, :2] = tables[0, :2]  # a common prefix
    tables[2, 0] = tables[2, 1]  # a block twice in one table
    assert_matches_dense(path, (q, k_cache, v_cache, tables, lens))


def test_logical_order_counts_not_physical(path, device):
    """The same tokens in other blocks give the same bits: nothing depends on where they lie."""
    inputs = paged_inputs([129, 17], 4, 2, 32, dtype=torch.float32, device=device)
    assert all(map(torch.equal, path(*inputs), path(*in_other_blocks(*inputs))))


def test_blocks_before_the_window_are_not_touched(path, device):
    q, k_cache, v_cache, tables, lens = paged_inputs([64, 40], 4, 2, 32, dtype=torch.float32, device=device)
    out, lse = path(q, k_cache, v_cache, tables, lens, window=9)
    first = tables[:, 0].long()
    k_cache[first], v_cache[first] = torch.nan, torch.nan
    tables[:, 0] = -1
    tables[0, :3] = 10**9
    again, lse_again = path(q, k_cache, v_cache, tables, lens, window=9)
    assert again.equal(out)
    assert lse_again.equal(lse)


def test_reads_what_the_cache_wrote(device):
    """The whole way: slots → write → block table → attention."""
    cache = PagedKVCache(2, 8, 4, 2, 32, device=device)
    table, n = [6, 1, 3], 10
    slots = torch.tensor([table[i // 4] * 4 + i % 4 for i in range(n)], device=device)
    k, v = torch.randn(2, n, 2, 32, device=device)
    cache.write(1, slots, k, v)
    q = torch.randn(1, 4, 32, device=device)
    out = paged_attention(
        q, cache.k[1], cache.v[1], torch.tensor([table], dtype=torch.int32, device=device),
        torch.tensor([n], dtype=torch.int32, device=device),
    )  # fmt: skip
    whole = attention(q[:, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], causal=True)[:, :, 0]
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)


def test_offsets_are_64_bit(path):
    """A cache of more than 2³¹ elements, of which only the last block is ever touched (2 GiB of address space)."""
    P, D = 128, 256
    N = 2**31 // (P * D) + 2
    cache = torch.empty(N, P, 1, D, dtype=torch.float8_e5m2)
    cache[-1] = torch.randn(P, 1, D, generator=torch.Generator().manual_seed(0)).to(cache.dtype)
    q = torch.randn(1, 2, D, generator=torch.Generator().manual_seed(1))
    lens = torch.tensor([P], dtype=torch.int32)
    far = path(q, cache, cache, torch.tensor([[N - 1]], dtype=torch.int32), lens)
    near = path(q, cache[-1:].clone(), cache[-1:].clone(), torch.tensor([[0]], dtype=torch.int32), lens)
    assert far[0].equal(near[0])
    assert far[1].equal(near[1])
    assert far[0].any()


# ------------------------------------------------------------------------------------------ interface


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 3}], ids=str)
@pytest.mark.parametrize("path", IN_TORCH)
def test_unseen_slots_do_not_reach_gradients(path, options):
    """They hold NaN, and 0 · NaN is NaN."""
    q, k_cache, v_cache, *rest = paged_inputs([5, 17, 0], 4, 2, 32, dtype=torch.float64, device="cpu")
    gradients = []
    for poison in (torch.nan, 0.0):
        tensors = [q, *(x.nan_to_num(nan=poison) for x in (k_cache, v_cache))]
        tensors = [x.detach().requires_grad_() for x in tensors]
        out, lse = path(*tensors, *rest, **options)
        gradients.append(torch.autograd.grad(out.sum() + lse[:2].square().sum(), tensors))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_strided_inputs_are_taken(path, device):
    q, k_cache, v_cache, tables, lens = paged_inputs([5, 17], 4, 2, 32, dtype=torch.float32, device=device)
    out, _ = path(q, k_cache, v_cache, tables, lens)
    kv = torch.stack([k_cache, v_cache], dim=1)  # [N, 2, P, Hkv, D], as some engines keep it
    wide = tables.repeat_interleave(2, dim=1)[:, ::2]
    rows = torch.stack([q, q], dim=1)[:, 1]
    assert path(rows, kv[:, 0], kv[:, 1], wide, lens)[0].equal(out)
    assert path(q, k_cache, v_cache, tables, lens.repeat_interleave(2)[::2])[0].equal(out)
    assert path(q, k_cache, kv[:, 1], tables, lens)[0].equal(out)  # k and v need not have the same strides
    v_heads_first = v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert path(q, k_cache, v_heads_first, tables, lens)[0].equal(out)
    assert path(q, v_heads_first, v_cache, tables, lens)[0].equal(path(q, v_cache, v_cache, tables, lens)[0])
    if path in IN_TORCH:
        assert path(q.mT.contiguous().mT, kv[:, 0], kv[:, 1], wide, lens)[0].equal(out)


def test_backends_that_cannot_name_one_that_can(device, shapes_unchecked):
    inputs = paged_inputs([5], 4, 2, 32, dtype=torch.float32, device=device, block_size=3)
    with pytest.raises(ValueError, match=r'"triton" needs a block size.* power of two.*got 3; backend="torch"'):
        paged_attention(*inputs, backend="triton")
    assert_matches_dense(lambda *a: paged_attention(*a, return_lse=True), inputs)  # "auto" takes what can
    with pytest.raises(ValueError, match="backend must be"):
        paged_attention(*inputs, backend="cuda")


def put(index, value):
    def change(t):
        t[index] = value
        return t

    return change


BAD = {  # changes of arguments, as `changed` takes them
    "q rank": ({"q": lambda t: t[None]}, ValueError, "q must have 3 dim"),
    "q not a tensor": ({"q": lambda t: t.tolist()}, TypeError, "q must be a torch.Tensor"),
    "q dtype": ({"q": torch.Tensor.int}, TypeError, "q must be float32"),
    "q device": ({"q": lambda t: t.to("meta")}, ValueError, "device"),
    "k_cache dtype": ({"k_cache": torch.Tensor.half}, TypeError, "k_cache must be float32"),
    "v_cache float8 alone": ({"v_cache": lambda t: t.to(FLOAT8[0])}, TypeError, "v_cache must have the dtype"),
    "head size": ({"q": lambda t: t[..., :16]}, ValueError, "k_cache must be"),
    "v_cache shape": ({"v_cache": lambda t: t[:, :8]}, ValueError, "v_cache must be"),
    "heads": ({"q": lambda t: t[:, :3]}, ValueError, "multiple of Hkv"),
    "tables dtype": ({"block_tables": torch.Tensor.long}, TypeError, "block_tables must be int32"),
    "tables rows": ({"block_tables": lambda t: t[:1]}, ValueError, "block_tables must be"),
    "lens dtype": ({"seq_lens": torch.Tensor.long}, TypeError, "seq_lens must be int32"),
    "lens shape": ({"seq_lens": lambda t: t[:1]}, ValueError, "seq_lens must be"),
    "lens negative": ({"seq_lens": put(0, -1)}, ValueError, r"seq_lens must be from 0 .* got -1"),
    "lens beyond tables": ({"seq_lens": put(1, 65)}, ValueError, r"4 · 16 = 64.* got 65"),
    "block too large": ({"block_tables": put((1, 1), 6)}, ValueError, r"from 0 to 5 .* got 6 at \[1, 1\]"),
    "block of an early key": ({"block_tables": put((1, 0), 6)}, ValueError, r"got 6 at \[1, 0\]; sequence 1 has 17"),
    "block negative": ({"block_tables": put((0, 0), -1)}, ValueError, r"got -1 at \[0, 0\]; sequence 0 has 5"),
    "window": ({"window": 0}, ValueError, "window"),
    "scale": ({"scale": float("nan")}, ValueError, "scale"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap"),
    "alibi shape": ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must be"),
    "alibi dtype": ({"alibi_slopes": torch.ones(4).half()}, TypeError, "alibi_slopes must be float32"),
    "k_scale": ({"k_scale": float("inf")}, ValueError, "k_scale"),
    "v_scale": ({"v_scale": "1"}, TypeError, "v_scale"),
    "num_splits": ({"num_splits": 0}, ValueError, "num_splits"),
    "k_scale beyond float32": ({"k_scale": 1e39}, ValueError, "k_scale must be a finite number in"),
    "v_scale beyond float": ({"v_scale": 10**400}, ValueError, "v_scale must be a finite number in"),
    "softcap beyond float32": ({"softcap": 1e39}, ValueError, "softcap must be a finite number in"),
}


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case, backend, shapes_unchecked):
    changes, error, message = BAD[case]
    inputs = paged_inputs([5, 17], 4, 2, 32, dtype=torch.float32, device=DEVICES[-1])
    with pytest.raises(error, match=message):
        paged_attention(**changed(inputs, changes), check=True, backend=backend)


def test_numbers_of_any_kind_are_taken(path, device, shapes_unchecked):
    inputs = paged_inputs([5, 17], 4, 2, 32, dtype=torch.float32, device=device)
    out, _ = path(*inputs, scale=0.5, softcap=5.0, v_scale=0.5, k_scale=2.0)
    half = Fraction(1, 2)
    assert path(*inputs, scale=half, softcap=5, v_scale=half, k_scale=2)[0].equal(out)


@pytest.mark.parametrize("num_splits", [10**7, 2**62])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_more_splits_than_keys_are_as_many_as_keys(num_splits, backend, kernel_device):
    inputs = paged_inputs([5, 17], 4, 2, 32, dtype=torch.float32, device=kernel_device)
    out = paged_attention(*inputs, num_splits=num_splits, backend=backend)
    torch.testing.assert_close(out, paged_attention(*inputs, backend="torch"), rtol=1e-5, atol=1e-6)


def test_token_strides_may_be_large(kernel_device):
    """A cache with its tokens outermost: offsets within a block beyond 2³¹ elements (untouched, so without memory)."""
    P, D, stride = 256, 16, 2**24
    memory = torch.empty(stride * P, dtype=torch.float8_e5m2, device=kernel_device)
    cache = memory.as_strided((2, P, 1, D), (D, stride, D, 1))
    draw = torch.Generator().manual_seed(0)
    near = torch.randn(2, P, 1, D, generator=draw).to(cache)
    cache[:, -2:] = near[:, -2:]
    q = torch.randn(1, 1, D, generator=draw).to(kernel_device)
    tables = torch.tensor([[1]], dtype=torch.int32, device=kernel_device)
    lens = torch.tensor([P], dtype=torch.int32, device=kernel_device)
    options = {"window": 2, "backend": "triton"}
    out = paged_attention(q, cache, cache, tables, lens, **options)
    assert out.equal(paged_attention(q, near, near, tables, lens, **options))


def test_threads_may_decode_at_once(kernel_device):
    inputs = paged_inputs([5, 17], 4, 2, 32, dtype=torch.float32, device=kernel_device)
    expected = paged_attention(*inputs, backend="triton")
    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda _: paged_attention(*inputs, backend="triton"), range(8)))
    assert all(out.equal(expected) for out in outs)


def test_auto_takes_the_differentiable_backend_where_a_gradient_is_needed(device):
    q, k_cache, v_cache, *rest = paged_inputs([5, 17], 4, 2, 32, dtype=torch.float32, device=device)
    q.requires_grad_()
    paged_attention(q, k_cache.nan_to_num(), v_cache.nan_to_num(), *rest).sum().backward()
    assert q.grad.isfinite().all()
