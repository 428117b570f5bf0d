"""The schedule over SMs: in the order of the grid, no SM runs two at once, no free SM waits."""

import itertools

from pagewise.tools.schedule import Run, schedule


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
