"""Pictures of a memory of slots, and of what a prefix cache finds."""

import drawn
from matplotlib.colors import to_rgb

from pagewise.figures import found_over_pools, memory_pictures


def test_a_picture_colours_the_slots_with_tokens_and_counts_their_chats(shown):
    slots = [("used", 0), ("used", 0), ("reserved", 0), ("used", 3), *[("idle", None)] * 6]
    grey = to_rgb("#e2e2ea")
    memory_pictures([slots, [("idle", None)] * 10])
    assert drawn.titles(shown[0]) == [
        "the longest chat is reserved: 2 chats, 30% of the memory holds tokens",
        "blocks: 0 chats, 0% of the memory holds tokens",
    ]
    picture = shown[0].axes[0].images[0].get_array()
    kinds = {grey: "reserved", (1.0, 1.0, 1.0): "idle"}
    assert [kinds.get(tuple(map(float, picture[0, i])), "used") for i in range(10)] == [state for state, _ in slots]


def test_rates_are_curves_and_the_best_is_a_level(shown):
    found_over_pools([32, 64], {"ends first": [20.0, 70.0], "beginnings first": [10.0, 60.0]})
    (ax,) = shown[0].axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[20, 70], [10, 60], [70, 70]]
