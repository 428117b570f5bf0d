"""The order of eviction: what the package's order finds, and why another order finds less."""

import pytest

from pagewise.experiments.prefix_eviction import (
    BLOCK_SIZE,
    INSTRUCTION,
    INSTRUCTIONS,
    POLICIES,
    NewestFirst,
    NewestFirstByName,
    evicting,
    found,
    out_of_reach,
    run,
)


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


def test_names_alone_find_followers_whose_beginning_was_computed_again():
    rates = [[found(run(policy, n)) for n in (48, 96)] for policy in (NewestFirst, NewestFirstByName)]
    assert rates[0][0] > rates[0][1]
    assert rates[1][0] < rates[1][1]
    assert found(run(NewestFirstByName, 4096)) == found(run(NewestFirst, 4096))


@pytest.mark.parametrize(("name", "choose"), [("oldest chain, its end first", 0), ("newest block first", -1)])
def test_an_order_of_your_own_is_the_packages_if_it_chooses_the_same(name, choose):
    assert found(run(evicting(lambda free: free[choose]), 96)) == found(run(POLICIES[name], 96))


def test_an_order_that_knows_what_is_never_asked_again_beats_every_order_by_age():
    deepest = found(run(evicting(lambda free: max(free, key=lambda pair: pair[1])), 96))
    assert deepest > 10 + max(found(run(policy, 96)) for policy in POLICIES.values())


def test_an_order_must_choose_one_of_the_pairs():
    with pytest.raises(ValueError, match="choose must return one of the pairs that it gets, got 3"):
        run(evicting(lambda free: 3), 32)
