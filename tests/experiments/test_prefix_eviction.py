"""The order of eviction: what the package's order finds, and why another order finds less."""

import pytest

from pagewise.experiments.prefix_eviction import (
    BLOCK_SIZE,
    INSTRUCTION,
    INSTRUCTIONS,
    POLICIES,
    NewestFirst,
    NewestFirstByName,
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
