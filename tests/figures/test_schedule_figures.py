"""Programs over time and last waves: what is idle is white, what is chosen is marked."""

import drawn
import numpy as np
from matplotlib.colors import to_rgb

from pagewise.figures import programs_over_time
from pagewise.figures.palette import BLUE, SAND
from pagewise.tools.schedule import Run


def test_a_place_is_dark_while_it_reads_the_marked_sequence_and_white_when_idle(shown):
    panels = {"uneven": [Run(0, 0, 4, 0), Run(1, 0, 1, 1)], "even": [Run(0, 0, 2, 0), Run(1, 0, 1, 0), Run(1, 1, 2, 1)]}
    programs_over_time(panels, 2, ideal=2.0, marked=0, title="Who works?")
    uneven, even = (np.asarray(ax.images[0].get_array()) for ax in shown[0].axes)
    middle = uneven.shape[1] // 8  # of each quarter, so of one unit of time
    first, second, idle = to_rgb(BLUE), to_rgb(SAND), (1, 1, 1)
    colours = [[tuple(row[(2 * t + 1) * middle]) for t in range(4)] for row in uneven]
    assert colours == [[first] * 4, [second] + [idle] * 3]
    assert [tuple(even[1][(2 * t + 1) * middle]) for t in range(4)] == [first, second, idle, idle]
    titles = drawn.titles(shown[0])
    assert titles == ["uneven: 50% of the bandwidth", "even: 100% of the bandwidth"]


def test_a_piece_too_short_to_see_is_drawn(shown):
    runs = [Run(0, 0, 1, 0), Run(1, 0, 10_000, 1)]
    programs_over_time({"a": runs}, 2, ideal=5000.5, marked=0, title="Who works?")
    image = np.asarray(shown[0].axes[0].images[0].get_array())
    assert tuple(image[0, 0]) == to_rgb(BLUE)
    assert tuple(image[0, 1]) == (1, 1, 1)
