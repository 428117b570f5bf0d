"""The figures of exchanges: who holds which heads of which tokens, and when data are under way."""

from typing import NamedTuple

import pytest
from matplotlib.colors import to_rgb

from pagewise.figures import all_to_all, memory_on_each, prompt_and_token
from pagewise.figures.exchanges import PROCESSES
from pagewise.tools.roofline import H100


class Span(NamedTuple):
    name: str
    start: float
    seconds: float


def test_rows_become_columns_and_frames_mark_what_one_process_sends(shown):
    all_to_all(2, 4, marked=1, title="Who sends what?")
    boxes = [p for p in shown[0].axes[0].patches if p.get_width() == 1]
    right = max(p.get_x() for p in boxes) - 3
    held = {(p.get_x() - right, p.get_y()): p.get_facecolor()[:3] for p in boxes if p.get_x() >= right}
    assert all(held[head, piece] == to_rgb(PROCESSES[head // 2]) for head in range(4) for piece in range(2))
    before = {(p.get_x(), p.get_y()): p.get_facecolor()[:3] for p in boxes if p.get_x() < right}
    assert all(before[head, piece] == to_rgb(PROCESSES[piece]) for head in range(4) for piece in range(2))
    frames = [(round(p.get_x() - 0.07, 6), round(p.get_y() - 0.07)) for p in shown[0].axes[0].patches if p not in boxes]
    assert frames == [(0, 1), (right, 1), (1, 1), (right + 1, 1)]  # of tokens 1, the heads that are not its own


@pytest.mark.parametrize(("processes", "heads"), [(3, 4), (5, 5)])
def test_heads_that_cannot_be_shared_out_are_refused(processes, heads):
    with pytest.raises(ValueError, match=f"num_heads must be a multiple of num_processes.*{heads} and {processes}"):
        all_to_all(processes, heads, marked=0, title="Who sends what?")


def test_the_title_says_from_how_many_gpus_on_a_sequence_fits(shown, shapes_unchecked):
    memory_on_each(16e9, 131e9, H100)
    memory_on_each(81e9, 1e9, H100)
    fits, never = (figure.axes[0].get_title(loc="left") for figure in shown)
    assert fits.startswith("The sequence fits from 4 GPUs on")
    assert never.startswith("The sequence fits on none of them")


def test_a_token_costs_the_sum_of_its_parts(shown, shapes_unchecked):
    prompt_and_token(
        {"slow": 75.2, "fast": 9.4}, 26.0, {"slow": (0.25, 0.25, 0.75), "fast": (4.0, 0.5, 0.5)}, title="Which?"
    )
    prompt, token = shown[0].axes
    assert [text.get_text() for text in prompt.texts] == ["75.2", "9.4"]
    assert [text.get_text() for text in token.texts] == ["1.25", "5"]
