"""What the runner saw of the flat GEMM: its ring turns as it must, and padding costs what it must."""

import pytest

from pagewise.experiments.flat_gemm_trace import multiplications, ring_timeline
from pagewise.flash_decoding_plus_plus.flat_gemm import NUM_WARPS, TILE_K


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


def test_the_timeline_tells_the_warps_of_several_rows_apart():
    few, many = ring_timeline(3, K=9 * TILE_K, M=3), ring_timeline(3, K=9 * TILE_K, M=9)
    assert sorted(few) == sorted(many)


def test_padding_to_8_instead_of_64():
    useful, padded = multiplications(1)
    assert padded == 8 * useful
    assert multiplications(1, pad_to=64) == (useful, 64 * useful)
    assert multiplications(8) == (8 * useful, 8 * useful)
    assert multiplications(9) == (9 * useful, 16 * useful)
