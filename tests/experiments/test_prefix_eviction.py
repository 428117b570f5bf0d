"""The order of eviction: what the package's order finds, and why another order finds less."""

import pytest

from pagewise.experiments.prefix_eviction import (
    BLOCK_SIZE,
    INSTRUCTION,
    INSTRUCTIONS,
    POLICIES,
    NewestCopyNamed,
    NewestFirst,
    NewestFirstTakingNames,
    evicting,
    found,
    out_of_reach,
    refused,
    run,
)
from pagewise.paged_blocks.prefix_cache import ROOT


@pytest.mark.parametrize("name", POLICIES)
def test_a_large_pool_finds_all_but_the_first_use_of_each_instruction(name):
    manager = run(POLICIES[name], 4096)
    blocks = INSTRUCTION // BLOCK_SIZE
    best = 100 * (300 - INSTRUCTIONS) * blocks / (300 * (blocks + 1))
    assert found(manager) == pytest.approx(best)
    assert out_of_reach(manager) == 0


def test_ends_first_finds_most_and_leaves_no_block_out_of_reach():
    ours, beginnings, newest = (run(policy, 96) for policy in POLICIES.values())
    assert out_of_reach(ours) == 0 < out_of_reach(beginnings)
    assert found(ours) > max(found(beginnings), found(newest))


@pytest.mark.slow
def test_more_memory_finds_less_only_while_old_followers_keep_the_names_of_new_copies():
    pools = 48, 64, 96
    kept, taken = ([run(policy, n) for n in pools] for policy in (NewestFirst, NewestFirstTakingNames))
    assert [round(found(each)) for each in kept] == [33, 26, 16]
    assert [round(refused(each)) for each in kept] == [9, 36, 64]
    assert [round(found(each)) for each in taken] == [34, 35, 36]
    assert [refused(each) for each in taken] == [0, 0, 0]
    assert found(run(NewestFirstTakingNames, 4096)) == found(run(NewestFirst, 4096))


@pytest.mark.parametrize("policy", [NewestFirst, NewestFirstTakingNames])
def test_refused_blocks_are_those_that_hold_no_prefix_after_their_commit(policy):
    computed = nameless = 0

    class Counting(policy):
        def register(self, sequence, num_computed):
            nonlocal computed, nameless
            first = sequence.num_computed // BLOCK_SIZE
            super().register(sequence, num_computed)
            new = sequence.block_table[first : num_computed // BLOCK_SIZE]
            computed, nameless = computed + len(new), nameless + sum(self.prefix(block) is None for block in new)

    assert refused(run(Counting, 64)) == pytest.approx(100 * nameless / computed)


def test_a_name_that_was_taken_over_survives_its_first_owner():
    cache = NewestCopyNamed()
    cache.register(2, cache.register(1, ROOT, [1]), [2])
    cache.forget(1)
    new = cache.register(4, again := cache.register(3, ROOT, [1]), [2])
    cache.forget(2)
    assert cache.find(again, [2]) is new
    cache.forget(4)
    assert cache.find(again, [2]) is None


@pytest.mark.parametrize(("name", "choose"), [("oldest chain, its end first", 0), ("newest block first", -1)])
def test_an_order_of_your_own_is_the_packages_if_it_chooses_the_same(name, choose):
    assert found(run(evicting(lambda free: free[choose]), 96)) == found(run(POLICIES[name], 96))


@pytest.mark.slow
def test_an_order_that_knows_what_is_never_asked_again_beats_every_order_by_age():
    deepest = found(run(evicting(lambda free: max(free, key=lambda pair: pair[1])), 96))
    assert deepest > 10 + max(found(run(policy, 96)) for policy in POLICIES.values())


def test_an_order_must_choose_one_of_the_pairs():
    with pytest.raises(ValueError, match="choose must return one of the pairs that it gets, got 3"):
        run(evicting(lambda free: 3), 32)
