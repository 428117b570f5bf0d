"""Arguments that share memory, that have none, or that come while torch's defaults are others."""

from itertools import product

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from conftest import assert_as_accurate_as_naive
from pagewise.flash_attention import flash_attention, tile_sizes
from pagewise.flash_decoding import flash_decoding, num_splits_heuristic
from pagewise.flash_decoding_plus_plus import Dataflow
from pagewise.flash_decoding_plus_plus.dataflow import device_label
from pagewise.kv_cache import KVCache, kv_cache_bytes
from pagewise.naive_attention import attention
from pagewise.online_softmax import online_softmax
from pagewise.paged_blocks import BlockManager, PagedKVCache

BACKENDS = ["torch", "triton"]
ATTENDING = {"flash": flash_attention, "decode": flash_decoding}


def filled(**options):
    cache = PagedKVCache(1, 4, 4, 2, 8, **options)
    cache.k.normal_()
    cache.v.normal_()
    return cache


# ------------------------------------------------------------------------------------------------ one tensor, two roles


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("same", ["q k", "q v", "k v", "q k v"])
@pytest.mark.parametrize("name", ATTENDING)
def test_one_tensor_may_be_several_arguments(name, same, dtype, backend):
    shared = torch.randn(1, 2, 5, 32).to(dtype)
    q, k, v = (shared if each in same else torch.randn(1, 2, 5, 32).to(dtype) for each in "qkv")
    exact = attention(q.double(), k.double(), v.double())
    assert_as_accurate_as_naive(ATTENDING[name](q, k, v, backend=backend), exact, attention(q, k, v))


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float64, "torch"), *product([torch.float32, torch.bfloat16], BACKENDS)]
)
def test_tokens_of_a_cache_may_be_written_into_the_same_cache(dtype, backend):
    cache = filled(dtype=dtype)
    k, v = (x[0].flatten(0, 1) for x in (cache.k, cache.v))
    old = k[:8].clone(), v[:8].clone()
    cache.write(0, torch.arange(1, 9), k[:8], v[:8], backend=backend)  # every token one place further
    assert k[1:9].equal(old[0])
    assert v[1:9].equal(old[1])


def test_the_cache_of_lesson_2_takes_its_own_views():
    for heads in (1, 2):
        cache, k = KVCache(1, heads, 16, 8), torch.randn(1, heads, 10, 8)
        k_all, v_all = cache.append(k, -k)
        cache.reset()
        cache.append(k[:, :, :2], k[:, :, :2])
        got_k, got_v = cache.append(k_all[:, :, 1:9], v_all[:, :, 1:9])
        assert got_k[:, :, 3:].equal(k[:, :, 2:9])  # the second token was overwritten before, by the first two
        assert got_v[:, :, 3:].equal(-k[:, :, 2:9])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_is_seen_by_a_derivative_that_needs_the_old_content(backend):
    cache = filled()
    k, v = (x[0].flatten(0, 1).transpose(0, 1)[None] for x in (cache.k, cache.v))
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    out, new = attention(q, k, v), torch.randn(3, 2, 8)
    cache.write(0, torch.tensor([1, 2, 3]), new, new, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.inference_mode():
        filled().write(0, torch.tensor([1, 2, 3]), new, new, backend=backend)


# ------------------------------------------------------------------------------------------------ what lies in memory


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as those of torch's DTensor and of quantised weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = torch.utils._pytree.tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return func(*inner[0], **inner[1])


def test_keys_without_memory_are_computed_by_torch_or_refused():
    k, slots = torch.randn(3, 2, 8), torch.tensor([1, 2, 3])
    for wrap in (Wrapped, torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)):
        cache, expected = PagedKVCache(1, 4, 4, 2, 8), wrap(k) * 1.0
        cache.write(0, slots, wrap(k), wrap(k))
        assert cache.k[0].flatten(0, 1)[1:4].equal(expected)
    with pytest.raises(AssertionError, match="FakeTensor"):
        PagedKVCache(1, 4, 4, 2, 8).write(0, slots, FakeTensorMode().from_tensor(k), k)


@pytest.mark.parametrize("name", ATTENDING)
def test_a_view_with_the_negative_bit_has_its_sign(name):
    q, k, v = (torch._neg_view(torch.randn(1, 2, 5, 32)) for _ in range(3))
    out = ATTENDING[name](q, k, v, backend="triton")
    torch.testing.assert_close(out, attention(q, k, v), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ defaults


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_float8_is_the_same_under_any_default_dtype(default, monkeypatch):
    x, found = torch.randn(16, 2, 8) * 3, []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            for backend in BACKENDS:
                cache = PagedKVCache(1, 4, 4, 2, 8, dtype=torch.float8_e4m3fn)
                cache.write(0, torch.arange(16), x, x, k_scale=0.1, v_scale=0.1, backend=backend)
                found.append(cache.k.view(torch.uint8))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(each.equal(found[0]) for each in found)


@pytest.mark.usefixtures("shapes_unchecked")
def test_numpys_integers_count_like_pythons():
    sizes = {"num_layers": 80, "num_kv_heads": 8, "head_size": 128}
    assert kv_cache_bytes(np.int32(100_000), **sizes) == kv_cache_bytes(100_000, **sizes)
    assert tile_sizes(np.int32(192 * 1024), np.int8(64), np.int8(2)) == tile_sizes(192 * 1024, 64, 2)
    assert num_splits_heuristic(*map(np.uint8, (4, 132, 64, 32))) == num_splits_heuristic(4, 132, 64, 32)
    manager = BlockManager(5000, np.int16(16))
    for i in range(2500):
        manager.allocate(i, [1])
    assert manager.append(2499, 2) == 16 * 2499 + 1
    x = torch.randn(2, 9)
    torch.testing.assert_close(online_softmax(x, np.int64(4)), x.softmax(-1))
    cache = PagedKVCache(1, 8, 16, 2, 8)
    assert len(cache.gather(0, list(range(7)), np.uint8(100))[0]) == 100


@pytest.mark.usefixtures("shapes_unchecked")
def test_block_numbers_are_integers():
    cache = filled()
    before = cache.k.clone()
    for pairs in ([(0.7, 3.9)], ["12"]):
        with pytest.raises(TypeError):
            cache.copy_blocks(pairs)
    with pytest.raises(TypeError):
        cache.gather(0, [1.9], 4)
    assert cache.k.equal(before)


def test_a_bias_that_does_not_fit_is_refused_whatever_the_number_of_rows():
    flow = Dataflow(device_label(torch.device("cpu")), torch.float16, {(8, 32): (3, 9)})
    w = torch.randn(8, 32).half()
    for bias in (torch.randn(8), torch.randn(2, 1, 8).half()):
        for rows in (1, 4, 20):
            with pytest.raises(RuntimeError):
                flow.linear(torch.ones(rows, 32).half(), w, bias)
