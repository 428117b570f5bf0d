"""A kernel without one of its barriers: the checker names each of them, and a repeated query shows none."""

import pytest

from pagewise.experiments.missing_barriers import BARRIERS, answers, finding


@pytest.mark.slow
@pytest.mark.parametrize("barrier", BARRIERS)
def test_the_check_names_the_race_of_each_missing_barrier(barrier):
    found = " ".join(finding(barrier).split())
    assert found.startswith("race: paged_attention_v1_kernel")
    assert "with no barrier between" in found


@pytest.mark.slow
def test_the_whole_kernel_has_no_finding_and_answers_right():
    assert finding(None) == "no finding"
    assert [row.wrong for row in answers(None, "AB")] == [0, 0]


@pytest.mark.slow
def test_a_race_hides_until_the_second_query():
    rows = answers("after load_query", "AABB")
    assert [row.wrong > 0 for row in rows] == [False, False, True, False]
