"""The stepper of key ranges: what is read, what will be read, and which SMs work."""

import numpy as np
import pytest
from stepped import captions, figures_drawn

from pagewise.figures import key_range_steps, moving_keys
from pagewise.figures.moving_keys import FUTURE, NOW, READ

CUTS = {"not cut": (1, 80.0), "cut in 4": (4, 20.0)}


def steps(**sizes):
    sizes = {"heads": 2, "keys": 4096, "num_sms": 10} | sizes
    return key_range_steps(CUTS, title="Who reads?", alt="Keys and SMs.", **sizes)


@pytest.mark.slow
def test_the_steps_reach_the_end_of_both_cuts():
    said = captions(steps())
    assert said[1] == (
        "After 10 µs. not cut: 12% of the keys are read, 2 SMs busy; cut in 4: 50% of the keys are read, 8 SMs busy."
    )
    assert said[2].endswith("25% of the keys are read, 2 SMs busy; cut in 4: 100% of the keys are read, done.")
    assert said[-1].startswith("After 80 µs. not cut: 100% of the keys are read, done")


@pytest.fixture(scope="module")
def pictures():
    """Return the figure of each step."""
    with figures_drawn(moving_keys) as figures:
        steps()
    return figures


def states(figure, panel):
    return np.asarray(figure.axes[2 * panel].images[0].get_array())


def test_keys_are_white_before_they_are_read(pictures):
    assert not (states(pictures[0], 1) == READ).any()
    row = states(pictures[1], 1)[0]  # each of 4 ranges is read to its half
    for quarter in row.reshape(4, -1):
        assert set(quarter[:32]) == {READ}
        assert set(quarter[32:34]) == {NOW}
        assert set(quarter[34:]) == {FUTURE}
    assert (states(pictures[2], 1) == READ).all()


def squares(figure, panel):
    return np.ma.compressed(figure.axes[2 * panel + 1].collections[0].get_array().ravel()).tolist()


def test_sms_are_idle_without_a_range_and_after_its_end(pictures):
    assert squares(pictures[1], 1) == [NOW] * 8 + [FUTURE] * 2
    assert squares(pictures[2], 1) == [FUTURE] * 10


def test_more_ranges_than_sms_are_refused():
    with pytest.raises(ValueError, match="ranges must be at most num_sms = 7"):
        steps(num_sms=7)
