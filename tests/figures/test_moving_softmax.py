"""The stepper of online softmax: what it says is what `Partial` computes, and a rise of m is two steps."""

import html
import math
import re

import pytest
import torch

from pagewise.figures.moving_softmax import softmax_steps
from pagewise.online_softmax import Partial

INF = math.inf
SCORES = torch.tensor([-INF, -INF, 1.0, 0.5, 2.0, -INF, 1.5, 3.0])
VALUES = torch.tensor([math.pi, 9.0, 1.0, 2.0, 3.0, 9.0, 4.0, 5.0])


def captions(scores=SCORES, values=VALUES, **options):
    steps = softmax_steps(Partial, scores, values, title="What happens?", alt="Scores and weights.", **options)
    return [html.unescape(caption) for caption in re.findall(r'data-caption="([^"]*)"', steps._repr_html_())]


def test_a_rise_of_the_maximum_first_shrinks_then_adds():
    said = captions(pieces=[2, 1, 1, 1, 1, 2])
    rises = [i for i, caption in enumerate(said) if "m rises" in caption]
    assert said[rises[0]] == (
        "Key 4: m rises from 1 to 2. First, all that was summed shrinks: l and acc times exp(1 − 2) = 0.368."
    )
    assert said[rises[0] + 1] == "Key 4, then: l grows by 1.000, acc by that times the value."
    assert said[rises[1] + 1] == "Keys 6 and 7, then: l grows by 0.223 + 1.000, acc by each times the value."
    assert len(said) == 1 + 6 + len(rises) + 1


def test_masked_keys_and_a_piece_of_nothing_else():
    said = captions(pieces=[2, 1, 1, 1, 1, 2])
    assert said[1] == "Keys 0 and 1: masked, so of weight 0; m stays −∞."
    assert "Key 5: masked, so of weight 0; nothing changes." in said
    assert "nan" not in " ".join(said)


@pytest.mark.parametrize("pieces", [[1] * 8, [8], [2, 3, 3]])
def test_the_end_is_attention(pieces):
    out = torch.softmax(SCORES, dim=0) @ VALUES
    assert captions(pieces=pieces)[-1] == f"All keys seen. Divide once, at the end: acc / l = {out:.3f}."


def test_a_row_without_visible_keys_ends_at_zero():
    assert captions(torch.full((3,), -INF), torch.ones(3), pieces=[1, 2])[-1].endswith("acc / l = 0.000.")
