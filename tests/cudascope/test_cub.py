"""The part of cub that the CPU runner has: collectives of warps and thread blocks."""

from pathlib import Path

import pytest
import torch
from planted import SCHEDULES

import cudascope
from cudascope import CudaKernel

pytestmark = pytest.mark.slow  # a build of large headers
FILE = Path(__file__).parent / "cub.cu"


def run(name: str, launch: tuple, *args: object, schedule: int | None = None) -> None:
    with cudascope.check(schedule=schedule):
        CudaKernel(FILE, name)[launch](*args)


def randint(n: int) -> torch.Tensor:
    return torch.randint(-99, 99, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", [1, 31, 33, 80])
def test_block_reduce(n):
    x, out = randint(80).float(), torch.zeros(4)
    run("reductions", (1, 80), x, out, n, schedule=n)
    assert out.tolist() == [x.sum(), x[:n].sum(), x.max() + 1, x.argmax()]


def test_storage_used_again_without_a_barrier_is_a_race():
    with pytest.raises(cudascope.Finding) as caught:
        run("reuses_storage", (1, 80), randint(80).float(), torch.zeros(2))
    assert caught.value.what == "race"
    assert "Reduce(temp)" in FILE.read_text().splitlines()[caught.value.line - 1]


def test_warp_reduce_and_scan():
    x, out = randint(64), torch.zeros(5, 64, dtype=torch.int32)
    run("warps", (1, 64), x, out)
    eights, warps = x.view(8, 8), x.view(2, 32)
    assert torch.equal(out[0, ::8], eights.sum(1).int())
    assert torch.equal(out[1].view(2, 32), warps.cumsum(1).int())
    assert torch.equal(out[2].view(2, 32), (warps.cumsum(1) - warps).int())
    assert torch.equal(out[3].view(2, 32), warps.sum(1, keepdim=True).expand(2, 32).int())
    shifted = torch.cat([torch.full((2, 1), 5, dtype=torch.int32), warps[:, :-1]], dim=1)
    assert torch.equal(out[4].view(2, 32), shifted.cummax(1).values)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", [288, 700])
def test_block_scan_load_and_store(n, schedule):
    x, out = randint(n), torch.zeros(4, n, dtype=torch.int32)
    run("scans", (1, 96), x, out, n, schedule=schedule)
    tiles = x.split(288)
    sums = torch.cat([tile.cumsum(0) for tile in tiles])
    most = torch.cat([tile.cummax(0).values for tile in tiles])
    assert torch.equal(out, torch.stack([sums, sums - x, most, x.cumsum(0)]).int())


def test_scan_of_one_item_per_thread():
    x, out = randint(40), torch.zeros(40, dtype=torch.int32)
    run("scan_of_one", (1, 40), x, out)
    assert torch.equal(out, (x.cumsum(0) - x + 1000 * x.sum()).int())


@pytest.mark.parametrize("schedule", [None, 1])
def test_block_sorts(schedule):
    x = randint(192).float()  # with equal numbers: the sort is stable
    x[:4] = torch.tensor([0.0, -0.0, 0.0, torch.inf])
    keys, out = randint(192), torch.zeros(4, 192, dtype=torch.int32)
    run("sorts", (1, 64), x, keys, out, schedule=schedule)
    assert torch.equal(out[0], x.sort(descending=True, stable=True).indices.int())
    assert torch.equal(out[1], keys.sort().values)
    assert torch.equal(out[2], keys[(keys & 3).sort(stable=True).indices])
    rest = torch.full((92,), -7777, dtype=torch.int32)
    assert torch.equal(out[3], torch.cat([keys[:100].sort(descending=True).values, rest]))


def test_neighbours_of_items_and_a_histogram():
    keys, out = randint(192).div(40, rounding_mode="floor"), torch.zeros(6, 192, dtype=torch.int32)
    run("neighbours", (1, 64), keys, out, 100, schedule=3)
    left, right = torch.cat([torch.tensor([5]), keys[:-1]]).int(), keys.roll(-1)
    changes = keys[1:] != keys[:-1]
    one = torch.ones(1, dtype=torch.bool)
    assert torch.equal(out[0].bool(), torch.cat([one, changes]))
    assert torch.equal(out[1].bool(), torch.cat([changes, one]))
    assert torch.equal(out[2], keys - left)
    assert torch.equal(out[3], torch.cat([keys[:1], (keys - left)[1:100], keys[100:]]))
    assert torch.equal(out[4], torch.cat([(keys - right)[:-1], keys[-1:]]))
    assert torch.equal(out[5, :8].long(), torch.bincount(keys & 7, minlength=8))


def test_items_beside_those_of_other_thread_blocks():
    keys, out = randint(192).div(40, rounding_mode="floor"), torch.zeros(3, 192, dtype=torch.int32)
    run("edges", (1, 64), keys, out, schedule=3)
    changes, equal = keys[1:] != keys[:-1], torch.zeros(1, dtype=torch.bool)
    assert torch.equal(out[0].bool(), torch.cat([equal, changes]))
    assert torch.equal(out[1].bool(), torch.cat([changes, equal]))
    assert torch.equal(out[2], keys - torch.cat([keys[1:], torch.tensor([7])]).int())


def test_a_class_with_padding_is_written_whole():
    x, out = randint(64).float(), torch.zeros(1, dtype=torch.int64)
    run("wide_pairs", (1, 64), x, out)
    assert out == x.argmax()


def test_the_pieces_that_cub_is_made_of():
    x, out, bits = (
        torch.randn(32, dtype=torch.float64),
        torch.zeros(3, 32, dtype=torch.float64),
        torch.zeros(2, dtype=int),
    )
    bits = bits.int()
    run("pieces", (1, 32), x, out, bits)
    assert torch.equal(out[0], torch.cat([x[2:31], x[29:]]))
    eights = x.view(4, 8)
    assert torch.equal(out[1].view(4, 8), torch.cat([eights[:, :1], eights[:, :-1]], 1))
    assert torch.equal(out[2].view(2, 16), x.view(2, 16)[:, 3:4].expand(2, 16))
    assert bits.tolist() == [0x7FFFFFFE, 5 - 2**31]
