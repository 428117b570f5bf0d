"""Writing the paged cache: both backends store the same bits, and float8 is rounded right for every number there is."""

import pytest
import torch
from block_cases import bits
from triton_compile import compile_triton

from pagewise.kernels.paged_blocks import write_kv_cache_kernel
from pagewise.paged_blocks import write
from pagewise.paged_blocks.cache import PagedKVCache, from_vllm_layout
from pagewise.paged_blocks.write import to_float8, write_kv_cache

LAYOUTS = ["nhd", "vllm"]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    return request.param


def stored(numbers, dtype, device, *, backend, scale=1.0):
    """The bytes of a float8 cache after writing `numbers`, a multiple of 1024 of them, as K."""
    k = numbers.view(-1, 8, 128).to(device)
    cache = PagedKVCache(1, -(-len(k) // 16), 16, 8, 128, dtype=dtype, device=device)
    slots = torch.arange(len(k), device=device)
    cache.write(0, slots, k, k, k_scale=scale, v_scale=scale, backend=backend)
    k, v = (c[0].flatten(0, 1)[: len(k)].reshape(-1).view(torch.uint8).cpu() for c in (cache.k, cache.v))
    assert k.equal(v)
    return k


def nearest(numbers, dtype):
    """The bytes as the definition says: the nearest of all finite numbers of the format, ties to the even code."""
    codes = torch.arange(128, dtype=torch.uint8)
    table = codes.view(dtype).double()
    table = table[table.isfinite()]  # rising with the code
    size = numbers.double().abs().clamp(max=table[-1])
    above = torch.searchsorted(table, size).clamp(1, len(table) - 1)
    below = above - 1
    up, down = table[above] - size, size - table[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = code + 128 * numbers.signbit()
    return torch.where(numbers.isnan(), 0x7F, code).to(torch.uint8)


def whole(numbers):
    """Padded to a multiple of 1024."""
    return torch.cat([numbers, numbers.new_zeros(-len(numbers) % 1024)])


def float32_samples(dtype):
    """Every number of the format, every tie between two, their neighbours in float32, and 200 000 random patterns."""
    table = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    table = table[table.isfinite()]
    corners = torch.cat([table, (table[1:] + table[:-1]) / 2, table[-1:] * torch.tensor([1.03, 1.0625, 1.07, 2.0])])
    corners = torch.cat([corners, *(corners.nextafter(torch.tensor(to)) for to in (0.0, torch.inf))])
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).int().view(torch.float32)
    likely = torch.randn(100_000, generator=generator) * 2.0 ** torch.randint(-20, 10, (100_000,), generator=generator)
    special = torch.tensor([0.0, torch.inf, torch.nan, 1e-45, 1e-38, 3e38])
    corners = torch.cat([corners, special])
    return whole(torch.cat([corners, -corners, patterns, likely]))


UNUSUAL = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about NaN and infinity


@UNUSUAL
@pytest.mark.parametrize("dtype", FLOAT8)
def test_float32_is_rounded_to_the_nearest_float8(dtype, backend, kernel_device):
    numbers = float32_samples(dtype)
    assert stored(numbers, dtype, kernel_device, backend=backend).equal(nearest(numbers, dtype))


@UNUSUAL
@pytest.mark.parametrize(("of", "scale"), [(torch.float16, 1.0), (torch.bfloat16, 1.0), (torch.bfloat16, 2.0**-126)])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_16_bit_number_is_rounded_to_the_nearest_float8(dtype, of, scale, backend, kernel_device):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(of)
    wanted = nearest(numbers.float() / scale, dtype)
    assert stored(numbers, dtype, kernel_device, backend=backend, scale=scale).equal(wanted)


@UNUSUAL
@pytest.mark.parametrize("scale", [0.3, 7.0, 2.0**-130 * 2**10])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_both_backends_divide_alike(dtype, scale, kernel_device):
    numbers = float32_samples(dtype)[: 2**16] * scale  # ties first
    wanted = nearest(numbers / torch.full((1,), scale), dtype)
    for backend in ("torch", "triton"):
        assert stored(numbers, dtype, kernel_device, backend=backend, scale=scale).equal(wanted)


def test_what_is_stored_times_its_scale_is_what_was_meant(device):
    x = torch.linspace(-3, 3, 1000, device=device)
    assert (to_float8(x, FLOAT8[0], 0.01).float() * 0.01 - x).abs().max() <= 3 / 16
    assert to_float8(x, FLOAT8[0], 1e-4).float().abs().max() == 448


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, *FLOAT8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 3])
def test_backends_store_the_same_bits_in_the_same_places(heads, layout, dtype, kernel_device):
    """Also of transposed tensors, and NaN with all its bits."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 256, (2, heads, 10, 48 * dtype.itemsize), generator=generator, dtype=torch.uint8)
    k, v = random.view(dtype).transpose(1, 2).to(kernel_device)  # [10, Hkv, D]
    slots = torch.tensor([3, -1, 0, 19, 8, -1, 11, 4, 5, 12], device=kernel_device)
    caches = []
    for backend in ("torch", "triton", "auto"):
        cache = PagedKVCache(2, 5, 4, heads, 48, dtype=dtype, device=kernel_device, layout=layout)
        cache.write(1, slots, k, v, backend=backend)
        caches.append(cache)
        assert not bits(cache.k[0]).any()
    for cache in caches[1:]:
        assert bits(cache.k).equal(bits(caches[0].k))
        assert bits(cache.v).equal(bits(caches[0].v))
    k_cache, v_cache = caches[1].k[1], caches[1].v[1]
    if layout == "vllm":
        k_cache, v_cache = from_vllm_layout(k_cache, v_cache)
    written = slots >= 0
    for layer, new in ((k_cache, k), (v_cache, v)):
        rows = bits(layer.flatten(0, 1))
        assert rows[slots[written]].equal(bits(new[written]))
        assert len(rows) - (rows != 0).flatten(1).any(dim=1).sum() == 20 - written.sum()  # and nowhere else


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_and_v_have_their_own_scales(layout, backend, kernel_device):
    cache = PagedKVCache(1, 2, 4, 2, 16, dtype=FLOAT8[0], device=kernel_device, layout=layout)
    x = torch.full((1, 2, 16), 6.0, dtype=torch.bfloat16, device=kernel_device)
    cache.write(0, torch.tensor([5], device=kernel_device), x, x, k_scale=2.0, v_scale=0.5, backend=backend)
    k, v = cache.gather(0, [1], 2)
    assert k.float()[:, 0, 0].tolist() == [0.0, 3.0]
    assert v.float()[:, 0, 0].tolist() == [0.0, 12.0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unchecked_write_stores_the_same_and_looks_at_no_slot(
    layout, backend, kernel_device, monkeypatch, shapes_unchecked
):
    k, v = torch.randn(2, 4, 2, 16, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    checked, unchecked = (PagedKVCache(1, 3, 4, 2, 16, device=kernel_device, layout=layout) for _ in range(2))
    slots = torch.tensor([3, -1, 11, 4], device=kernel_device)
    checked.write(0, slots, k, v, backend=backend)
    monkeypatch.setattr(write, "check_slots", None)
    unchecked.write(0, slots, k, v, check=False, backend=backend)
    assert unchecked.k.equal(checked.k)
    assert unchecked.v.equal(checked.v)


def test_nothing_to_write(backend, kernel_device):
    cache = PagedKVCache(1, 2, 4, 2, 16, device=kernel_device)
    empty = torch.zeros(0, 2, 16, device=kernel_device)
    cache.write(0, torch.zeros(0, dtype=torch.int64, device=kernel_device), empty, empty, backend=backend)
    assert not cache.k.any()


def test_triton_write_reaches_beyond_two_to_the_31(kernel_device):
    """The last slot of a cache of more than 2³¹ elements (2 GiB of address space on the CPU)."""
    from pagewise.paged_blocks.write import write_kv_cache

    P, D = 128, 256
    N = 2**31 // (P * D) + 2
    cache = torch.empty(N, P, 1, D, dtype=torch.float8_e5m2, device=kernel_device)
    cache[-1] = 0
    x = torch.ones(1, 1, D, device=kernel_device)
    write_kv_cache(cache, cache, torch.tensor([N * P - 1], device=kernel_device), x, x, backend="triton")
    assert cache[-1].float().sum(dim=(1, 2)).tolist() == [0.0] * (P - 1) + [D]


ONES = torch.ones(2, 2, 8)
E4M3 = {"dtype": FLOAT8[0]}
TO_FLOAT8 = E4M3 | {"k": ONES.to(FLOAT8[0]), "v": ONES.to(FLOAT8[0]), "k_scale": 2.0}
REFUSED = [
    ({"backend": "cuda"}, ValueError, "backend must be"),
    ({"layer": 1}, ValueError, "layer"),
    ({"k_scale": 0.5}, ValueError, "k_scale must be 1.0 where torch.float32 is stored as it is, got 0.5"),
    ({"v_scale": 2}, ValueError, "v_scale must be 1.0 where"),
    ({"k_scale": "1"}, TypeError, "k_scale must be a number"),
    (E4M3 | {"k_scale": 0.0}, ValueError, "k_scale must be a finite number in"),
    (E4M3 | {"v_scale": float("nan")}, ValueError, "v_scale must be a finite number in"),
    (TO_FLOAT8, ValueError, "k_scale must be 1.0 where torch.float8_e4m3fn is"),
    (E4M3 | {"k": ONES.to(FLOAT8[1])}, TypeError, "k must have the dtype of cache: float8_e4m3fn, got float8_e5m2"),
    (E4M3 | {"k": ONES.double()}, TypeError, "k must have the dtype of cache: float8_e4m3fn, got float64"),
    (E4M3 | {"v": ONES.half()}, TypeError, "v must have the dtype of k: float32, got float16"),
    ({"k": ONES.half()}, TypeError, "k must have the dtype"),
    ({"v": ONES.half()}, TypeError, "v must have the dtype"),
    ({"slots": torch.tensor([0, 1, 2])}, ValueError, "k must be"),
    ({"v": ONES[:1]}, ValueError, "v must be"),
    ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, TypeError, "slots must be int64"),
    ({"slots": [0, 1]}, TypeError, "slots must be a torch.Tensor"),
    *(
        ({"slots": torch.tensor(slots), "layout": layout}, ValueError, says)
        for layout in LAYOUTS
        for slots, says in (
            ([3, 3], "slots must be distinct"),
            ([3, 16], "slots must be -1"),
            ([0, -2], "slots must be -1"),
            ([0, 2**40], "slots must be -1"),
        )
    ),
]


@pytest.mark.parametrize(("wrong", "error", "says"), REFUSED)
def test_a_refused_write_writes_nothing(wrong, error, says, backend, kernel_device, shapes_unchecked):
    right = {"layer": 0, "slots": torch.tensor([0, 1]), "k": ONES, "v": ONES, "backend": backend}
    asked = right | {"dtype": torch.float32, "layout": "nhd"} | wrong
    sizes = {name: asked.pop(name) for name in ("dtype", "layout")}
    cache = PagedKVCache(1, 4, 4, 2, 8, device=kernel_device, **sizes)
    asked = {name: x.to(kernel_device) if isinstance(x, torch.Tensor) else x for name, x in asked.items()}
    with pytest.raises(error, match=says):
        cache.write(**asked)
    assert not bits(cache.k).any()
    assert not bits(cache.v).any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, FLOAT8[0]])
def test_op_is_registered_soundly(cache_dtype, layout, kernel_device):
    cache = PagedKVCache(1, 4, 4, 2, 16, dtype=cache_dtype, device=kernel_device, layout=layout)
    k = torch.randn(3, 2, 16, device=kernel_device)
    # the other checks compare caches by arithmetic that torch lacks for float8
    tests = ("test_faketensor", "test_schema", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.pagewise.write_kv_cache,
        (cache.k[0], cache.v[0], torch.tensor([5, -1, 0], device=kernel_device), k, k, 1.0, 1.0),
        test_utils=tests[:1] if cache_dtype in FLOAT8 else tests,
    )


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("new", "cached", "float8_bits"), [
    ("*bf16", "*bf16", 0), ("*fp64", "*fp64", 0), ("*bf16", "*u8", 4), ("*fp32", "*u8", 5), ("*u8", "*u8", 0),
])  # fmt: skip
@pytest.mark.parametrize("x", [80, 8])
def test_write_kernel_compiles_for_gpus_without_spilling(x, new, cached, float8_bits, sm, record_property):
    constants = {"P": 16, "HKV": 8, "D": 80, "X": x, "FLOAT8_BITS": float8_bits, "BLOCK": 1024}
    signature = {"slots_ptr": "*i64", "k": [new, *["i32"] * 3], "v": [new, *["i32"] * 3]}
    signature |= {"k_cache": [cached, *["i32"] * 5], "v_cache": [cached, *["i32"] * 4]}
    signature |= {"k_scale": "fp32", "v_scale": "fp32"}
    compiled = compile_triton(write_kv_cache_kernel, signature, constants, sm)
    record_property("registers", compiled.registers)
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_cache_takes_no_part_in_differentiation(backend, kernel_device):
    cache = PagedKVCache(1, 2, 4, 1, 8, device=kernel_device)
    k = torch.randn(1, 1, 8, device=kernel_device, requires_grad=True)
    cache.write(0, torch.tensor([3], device=kernel_device), k, k, backend=backend)
    assert not cache.k.requires_grad
    assert cache.k[0, 0, 3].equal(k[0].detach())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_head_strides_may_be_large(backend, kernel_device):
    """A cache with its heads outermost, beyond 2³¹ elements (untouched, so without memory)."""
    memory = torch.empty(2**29 * 8, dtype=torch.float8_e5m2, device=kernel_device)
    cache = memory.as_strided((2, 4, 8, 16), (64, 16, 2**29, 1))
    k = torch.randn(1, 8, 16, device=kernel_device)
    slots = torch.tensor([5], device=kernel_device)
    write_kv_cache(cache, cache, slots, k, k, backend=backend)
    assert cache[1, 1].view(torch.uint8).equal(k[0].to(cache.dtype).view(torch.uint8))
