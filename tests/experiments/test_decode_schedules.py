"""Schedules of ragged decode batches: all work once, no slot twice, the libraries' rules as they state them."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewise.experiments import decode_schedules
from pagewise.experiments.decode_schedules import (
    BATCHES,
    KV_HEADS,
    SCHEDULES,
    SLOTS,
    START,
    TILE,
    Share,
    equal_shares,
    ideal,
    of_ideal,
    simulate,
)
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
def test_nothing_beats_the_ideal_and_no_slot_works_twice_at_a_time(name):
    for lengths in BATCHES.values():
        programs = SCHEDULES[name](lengths)
        runs = simulate(programs)
        assert sum(run.stop - run.start for run in runs) == sum(s.tiles + START for p in programs for s in p)
        assert max(run.stop for run in runs) >= ideal(lengths)
        for slot in range(SLOTS):
            spans = sorted((run.start, run.stop) for run in runs if run.sm == slot)
            assert all(first[1] <= then[0] for first, then in itertools.pairwise(spans))


def test_a_program_reads_its_pieces_one_after_the_other():
    runs = simulate([[Share(0, 3), Share(1, 2)], [Share(2, 9)]], num_slots=1)
    assert [(run.start, run.stop, run.sequence) for run in runs] == [(0, 4, 0), (4, 7, 1), (7, 17, 2)]


def test_flash_attention_2_cuts_for_the_longest_sequence_or_not_at_all():
    pieces = [program[0] for program in SCHEDULES["FlashAttention-2's heuristic"]([8192] * 4 + [64])]
    assert sorted({(p.sequence, p.tiles) for p in pieces}) == [
        *((b, n) for b in range(4) for n in (18, 22)),
        (4, 1),
    ]  # 6 splits
    short = SCHEDULES["FlashAttention-2's heuristic"]([8192] * 4 + [30 * TILE])[-2:]
    assert short == [[Share(4, 22)], [Share(4, 8)]]  # pieces as large as the others', not as many
    many = [8192] * 27  # 216 programs: 0.82 of the slots
    assert SCHEDULES["FlashAttention-2's heuristic"](many) == SCHEDULES["not split"](many)


def test_flash_attention_3_gives_a_slot_1_1_of_the_mean_at_most_and_the_largest_first():
    lengths = BATCHES["16 of 0.5–64 k"]
    sizes = [program[0].tiles for program in SCHEDULES["FlashAttention-3's rule"](lengths)]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= 1.1 * ideal(lengths) + 1
    alone = SCHEDULES["FlashAttention-3's rule"]([315 * TILE])  # 9.5 tiles for each slot
    assert max(program[0].tiles for program in alone) == 11


def test_equal_ranges_of_tiles_differ_by_a_tile():
    for lengths in BATCHES.values():
        shares = [sum(share.tiles for share in p) for p in equal_shares(lengths, start=0)]
        assert max(shares) - min(shares) <= 1


def test_mixed_lengths_span_what_they_say_and_are_the_same_every_time():
    lengths = decode_schedules.mixed(16, 512, 65536)
    assert (min(lengths), max(lengths), len(lengths)) == (512, 65536, 16)
    assert lengths == BATCHES["16 of 0.5–64 k"] != sorted(lengths)


def test_where_equal_ranges_win_and_where_they_win_nothing():
    reached = {name: [of_ideal(n, cut(n)) for n in BATCHES.values()] for name, cut in SCHEDULES.items()}
    alike, *ragged = zip(*(reached[name] for name in ("FlashAttention-2's heuristic", "equal ranges")), strict=True)
    assert alike[0] == alike[1]  # of equal lengths
    assert all(shares > 0.94 and heuristic < 0.6 for heuristic, shares in ragged)


def test_work_that_counts_starts_is_shared_better_than_tiles_are():
    for lengths in list(BATCHES.values())[1:]:
        tiles, work = (of_ideal(lengths, equal_shares(lengths, start)) for start in (0, START))
        assert work > 0.95 > tiles
