"""Every figure has a description in words. The notebook stores it as text/plain, and the book takes it from there."""

import inspect

import pytest
import torch

from pagewise import figures
from pagewise.figures.charts import bars, heatmaps, lines

DisplayFormatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter
DRAWN = {name: of for name, of in vars(figures).items() if inspect.isfunction(of) and name not in ("show", "stepper")}


def words(figure) -> str:
    """Return the text/plain that a notebook stores."""
    return DisplayFormatter().format(figure, include=["text/plain"])[0]["text/plain"]


TITLED = [name for name, of in DRAWN.items() if {"title", "suptitle"} & {*inspect.signature(of).parameters}]


@pytest.mark.parametrize("name", TITLED)
def test_every_drawing_takes_an_alternative_text_or_computes_it(name):
    assert "alt" in inspect.signature(DRAWN[name]).parameters or name.endswith("_calculator")


def test_an_alternative_text_is_what_the_notebook_keeps(shown):
    curves = {"naive": [1.0, 4.0], "cached": [1.0, 2.0]}
    names = {"title": "Which is slower?", "xlabel": "tokens", "ylabel": "ms"}
    lines([1, 2], curves, **names, alt="Without a cache the time rises fourfold.")
    assert words(shown[0]) == "Without a cache the time rises fourfold."


def test_without_one_it_is_the_title_the_axes_and_the_legend(shown, shapes_unchecked):
    bars(["A100"], {"used": [1.0], "wasted": [2.0]}, title="How full?", ylabel="GB")
    assert words(shown[0]) == "How full? GB: used, wasted."


def test_every_panel_is_named(shown, shapes_unchecked):
    panels = {"scores": torch.eye(2), "weights": torch.eye(2)}
    heatmaps(panels, xlabel="key", ylabel="query", suptitle="Who looks where?")
    assert words(shown[0]) == "Who looks where? scores. query over key. weights. key."


def test_equations_are_said_with_the_shape_of_each_matrix(shown, shapes_unchecked):
    a, b = torch.ones(2, 3), torch.ones(3, 1)
    figures.equations([[("a", a), "×", ("$b^T$", b), "=", ("ab", a @ b)], [("half", a / 2)]], title="What comes out?")
    assert words(shown[0]) == "a [2, 3] × b^T [3, 1] = ab [2, 1]; half [2, 3]. All numbers are inside."
