"""The flat GEMM in the CPU runner: the order of its ring, and the cost of its padding."""

import pytest
import torch

import cudascope
from pagewise.experiments.flat_gemm_trace import memory_in_use, ring_timeline
from pagewise.flash_decoding_plus_plus.flat_gemm import NUM_WARPS, TILE_K, on_tensor_cores
from pagewise.tools.roofline import Gpu


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("num_tiles", [1, 6, 17])
def test_the_ring_turns(num_stages, num_tiles):
    events = ring_timeline(num_stages, K=num_tiles * TILE_K)
    for what in ("copy", "multiply"):  # every tile of K once, by the warp whose turn it is
        done = sorted((event.k_tile, event.warp, event.turn) for event in events if event.what == what)
        assert done == [(tile, tile % NUM_WARPS, tile // NUM_WARPS) for tile in range(num_tiles)]
    for warp in range(min(NUM_WARPS, num_tiles)):
        own = [event for event in events if event.warp == warp]
        turns = len(own) // 2
        assert all(event.stage == event.turn % num_stages for event in own)
        order = [(event.what, event.turn) for event in own]
        expected = [("copy", turn) for turn in range(min(num_stages - 1, turns))]
        for turn in range(turns):  # the next copies are on their way before a tile is multiplied
            ahead = turn + num_stages - 1
            expected += [("copy", ahead)] * (ahead < turns) + [("multiply", turn)]
        assert order == expected


@pytest.mark.slow
def test_the_timeline_tells_the_warps_of_several_rows_apart():
    few, many = ring_timeline(3, K=9 * TILE_K, M=3), ring_timeline(3, K=9 * TILE_K, M=9)
    assert sorted(few) == sorted(many)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "padded_rows"), [(1, 8), (8, 8), (9, 16), (64, 64)])
def test_rows_are_padded_to_8_and_not_to_64(rows, padded_rows):
    N, K = 64, 256
    with cudascope.observe() as report:
        on_tensor_cores(torch.zeros(rows, K, dtype=torch.float16), torch.zeros(N, K, dtype=torch.float16))
    assert report.count("mma").requests * 32 * 8 * 16 == padded_rows * N * K  # a fragment is m32n8k16


def test_the_bytes_on_their_way_decide_how_much_of_a_memory_is_used():
    gpu = Gpu("a GPU", peak_flops=1e12, bandwidth=2.5e9, num_sms=2, memory=1e9)  # 1,000 bytes for each SM in 0.8 µs
    rings = {"one": (1, 1000), "half": (2, 500), "all": (3, 500), "more": (9, 500)}
    assert memory_in_use(rings, [gpu]) == {"a GPU": pytest.approx([0, 50, 100, 100])}
