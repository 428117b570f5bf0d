"""A step's timeline: every span at its time and depth, from the step's own beginning."""

from typing import NamedTuple

from pagewise.figures import step_timelines


class Span(NamedTuple):
    name: str
    start: float
    seconds: float
    depth: int


SPANS = [Span("step", 7.0, 0.010, 0), Span("build batch", 7.001, 0.004, 1), Span("attention", 7.006, 0.002, 1)]


def test_spans_stand_at_their_time_and_depth(shown):
    step_timelines({"dense": SPANS, "paged": [Span("step", 3.0, 0.005, 0)]}, title="Where does a step's time go?")
    dense, paged = shown[0].axes
    boxes = [(round(b.get_x(), 6), b.get_y(), round(b.get_width(), 6)) for b in dense.patches]
    assert boxes == [(0.0, 0, 10.0), (1.0, 1, 4.0), (6.0, 1, 2.0)]
    assert [ax.get_title(loc="left") for ax in (dense, paged)] == ["dense: 10.0 ms", "paged: 5.0 ms"]
    assert dense.get_xlim() == paged.get_xlim()


def test_the_legend_names_what_is_drawn_and_nothing_else(shown):
    step_timelines({"dense": SPANS}, title="Where does a step's time go?")
    (legend,) = shown[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["step", "build batch", "attention"]
