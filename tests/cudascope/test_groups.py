"""Cooperative groups on the CPU: what each function gives, derived by hand, and the mistakes they invite."""

from pathlib import Path

import pytest
import torch
from planted import SCHEDULES, Planted, assert_found, assert_twin_is_clean

import cudascope
from cudascope import CudaKernel

FILE = Path(__file__).parent / "groups.cu"
THREADS, WARP, TILE = 64, 32, 8


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-99, 99, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))


def checked(name: str, launch: tuple, *args) -> None:
    """Under a few schedules: the results of the last one count."""
    for seed in SCHEDULES[:5]:
        with cudascope.check(schedule=seed):
            CudaKernel(FILE, name)[launch](*args)


# ------------------------------------------------------------------------------------------------ what they give


@pytest.mark.slow
def test_tiles():
    x, out = whole(THREADS), torch.zeros(10, THREADS, dtype=torch.int32)
    checked("tiles", (1, THREADS), x, out)
    v, rank = x.view(-1, TILE), torch.arange(TILE)
    rows = dict(enumerate(out.view(10, -1, TILE)))
    sums = v.cumsum(1)
    assert torch.equal(rows[0], sums[:, -1:].expand_as(v).int())
    assert torch.equal(rows[1], v.amax(1, keepdim=True).expand_as(v))
    assert torch.equal(rows[2], sums.int())
    assert torch.equal(rows[3], (sums - v).int())
    assert torch.equal(rows[4], v[:, 3:4].expand_as(v))
    assert torch.equal(rows[5], v[:, [2, 3, 4, 5, 6, 7, 6, 7]])  # past the end: the own value
    assert torch.equal(rows[6], v[:, rank ^ 1])
    assert torch.equal(rows[7], ((v > 0) << rank).sum(1, keepdim=True).expand_as(v).int())
    assert torch.equal(rows[8], ((v > 90).any(1) * 2 + (v > -90).all(1))[:, None].expand_as(v).int())
    assert torch.equal(rows[9], (torch.arange(len(v))[:, None] * 100 + rank * 10 + TILE).int())


@pytest.mark.slow
def test_threads_that_are_together_by_chance_or_by_a_label():
    x, out = whole(THREADS), torch.full((6, THREADS), -1, dtype=torch.int32)
    checked("coalesced", (1, THREADS), x, out)
    for warp in range(2):
        mine = range(warp * WARP, (warp + 1) * WARP)
        parts = {}  # a shuffled schedule parts the lanes that are together
        for i in mine:
            if i % 3 == 0:
                parts.setdefault((out[0, i].item() // 100, out[2, i].item()), []).append(i)
        for (size, least), part in parts.items():
            assert (size, least) == (len(part), x[part].min())
            assert [out[0, i] % 100 for i in part] == [*range(size)]
            assert size == 1 or all(out[1, i] == x[part[1]] for i in part)
        for i in mine:
            same = [j for j in mine if (x[j] ^ x[i]) & 3 == 0]
            assert (out[3, i], out[4, i]) == (x[same].sum(), len(same))
            half = [j for j in mine if (x[j] > 0) == (x[i] > 0)]
            assert out[5, i] == x[half[max(half.index(i) - 1, 0)]]


def test_values_of_more_than_8_bytes_are_reduced_and_shuffled():
    x = torch.arange(WARP).float().roll(5)
    out = torch.empty(WARP, 3)
    checked("large_values", (1, WARP), x, out)
    weights = 2.0 ** (x.double() - 31)
    expected = torch.stack([torch.tensor(31.0).double(), weights.sum(), (weights * x).sum()])
    torch.testing.assert_close(out.double(), expected.expand(WARP, 3), rtol=1e-6, atol=0)


def test_a_function_takes_any_group():
    x, sums = whole(THREADS), torch.zeros(1 + THREADS // 4, dtype=torch.int32)
    checked("any_group", (1, THREADS), x, sums)
    assert torch.equal(sums, torch.cat([x.sum()[None], x.view(-1, 4).sum(1)]).int())


def test_places_in_a_grid():
    ranks = torch.zeros(3 * 40, dtype=torch.int32)
    checked("places", (3, 40), ranks)
    assert torch.equal(ranks, (torch.arange(120) // 40 * 120 + 120).int())


def test_what_a_group_does_at_once_is_counted_as_one_shuffle():
    x, out = torch.arange(WARP).float(), torch.empty(WARP, 3)
    with cudascope.observe() as report:
        CudaKernel(FILE, "large_values")[1, WARP](x, out)
    assert report.count("shuffle").requests == 2


@pytest.mark.slow
def test_a_grid_that_a_gpu_cannot_hold_at_once_is_refused():
    memory = torch.zeros(3, THREADS, dtype=torch.int32)
    with pytest.raises(ValueError, match="at once"):
        CudaKernel(FILE, "grid_sync_missing")[100_000, THREADS](*memory, False)


# ------------------------------------------------------------------------------------------------ planted bugs


def reversed_in(size: int):
    x, out = whole(THREADS), torch.full((THREADS,), 999, dtype=torch.int32)
    return (x, out), out, x.view(-1, size).flip(1).flatten()


def sums_of_tiles():
    x, sums = whole(THREADS), torch.full((THREADS // TILE,), 999, dtype=torch.int32)
    return (x, sums), sums, x.view(-1, TILE).sum(1).int()


def reversed_grid():
    x, memory = whole(3 * THREADS), torch.zeros(3 * THREADS, dtype=torch.int32)
    out = torch.full((3 * THREADS,), 999, dtype=torch.int32)
    return (x, memory, out), out, x.flip(0)


def reversed_sum():
    x, out = whole(2, THREADS), torch.full((THREADS,), 999, dtype=torch.int32)
    return (x, out), out, x.sum(0).flip(0).int()


BUGS = {
    "tile_sync_missing": Planted("race", (1, THREADS), lambda: reversed_in(TILE), "row"),
    "tile_too_small": Planted("race", (1, THREADS), lambda: reversed_in(WARP), "row"),
    "reduce_in_a_branch": Planted("deadlock", (1, THREADS), sums_of_tiles),
    "grid_sync_missing": Planted("race", (3, THREADS), reversed_grid, "memory"),
    "copy_without_a_wait": Planted("race", (1, THREADS), lambda: reversed_in(THREADS), "row"),
    "waits_for_one_of_two": Planted("race", (1, THREADS), reversed_sum, "rows"),
}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_planted_bug_is_found_in_its_line(name, seed):
    assert_found(FILE, name, BUGS[name], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_the_correct_twin_is_clean_under_any_schedule(name):
    assert_twin_is_clean(FILE, name, BUGS[name])


@pytest.mark.slow
def test_the_kernels_are_cuda_too():
    assert CudaKernel(FILE, "any_group").resources("sm_80").shared_bytes == 4 * THREADS
