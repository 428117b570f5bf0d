"""The stepper of online softmax: what it says is what `Partial` computes, and a rise of m is two steps."""

import math

import pytest
import torch
from matplotlib.colors import to_hex
from stepped import captions, figures_drawn

from pagewise.figures import moving_softmax
from pagewise.figures.moving_softmax import softmax_steps
from pagewise.online_softmax import Partial

INF = math.inf
SCORES = torch.tensor([-INF, -INF, 1.0, 0.5, 2.0, -INF, 1.5, 3.0])
VALUES = torch.tensor([math.pi, 9.0, 1.0, 2.0, 3.0, 9.0, 4.0, 5.0])


def said_of(scores=SCORES, values=VALUES, **options):
    steps = softmax_steps(Partial, scores, values, title="What happens?", alt="Scores and weights.", **options)
    return captions(steps)


@pytest.mark.slow
def test_a_rise_of_the_maximum_first_shrinks_then_adds():
    said = said_of(pieces=[2, 1, 1, 1, 1, 2])
    rises = [i for i, caption in enumerate(said) if "m rises" in caption]
    assert said[rises[0]] == (
        "Key 4: m rises from 1 to 2. First, the old sums shrink: l and acc are multiplied by exp(1 − 2) = 0.368."
    )
    assert said[rises[0] + 1] == "Key 4 is added: l grows by 1.000, and acc by 1.000 times the value of key 4."
    assert said[rises[1] + 1] == (
        "Keys 6 and 7 are added: l grows by 0.223 + 1.000, and acc by each of these weights times its key's value."
    )
    assert len(said) == 1 + 6 + len(rises) + 1


@pytest.mark.slow
def test_masked_keys_and_a_piece_of_nothing_else(unrendered):
    said = said_of(pieces=[2, 1, 1, 1, 1, 2])
    assert said[1] == "Keys 0 and 1 are masked, so their weight is 0. m stays −∞."
    assert "Key 5 is masked, so its weight is 0. Nothing changes." in said
    assert "nan" not in " ".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [[1] * 8, [8], [2, 3, 3]])
def test_the_end_is_attention(pieces, unrendered):
    out = torch.softmax(SCORES, dim=0) @ VALUES
    assert said_of(pieces=pieces)[-1] == f"All keys seen. Divide once, at the end: acc / l = {out:.3f}."


@pytest.mark.slow
def test_a_row_without_visible_keys_ends_at_zero():
    assert said_of(torch.full((3,), -INF), torch.ones(3), pieces=[1, 2])[-1].endswith("acc / l = 0.000.")


@pytest.mark.slow
def test_keys_that_have_not_arrived_are_one_grey_field_and_each_key_has_its_value():
    with figures_drawn(moving_softmax) as figures:
        softmax_steps(Partial, SCORES, VALUES, pieces=[2, 1, 1, 1, 1, 2], title="What happens?", alt="Scores.")
    for ax in figures[2].axes[:2]:  # three keys have arrived
        (field,) = [p for p in ax.patches if to_hex(p.get_facecolor()) == moving_softmax.NOT_ARRIVED]
        assert (field.get_x(), field.get_x() + field.get_width()) == (2.5, 7.5)
    assert [label.get_text() for label in figures[2].axes[1].get_xticklabels()][2:4] == ["2\n1", "3\n2"]
