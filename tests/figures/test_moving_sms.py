"""The stepper of the SMs."""

import pytest
from stepped import captions

from pagewise.figures import schedules, sm_steps


def steps():
    v1 = [(b, n) for b, n in enumerate((4096, 512)) for _ in range(8)]
    v2 = [(b, 512) for b, n in enumerate((4096, 512)) for _ in range(8) for _ in range(0, n, 512)]
    return sm_steps({"v1": v1, "v2": v2}, 132, title="How many SMs work?", alt="Squares and curves.")


@pytest.mark.slow
def test_steps_stand_where_something_changes():
    assert captions(steps()) == [
        "At time 0. v1: 16 of 132 SMs busy, v2: 72 of 132 SMs busy.",
        "At time 512. v1: 8 of 132 SMs busy, v2: 0 of 132 SMs busy; v2 done.",
        "At time 4,096. v1: 0 of 132 SMs busy, v2: 0 of 132 SMs busy; v1 and v2 done.",
    ]


@pytest.mark.slow
def test_steps_are_at_most_so_many_and_end_at_the_end(monkeypatch):
    monkeypatch.setattr(schedules, "STEPS", 2)
    said = captions(steps())
    assert len(said) == 2
    assert said[-1].endswith("v1 and v2 done.")
