"""The C++ kernels of a decoder: the same results as torch's operators, and only where torch need not see them."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode

from pagewise.models import Llama, LlamaConfig, in_cpp
from pagewise.models.linear import PackedWeights
from pagewise.models.llama import RMSNorm, apply_rope, rope
from pagewise.paged_blocks import PagedKVCache
from pagewise.paged_blocks.write import kv_writer

pytestmark = [
    pytest.mark.skipif(not in_cpp.library(), reason="no g++, or a machine for which it was not measured"),
    pytest.mark.usefixtures("shapes_unchecked"),
]
DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-30}}  # one unit of bf16
config = LlamaConfig(90, 64, 96, 2, 4, num_key_value_heads=2, head_dim=32)


@pytest.fixture
def switched_on():
    with torch.inference_mode():
        in_cpp.switch({})
        yield
        in_cpp.switch(None)


def writer(cache, slots):
    return kv_writer(cache.k, cache.v, slots, k_scale=1.0, v_scale=1.0, backend="torch")


def spread(shape, dtype, seed=0):
    """Random numbers of different sizes, in a tensor whose rows do not follow each other."""
    torch.manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + 32) * torch.logspace(-2, 2, shape[-1] + 32)
    return wide.to(dtype)[..., 16:-16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 5, 64), (3, 4, 48), (1, 70, 768), (1, 2, 3, 32)], ids=str)
def test_rms_norm_is_that_of_torch(switched_on, shape, dtype):
    norm = RMSNorm(shape[-1], 1e-5).to(dtype)
    norm.weight = torch.nn.Parameter(spread((shape[-1],), dtype, seed=1), requires_grad=False)
    x = spread(shape, dtype)
    found = in_cpp.rms_norm(x, norm.weight, norm.eps)
    in_cpp.switch(None)
    torch.testing.assert_close(found, norm(x), **NEAR[dtype])
    if dtype == torch.bfloat16:  # rounded where torch rounds: twice
        assert (found == norm(x)).double().mean() >= 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "T", "D"), [((1, 1), 1, 32), ((4, 2), 7, 64), ((6, 3), 70, 128)], ids=str)
def test_rotation_is_that_of_torch(switched_on, heads, T, D, dtype):
    joint = spread((1, T, (sum(heads) + heads[1]) * D), dtype)  # as one product returns q, k and v
    q, k, v = (
        y.unflatten(-1, (-1, D)).transpose(1, 2) for y in joint.split([n * D for n in (*heads, heads[1])], dim=-1)
    )
    turn = rope(torch.randint(0, 5000, (1, T)), LlamaConfig(9, 8, 8, 1, 1, head_dim=D))
    expected, before = [apply_rope(x, turn) for x in (q, k)], v.clone()
    assert in_cpp.rotate(q, k, *turn)
    for found, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(found, wanted, **NEAR[dtype] | {"atol": 1e-4 if dtype == torch.float32 else 1.0})
    assert torch.equal(v, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 5, 96), (2, 33, 2048)], ids=str)
def test_silu_and_mul_is_that_of_torch(switched_on, shape, dtype):
    joint = spread((*shape[:-1], 2 * shape[-1]), dtype)
    joint[..., :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 90, -90, -3e38]).to(dtype)
    gate, up = joint.chunk(2, dim=-1)
    found, expected = in_cpp.silu_and_mul(gate, up), silu(gate) * up
    torch.testing.assert_close(found, expected, **NEAR[dtype], equal_nan=True)
    if dtype == torch.bfloat16:
        assert (found == expected)[..., 8:].double().mean() >= 0.99


def test_what_the_kernels_cannot_read_is_left_to_torch(switched_on):
    weight, turn = torch.ones(24), rope(torch.arange(3)[None], LlamaConfig(9, 8, 8, 1, 1, head_dim=16))
    assert in_cpp.rms_norm(torch.randn(1, 3, 24), weight, 1e-5) is None  # no multiple of 16
    assert in_cpp.rms_norm(torch.randn(1, 3, 32).half(), torch.ones(32).half(), 1e-5) is None
    assert in_cpp.rms_norm(torch.randn(1, 3, 32), torch.ones(32).bfloat16(), 1e-5) is None
    assert in_cpp.rms_norm(torch.randn(3, 32), torch.ones(32), 1e-5) is None
    assert in_cpp.rms_norm(torch.randn(1, 32, 3).mT, torch.ones(32), 1e-5) is None
    assert in_cpp.silu_and_mul(torch.randn(1, 3, 32).double(), torch.randn(1, 3, 32).double()) is None
    q = torch.randn(1, 2, 3, 16)
    assert not in_cpp.rotate(q, q, *turn)  # half a head is no vector
    q, turn = torch.randn(1, 2, 3, 32), rope(torch.arange(3)[None], LlamaConfig(9, 8, 8, 1, 1, head_dim=32))
    for wrong in (torch.randn(1, 2, 32, 3).mT, torch.randn(2, 2, 3, 32), q.bfloat16(), q.half()):
        assert not in_cpp.rotate(wrong, q if len(wrong) == 1 else wrong, *turn)
    assert not in_cpp.rotate(q, torch.randn(1, 2, 32, 3).mT, *turn)


def test_the_kernels_run_only_where_torch_need_not_see_them():
    x, weight = torch.randn(1, 3, 32), torch.ones(32)
    model = Llama(config).requires_grad_(False)

    def runs():
        return in_cpp.rms_norm(x, weight, 1e-5) is not None

    weights = PackedWeights(model, 2**40)
    with weights:
        assert not runs()  # a derivative may be wanted
    with torch.no_grad():
        assert not runs()
        with weights:
            assert runs()
        assert not runs()
        with torch.autocast("cpu", dtype=torch.bfloat16), weights:
            assert not runs()
        with FlopCounterMode(display=False), weights:
            assert not runs()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_model_has_the_same_logits_but_for_rounding(qk_norm, num_tokens, dtype):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**vars(config) | {"qk_norm": qk_norm})).to(dtype).requires_grad_(False)
    ids, positions = torch.randint(90, (1, num_tokens)), torch.arange(num_tokens)[None]
    plain = model(ids, positions, lambda layer, q, k, v: q)
    with torch.inference_mode(), PackedWeights(model, 2**40):
        found = model(ids, positions, lambda layer, q, k, v: q)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_are_written_where_the_slots_say(dtype):
    cache, expected = (PagedKVCache(2, 4, 8, 3, 24, dtype=dtype, device="cpu") for _ in range(2))
    slots = torch.tensor([31, -1, 0, 9])
    k, v = torch.randn(2, 3, 4, 24).to(dtype).transpose(1, 2)  # [T, Hkv, D], and heads lie apart
    writer(cache, slots)(1, k, v)
    with FlopCounterMode(display=False):  # torch writes
        writer(expected, slots)(1, k, v)
    assert torch.equal(cache.k, expected.k)
    assert torch.equal(cache.v, expected.v)
    assert torch.equal(cache.k[1, 3, 7], k[0])
    assert torch.equal(cache.v[1, 1, 1], v[3])


def test_elements_that_lie_apart_are_written():
    cache, x = PagedKVCache(1, 4, 8, 3, 16, dtype=torch.float32, device="cpu"), torch.randn(2, 16, 3).mT
    writer(cache, torch.tensor([3, 4]))(0, x, x + 1)
    assert torch.equal(cache.k[0, 0, 3:5], x)
    assert torch.equal(cache.v[0, 0, 3:5], x + 1)


def test_what_does_not_fit_the_cache_is_never_written_by_the_kernel():
    new, more, other = torch.ones(2, 3, 16), torch.ones(3, 3, 16), torch.ones(2, 3, 16).bfloat16()
    for slots, x in (([0, 32], new), ([-2, 0], new), ([0, 1], more), ([0, 1], other), ([0, 1], new[..., :8])):
        results = []
        for seen in (False, True):  # by a mode, so that torch writes
            cache = PagedKVCache(1, 4, 8, 3, 16, dtype=torch.float32, device="cpu")
            with FlopCounterMode(display=False) if seen else nullcontext():
                try:
                    writer(cache, torch.tensor(slots))(0, x, x)
                except (IndexError, RuntimeError) as error:
                    results.append(type(error))
                else:
                    results.append(cache.k.sum().item())
        assert results[0] == results[1]
