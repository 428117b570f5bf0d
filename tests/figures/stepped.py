"""The steps of a stepper: what they say, and the figures that they draw."""

import html
import re
from contextlib import contextmanager

import pytest
from matplotlib.figure import Figure

from pagewise.figures.steps import Embedded


def captions(steps):
    """Return the caption of each step."""
    return [html.unescape(caption) for caption in re.findall(r'data-caption="([^"]*)"', steps._repr_html_())]


def shown_without_scripts(steps):
    """Return the number of the step, counted from 0, whose picture is shown without scripts."""
    return int(re.search(r"This is picture (\d+) of", untrusted(steps._repr_html_()))[1]) - 1


def untrusted(markup):
    """Return what GitHub, and Jupyter in a notebook that it does not trust, leave of HTML."""
    return re.sub(r"<(script|style)\b.*?</\1>| hidden\b", "", markup, flags=re.DOTALL)


@contextmanager
def figures_drawn(module):
    """Yield the list of the figures that steppers of a module draw, one for each step. They are not rendered."""
    found = []

    def stepper(frames, draw, **_):
        for _, frame in frames:
            found.append(Figure())
            draw(found[-1], frame)
        return Embedded("", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "stepper", stepper)
        yield found
