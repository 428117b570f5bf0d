"""The schedule over SMs, and its stepper."""

import html
import itertools
import re

from pagewise.figures import moving_sms
from pagewise.figures.moving_sms import Run, schedule, sm_steps


def test_each_thread_block_takes_the_sm_that_is_free_first():
    runs = schedule([(0, 5), (0, 2), (1, 2), (1, 1)], num_sms=2)
    assert runs == [Run(0, 0, 5, 0), Run(1, 0, 2, 0), Run(1, 2, 4, 1), Run(1, 4, 5, 1)]


def test_no_sm_runs_two_at_once_and_all_work_is_done():
    grid = [(i % 3, 1 + (7 * i) % 11) for i in range(100)]
    runs = schedule(grid, num_sms=13)
    assert sum(run.stop - run.start for run in runs) == sum(tokens for _, tokens in grid)
    for sm in range(13):
        spans = sorted((run.start, run.stop) for run in runs if run.sm == sm)
        assert all(first[1] <= then[0] for first, then in itertools.pairwise(spans))
    longest, mean = max(run.stop for run in runs), sum(tokens for _, tokens in grid) / 13
    assert longest <= mean + 11  # a free SM never waits while there is work


def captions():
    v1 = [(b, n) for b, n in enumerate((4096, 512)) for _ in range(8)]
    v2 = [(b, 512) for b, n in enumerate((4096, 512)) for _ in range(8) for _ in range(0, n, 512)]
    steps = sm_steps({"v1": v1, "v2": v2}, 132, title="How many SMs work?", alt="Squares and curves.")
    return [html.unescape(text) for text in re.findall(r'data-caption="([^"]*)"', steps._repr_html_())]


def test_steps_stand_where_something_changes():
    assert captions() == [
        "At time 0. v1: 16 of 132 SMs busy, v2: 72 of 132 SMs busy.",
        "At time 512. v1: 8 of 132 SMs busy, v2: 0 of 132 SMs busy; v2 done.",
        "At time 4,096. v1: 0 of 132 SMs busy, v2: 0 of 132 SMs busy; v1 and v2 done.",
    ]


def test_steps_are_at_most_so_many_and_end_at_the_end(monkeypatch):
    monkeypatch.setattr(moving_sms, "STEPS", 2)
    said = captions()
    assert len(said) == 2
    assert said[-1].endswith("v1 and v2 done.")
