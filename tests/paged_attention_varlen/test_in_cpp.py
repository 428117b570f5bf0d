"""The C++ kernel for an engine's decode steps on a CPU: the same results as torch's plan, read in place."""

import pytest
import torch

from pagewise import paged_attention_varlen as varlen
from pagewise.paged_attention.inputs import DECODING
from pagewise.paged_attention_varlen import in_cpp

pytestmark = pytest.mark.skipif(not in_cpp.library(), reason="no g++, or a machine for which it was not measured")
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}


def step(*, lens, heads=(4, 2), head_dim=64, P=16, dtype=torch.float32, num_queries=None, seed=0):
    """q, k_cache, v_cache, and the arguments of a plan. What no sequence may read is NaN."""
    torch.manual_seed(seed)
    (H, Hkv), M = heads, max(1, *(-(-n // P) for n in lens)) + 1
    B, num_queries = len(lens), num_queries or [1] * len(lens)
    tables = torch.randperm(B * M + 3)[: B * M].view(B, M).int()
    k, v = (torch.full((B * M + 3, P, Hkv, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    for table, length in zip(tables, lens, strict=True):
        for t in range(length):
            k[table[t // P], t % P], v[table[t // P], t % P] = torch.randn(2, Hkv, head_dim)
        table[-(-length // P) :] = 2**30  # no such block: reading it ends the process
    q = torch.randn(sum(num_queries), H, head_dim).to(dtype)
    ends = torch.tensor([0, *num_queries]).cumsum(0).int()
    return (q, k, v), (tables, torch.tensor(lens, dtype=torch.int32), ends)


def attend(tensors, numbers, *, plain=True, **options):
    """The plan's result: by the C++ kernel if `plain`, else by torch alone."""
    decodes, options = len(tensors[0]) == len(numbers[1]), DECODING._replace(**options)
    plan = varlen.plan(varlen.Step(*numbers, tensors[1].shape[1], decodes, options, plain=plain), "torch")
    assert (plan._in_cpp is not None) == (plain and 1 in numbers[2].diff()[numbers[1] > 0])
    if plain:
        plan._group = lambda *_: pytest.fail("torch computed it")
    return plan.attend(*tensors)


def with_and_without_the_kernel(tensors, numbers, *, decodes=True, options=DECODING, return_lse=False):
    """The results of a plan that may take the C++ kernel, and of one that may not."""
    step = varlen.Step(*numbers, 16, decodes, options)
    plans = [varlen.plan(step._replace(plain=plain), "torch") for plain in (True, False)]
    return [plan.attend(*tensors, return_lse=return_lse) for plan in plans]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "head_dim", "P"),
    [
        ((1, 1), 16, 16),
        ((2, 2), 48, 1),
        ((6, 2), 64, 16),
        ((8, 2), 128, 8),
        ((5, 1), 80, 5),
        ((8, 1), 64, 32),
        ((14, 2), 32, 7),
    ],
)
def test_every_shape_gives_what_torch_gives(heads, head_dim, P, dtype):
    tensors, numbers = step(lens=[1, 15, 16, 0, 17, 100, 33], heads=heads, head_dim=head_dim, P=P, dtype=dtype)
    out = attend(tensors, numbers)
    torch.testing.assert_close(out, attend(tensors, numbers, plain=False), **TOLERANCE[dtype])
    assert not out[3].any()


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 20}, {"window": 500}, {"scale": -0.3}, {"scale": 2.0}], ids=str
)
def test_windows_and_scales(options):
    tensors, numbers = step(lens=[1, 19, 20, 21, 90])
    torch.testing.assert_close(attend(tensors, numbers, **options), attend(tensors, numbers, plain=False, **options))


def test_a_window_reads_nothing_before_it():
    (q, k, v), numbers = step(lens=[50, 40])
    tables = numbers[0]
    expected = attend((q, k, v), numbers, window=8)
    k[tables[0, :2].long()] = torch.nan  # keys 0 … 31, of which the last query sees none
    assert attend((q, k, v), numbers, window=8).equal(expected)


def test_strided_tensors():
    (q, k, v), numbers = step(lens=[30, 5, 64])
    expected = attend((q, k, v), numbers)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]  # [N, Hkv, P, D] in memory
    wide = torch.zeros(4, 3, 64).copy_(q.transpose(0, 1)).transpose(0, 1)
    assert attend((wide, *by_head), numbers).equal(expected)


def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads():
    tensors, (tables, lens, _) = step(lens=[200, 3, 77, 16], heads=(6, 3))
    together = attend(tensors, (tables, lens, torch.arange(5).int()))
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            for b in range(4):
                alone = (tables[b : b + 1], lens[b : b + 1], torch.tensor([0, 1]).int())
                assert attend((tensors[0][b : b + 1], *tensors[1:]), alone).equal(together[b : b + 1])
    finally:
        torch.set_num_threads(threads)


def test_decoding_rows_beside_chunks_of_prompts():
    tensors, numbers = step(lens=[40, 33, 20, 64], num_queries=[1, 7, 1, 64])
    outs = with_and_without_the_kernel(tensors, numbers, decodes=False)
    torch.testing.assert_close(*outs)


def test_lse_is_torchs():
    tensors, numbers = step(lens=[40, 33, 20, 64], num_queries=[1, 7, 1, 64])
    results = with_and_without_the_kernel(tensors, numbers, decodes=False, return_lse=True)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_rows_that_are_not_finite_are_torchs(which, value):
    tensors, numbers = step(lens=[20, 30, 40])
    expected = attend(tensors, numbers)
    block = numbers[0][1, 0]
    tensors[which][block, 3, 0, 5] = value
    outs = with_and_without_the_kernel(tensors, numbers)
    torch.testing.assert_close(*outs, equal_nan=True)
    assert not torch.equal(outs[0][1], expected[1])
    torch.testing.assert_close(outs[0][[0, 2]], expected[[0, 2]])


def test_a_query_whose_scores_are_all_minus_infinity_is_torchs():
    (q, k, v), numbers = step(lens=[20, 1])
    q[1, :, 5], k[numbers[0][1, 0], 0, :, 5] = 1.0, -torch.inf
    outs = with_and_without_the_kernel((q, k, v), numbers)
    torch.testing.assert_close(*outs, equal_nan=True)


def test_bfloat16_is_rounded_to_nearest():
    (q, k, v), numbers = step(lens=[20, 90, 33], dtype=torch.bfloat16)
    out = attend((q, k, v), numbers)
    exact = attend((q.double(), k.double(), v.double()), numbers, plain=False)
    assert (out == exact.bfloat16()).double().mean() > 0.98


def test_large_scores_do_not_overflow():
    (q, k, v), numbers = step(lens=[40, 17])
    torch.testing.assert_close(attend((q * 1e3, k, v), numbers), attend((q * 1e3, k, v), numbers, plain=False))


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.float64, 64), (torch.float32, 24)])
def test_other_types_and_head_sizes_are_torchs(dtype, head_dim):
    tensors, numbers = step(lens=[20, 5], dtype=dtype, head_dim=head_dim)
    outs = with_and_without_the_kernel(tensors, numbers)
    torch.testing.assert_close(*outs)


def test_without_a_compiler_torch_does_the_work(monkeypatch):
    tensors, numbers = step(lens=[20, 5])
    expected = attend(tensors, numbers)
    monkeypatch.setenv("CXX", "no-such-compiler")
    in_cpp.library.cache_clear()
    try:
        assert not in_cpp.library()
        plan = varlen.plan(varlen.Step(*numbers, 16, decodes=True, plain=True), "torch")
        torch.testing.assert_close(plan.attend(*tensors), expected)
    finally:
        monkeypatch.undo()
        in_cpp.library.cache_clear()


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"alibi_slopes": torch.rand(4)}], ids=["softcap", "alibi"])
def test_options_that_the_kernel_does_not_have_are_torchs(options):
    tensors, numbers = step(lens=[20, 5])
    outs = with_and_without_the_kernel(tensors, numbers, options=DECODING._replace(**options))
    assert outs[0].equal(outs[1])
