"""wmma on the CPU: products that equal torch's, what they cost, and the mistakes that a GPU says nothing of."""

import math
from pathlib import Path

import pytest
import torch
from planted import SCHEDULES, Planted, assert_found, assert_twin_is_clean

import cudascope
from cudascope import CudaKernel

FILE = Path(__file__).parent / "tensor_cores.cu"
TILE = 16


def whole(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Whole numbers, so small that every sum of products is exact."""
    low = 0 if dtype == torch.uint8 else -8
    return torch.randint(low, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------ what they compute

# name: M, N, K, type of a and b, of the sums, and which of a and b lie column by column
PRODUCTS = {
    "half_16_16_16": (16, 16, 16, torch.float16, torch.float32, False, True),
    "half_32_8_16": (32, 8, 16, torch.float16, torch.float32, True, False),
    "half_8_32_16": (8, 32, 16, torch.float16, torch.float16, False, False),
    "bfloat16_16_16_16": (16, 16, 16, torch.bfloat16, torch.float32, True, True),
    "bfloat16_8_32_16": (8, 32, 16, torch.bfloat16, torch.float32, True, True),
    "tf32_16_16_8": (16, 16, 8, torch.float32, torch.float32, False, True),
    "int8_16_16_16": (16, 16, 16, torch.int8, torch.int32, False, True),
    "uint8_32_8_16": (32, 8, 16, torch.uint8, torch.int32, False, True),
    "double_8_8_4": (8, 8, 4, torch.float64, torch.float64, False, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_equals_torch_under_any_schedule(name):
    m, n, k, kind, sums, columns_a, columns_b = PRODUCTS[name]
    a, b = whole(m, k, dtype=kind), whole(k, n, dtype=kind, seed=1)
    c, d = whole(m, n, dtype=sums, seed=2), torch.full((m, n), 99).to(sums)
    expected = (a.double() @ b.double() + c.double()).to(sums)
    stored_a, stored_b = (x.T.contiguous() if turn else x for x, turn in ((a, columns_a), (b, columns_b)))
    for seed in SCHEDULES:
        with cudascope.check(schedule=seed, outputs=[d]):
            CudaKernel(FILE, name)[1, 32](stored_a, stored_b, c, d)
        assert torch.equal(d, expected)


CONVERTED = {
    "float_to_half_16_16": (torch.float32, torch.float16),
    "float_to_half_32_8": (torch.float32, torch.float16),
    "half_to_float_8_32": (torch.float16, torch.float32),
    "int_to_float_16_16": (torch.int32, torch.float32),
    "sums_of_tf32_to_half_16_16": (torch.float32, torch.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTED)
def test_accumulators_of_one_size_hold_the_same_elements_whatever_their_type(name):
    from_type, to_type = CONVERTED[name]
    shape = tuple(map(int, name.split("_")[-2:]))
    a, d = whole(*shape, dtype=from_type), torch.full(shape, 99, dtype=to_type)
    for seed in SCHEDULES:
        with cudascope.check(schedule=seed, outputs=[d]):
            CudaKernel(FILE, name)[1, 32](a, d)
        assert torch.equal(d, a.to(to_type))


@pytest.mark.slow
def test_tiles_of_a_larger_product_are_scaled_element_by_element():
    a, b, c, d = whole(48, 80), whole(80, 32, seed=1), whole(48, 32).float(), torch.empty(48, 32)
    for seed in SCHEDULES[:4]:
        with cudascope.check(schedule=seed, outputs=[d]):
            CudaKernel(FILE, "gemm")[(2, 3), 32](a, b, c, d, 32, 80, 0.5)
        assert torch.equal(d, 0.5 * (a.float() @ b.float()) + c)


@pytest.mark.slow
def test_a_half_sum_is_rounded_once_per_product():
    # 2048 + 16 · 3/16 = 2051, halfway between its neighbours 2050 and 2052; each 3/16 alone would be lost
    a, b = torch.ones(8, 16).half(), torch.full((16, 32), 3 / 16).half()
    c, d = torch.full((8, 32), 2048.0).half(), torch.empty(8, 32).half()
    CudaKernel(FILE, "half_8_32_16")[1, 32](a, b, c, d)
    assert (d == 2052).all()


@pytest.mark.slow
def test_float_sums_are_added_in_order_of_k_from_c():
    # 2^24 + 1 is 2^24 in float32, so that ones are lost that come one at a time
    a, b = torch.ones(16, 16).half(), torch.ones(16, 16).half()
    c, d = torch.full((16, 16), 2.0**24), torch.empty(16, 16)
    CudaKernel(FILE, "half_16_16_16")[1, 32](a, b, c, d)
    assert (d == 2.0**24).all()


@pytest.mark.slow
def test_tf32_is_rounded_on_request_and_cut_off_otherwise():
    # tf32 has 10 bits of fraction: 1 + 2^-11 lies halfway between 1 and 1 + 2^-10, and ties go away from zero
    out = torch.empty(2)
    CudaKernel(FILE, "tf32_rounding")[1, 32](torch.tensor([1 + 2**-11]), out)
    assert out.tolist() == [1 + 2**-10, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8_16_16_16", "int8_saturated"])
def test_sums_of_integers_wrap_unless_they_are_to_saturate(name):
    a = b = torch.full((16, 16), 127, dtype=torch.int8)
    c, d = torch.full((16, 16), 2**31 - 10, dtype=torch.int32), torch.empty(16, 16, dtype=torch.int32)
    CudaKernel(FILE, name)[1, 32](a, b, c, d)
    assert (d == (2**31 - 1 if name == "int8_saturated" else 2**31 - 10 + 16 * 127**2 - 2**32)).all()


def test_a_lane_holds_as_many_elements_as_on_a_gpu():
    counts = torch.zeros(6, dtype=torch.int32)
    CudaKernel(FILE, "elements")[1, 32](counts)
    assert counts.tolist() == [16, 8, 4, 4, 16, 2]


# ------------------------------------------------------------------------------------------------ what they cost


def aligned(x: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(x.nbytes + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def test_counters_of_a_product_equal_those_derived_by_hand():
    a, b, c, d = map(aligned, (whole(48, 80), whole(80, 32), torch.zeros(48, 32), torch.empty(48, 32)))
    with cudascope.observe() as report:
        CudaKernel(FILE, "gemm")[(2, 3), 32](a, b, c, d, 32, 80, 0.5)
    steps = 2 * 3 * 80 // TILE
    read, write = report.count("read", "global"), report.count("write", "global")
    assert report.count("mma").requests == steps
    # a tile of 16 rows of 32 bytes is 32 pieces of 16 bytes: one request; a row is one sector; of floats, twice that
    assert read.requests == 2 * steps + 6 * 2
    assert read.bytes == 2 * steps * 512 + 6 * 1024
    assert read.sectors == 2 * steps * 16 + 6 * 32
    assert (write.requests, write.bytes, write.sectors) == (6 * 2, 6 * 1024, 6 * 32)


@pytest.mark.parametrize(("stride", "conflicts"), [(TILE, 4), (24, 0)])
def test_a_tile_in_shared_memory_has_the_bank_conflicts_of_its_rows(stride, conflicts):
    # 8 pieces of 16 bytes come at a time, one of each of 8 rows. Rows of 32 bytes: the fifth begins in the first one's
    # bank, one extra turn for each of the 4 quarters. Rows of 48 bytes begin in 8 different quarters of the banks.
    name = "leading_dimension" if stride == 24 else "written_without_a_barrier"
    args, _, _ = tile_product()
    with cudascope.observe() as report:
        CudaKernel(FILE, name)[1, 32](*args, False)
    assert report.count("read", "shared").requests == 1
    assert report.count("read", "shared").bank_conflicts == conflicts


# ------------------------------------------------------------------------------------------------ planted bugs


def tile_product():
    a, b = aligned(whole(TILE, TILE)), aligned(whole(TILE, TILE, seed=1))
    d = torch.full((TILE, TILE), math.nan)
    return (a, b, d), d, a.float() @ b.float()


BUGS = {
    "half_a_warp": Planted("lane", (1, 32), tile_product),
    "divergent_product": Planted("deadlock", (1, 32), tile_product),
    "written_without_a_barrier": Planted("race", (1, 32), tile_product, "tile"),
    "between_warps": Planted("race", (1, 64), tile_product, "tile"),
    "own_address": Planted("argument", (1, 32), tile_product),
    "leading_dimension": Planted("argument", (1, 32), tile_product),
    "unaligned_matrix": Planted("argument", (1, 32), tile_product),
    "past_the_end": Planted("out of bounds", (1, 32), tile_product, "b"),
}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_planted_bug_is_found_in_its_line(name, seed):
    assert_found(FILE, name, BUGS[name], seed)


@pytest.mark.parametrize("name", [*BUGS, "counts_on_a_layout"])
def test_the_correct_twin_is_clean_under_any_schedule(name):
    assert_twin_is_clean(FILE, name, BUGS.get(name, Planted("", (1, 32), tile_product)))


@pytest.mark.slow
def test_code_that_counts_on_a_layout_of_fragments_is_wrong_under_every_schedule_in_another_way():
    arrangements = set()
    for seed in SCHEDULES:
        args, d, expected = tile_product()
        with cudascope.schedule(seed):
            CudaKernel(FILE, "counts_on_a_layout")[1, 32](*args, True)
        assert sorted(d.flatten().tolist()) == sorted(expected.flatten().tolist())  # all are there, elsewhere
        assert (d == expected).float().mean() < 0.2, f"schedule {seed}"
        arrangements.add(tuple(d.flatten().tolist()))
    assert len(arrangements) == len(SCHEDULES)


def test_lanes_at_two_products_are_told_which_lanes_and_lines():
    args, _, _ = tile_product()
    with pytest.raises(cudascope.Finding) as caught:
        CudaKernel(FILE, "divergent_product")[1, 32](*args, True)
    lines = [line for line in str(caught.value).splitlines() if "in a matrix product" in line]
    assert len(lines) == 2
    assert all("and 15 more" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_are_cuda_too(arch):
    assert CudaKernel(FILE, "gemm").resources(arch).spilled_bytes == 0
