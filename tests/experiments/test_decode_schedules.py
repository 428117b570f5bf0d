"""Schedules of ragged decode batches: all work once, no place twice, the libraries' rules as they state them."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewise.experiments import decode_schedules
from pagewise.experiments.decode_schedules import (
    AT_ONCE,
    BATCHES,
    IN_FLIGHT,
    KV_HEADS,
    LATENCY,
    LAUNCH,
    SATURATING,
    SCHEDULES,
    START,
    TILE,
    Share,
    decode_seconds,
    equal_shares,
    ideal,
    of_ideal,
    simulate,
)
from pagewise.tools.roofline import H200
from pagewise.tools.sizes import cdiv

LENGTHS = st.lists(st.integers(1, 40_000), min_size=1, max_size=8)


@pytest.mark.parametrize(
    "cut", [*SCHEDULES.values(), lambda lengths: equal_shares(lengths, start=0)], ids=lambda cut: cut.__name__
)
@settings(max_examples=20)
@given(lengths=LENGTHS)
def test_every_tile_is_read_once_for_each_kv_head(cut, lengths):
    read = Counter()
    for program in cut(lengths):
        for sequence, tiles in program:
            assert tiles > 0
            read[sequence] += tiles
    assert read == {b: KV_HEADS * cdiv(n, TILE) for b, n in enumerate(lengths)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_beats_the_ideal_and_no_place_works_twice_at_a_time(name):
    for lengths in BATCHES.values():
        programs = SCHEDULES[name](lengths)
        runs = simulate(programs)
        assert Counter(run.sequence for run in runs) == Counter(share.sequence for p in programs for share in p)
        assert max(run.stop for run in runs) >= ideal(lengths)
        for place in range(AT_ONCE):
            spans = sorted((run.start, run.stop) for run in runs if run.sm == place)
            assert all(first[1] <= then[0] for first, then in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("programs", "at_once", "saturating", "runs"),  # a run: start, stop, sequence
    [
        ([[Share(0, 3), Share(1, 2)], [Share(2, 9)]], 1, 1, [(0, 4, 0), (4, 7, 1), (7, 17, 2)]),
        # sequence 0 reads 2 tiles at half of the bandwidth, then 6 at all of it
        ([[Share(0, 7)], [Share(1, 1)]], 2, 1, [(0, 5, 0), (0, 2, 1)]),
        # half of 8: at most twice as fast as when 8 programs share the bandwidth
        ([[Share(0, 7)]], 8, 4, [(0, 4, 0)]),
    ],
    ids=["pieces one after the other", "faster while others are idle", "no faster than a program can"],
)
def test_the_runs_of_programs(programs, at_once, saturating, runs):
    found = simulate(programs, at_once=at_once, saturating=saturating)
    assert [(run.start, run.stop, run.sequence) for run in found] == runs


def test_the_bandwidth_is_full_from_59_programs_on():
    tiles = 1000
    for programs, share in ((SATURATING, 1.0), (2 * SATURATING, 1.0), (SATURATING // 2, SATURATING // 2 / SATURATING)):
        stop = simulate([[Share(0, tiles)]] * programs)[-1].stop
        assert programs * (tiles + START) / AT_ONCE / stop == pytest.approx(share)
    assert SATURATING == 59


def test_flash_attention_2_cuts_for_the_longest_sequence_or_not_at_all():
    pieces = [program[0] for program in SCHEDULES["FlashAttention-2's heuristic"]([8192] * 4 + [64])]
    assert sorted({(p.sequence, p.tiles) for p in pieces}) == [
        *((b, n) for b in range(4) for n in (18, 22)),
        (4, 1),
    ]  # 6 splits
    short = SCHEDULES["FlashAttention-2's heuristic"]([8192] * 4 + [30 * TILE])[-2:]
    assert short == [[Share(4, 22)], [Share(4, 8)]]  # pieces as large as the others', not as many
    many = [8192] * 27  # 216 programs: 0.82 of the places
    assert SCHEDULES["FlashAttention-2's heuristic"](many) == SCHEDULES["not split"](many)


def test_flash_attention_3_gives_a_place_1_1_of_the_mean_at_most_and_the_largest_first():
    lengths = BATCHES["16 of 0.5–64 k"]
    sizes = [program[0].tiles for program in SCHEDULES["FlashAttention-3's rule"](lengths)]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= 1.1 * ideal(lengths) + 1
    alone = SCHEDULES["FlashAttention-3's rule"]([315 * TILE])  # 9.5 tiles for each place
    assert max(program[0].tiles for program in alone) == 11


def test_equal_ranges_of_tiles_differ_by_a_tile():
    for lengths in BATCHES.values():
        shares = [sum(share.tiles for share in p) for p in equal_shares(lengths, start=0)]
        assert max(shares) - min(shares) <= 1


def test_mixed_lengths_span_what_they_say_and_are_the_same_every_time():
    lengths = decode_schedules.mixed(16, 512, 65536)
    assert (min(lengths), max(lengths), len(lengths)) == (512, 65536, 16)
    assert lengths == BATCHES["16 of 0.5–64 k"] != sorted(lengths)


def test_one_long_sequence_is_what_one_number_of_splits_cannot_serve():
    reached = {name: [of_ideal(n, cut(n)) for n in BATCHES.values()] for name, cut in SCHEDULES.items()}
    alike, mixed, one_long, many = reached["FlashAttention-2's heuristic"]
    assert one_long < 0.2
    assert min(alike, mixed, many) > 0.8  # the programs that still work have the bandwidth to themselves


def test_flash_attention_3s_rule_is_nearly_as_good_as_equal_ranges():
    for lengths in BATCHES.values():
        rule, ranges = (
            of_ideal(lengths, SCHEDULES[name](lengths)) for name in ("FlashAttention-3's rule", "equal ranges")
        )
        assert min(rule, ranges) > 0.95
        assert ranges - rule < 0.02


def test_a_decode_step_is_flat_while_launches_take_longer_than_reading():
    short, longer, long = (decode_seconds(S, 8, H200, split=True) for S in (512, 8192, 131072))
    assert short > 2 * LAUNCH
    assert longer < 2 * short
    assert long > 13 * short


def test_a_decode_step_that_is_not_split_reads_at_the_rate_of_its_programs():
    S = 65536
    reading = decode_seconds(S, 8, H200, split=False) - LAUNCH
    assert reading == pytest.approx(S * 512 / (IN_FLIGHT / LATENCY))
    assert decode_seconds(S, 8, H200, split=True) == pytest.approx(2 * LAUNCH + 8 * S * 512 / H200.bandwidth, rel=0.05)
