"""Clients of an engine, counted in steps: nobody waits for an answer that is not his with a continuous batch."""

import pytest

from pagewise.experiments.clients import ANSWERS, ARRIVALS, pieces_by_step, serve


@pytest.mark.slow
def test_one_at_a_time_each_waits_for_all_before_it():
    clients = serve("naive")
    assert [client.done for client in clients] == [sum(ANSWERS[: i + 1]) for i in range(len(ANSWERS))]


def test_with_a_seat_for_everyone_the_first_token_comes_in_the_next_step():
    clients = serve("continuous")
    assert [client.first - client.asked for client in clients] == [1] * len(ARRIVALS)
    assert [client.done for client in clients] == [a + n for a, n in zip(ARRIVALS, ANSWERS, strict=True)]


@pytest.mark.slow
def test_drafts_change_the_steps_and_not_the_text():
    slow, fast = (pieces_by_step("A page of keys and values ", drafts=drafts) for drafts in (0, 4))
    assert "".join(slow) == "".join(fast)
    assert [len(piece) for piece in slow] == [1] * 64
    assert len(fast) < 32
